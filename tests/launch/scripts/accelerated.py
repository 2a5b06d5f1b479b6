"""Accelerate with accumulation over two micro-batches: a bad one in step 6 of 10."""

from __future__ import annotations

import torch
from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
from tests.launch.scripts.toys import batches, digest, loss_of, model

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
gates = accelerator.prepare(model())
optimizer = accelerator.prepare(torch.optim.AdamW(gates.parameters(), lr=1e-3))
for ids in batches(20, 12):
    with accelerator.accumulate(gates):
        loss = loss_of(gates(ids), ids)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(gates.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(digest(accelerator.unwrap_model(gates)))
