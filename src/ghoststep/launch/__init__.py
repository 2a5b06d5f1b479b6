"""`ghoststep run`: a watch around a training script that nobody edits.

The script is started as the plain command that it is, with a folder of ours on PYTHONPATH whose `sitecustomize` waits for torch.
So argv, `__main__`, tracebacks and exit codes are Python's own, and processes that the script starts are reached in the same way.
Only the modules that a process needs are imported: `bootstrap` in every one, `discover` where torch is, the watch where training is.
"""
