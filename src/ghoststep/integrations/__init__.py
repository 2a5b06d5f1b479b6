"""The watch inside trainers that own the loop. Each module needs its trainer's library and is imported by the user only.

transformers, TRL    from ghoststep.integrations.transformers import GhoststepCallback
Lightning            from ghoststep.integrations.lightning import GhoststepCallback
Accelerate           nothing is needed, the loop is the user's:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with ghoststep.watch(accelerator.unwrap_model(model), optimizer.optimizer) as w:
        ...                                     # the loop, unchanged
"""
