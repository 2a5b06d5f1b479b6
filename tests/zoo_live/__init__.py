"""Every language model class of the installed transformers, built tiny on the CPU and put through the whole of `ghoststep.check`."""
