"""Instruments that run a live model: a setup's forward, its loss, its optimizer. Each leaves everything as it was.

`untouched` restores; `calling` finds out how the user's loss calls the model and where ids, hidden states and logits are.
"""
