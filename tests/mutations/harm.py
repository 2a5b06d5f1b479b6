"""Measures of harm that use no instrument of ghoststep: swap tokens, compare gradients, take steps.

Shapes: B examples, T positions, V tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.mutations.architectures import FIRST_WORD, PREFIX, Arch, Batch, Setup, V


def outputs(arch: Arch, setup: Setup, batch: Batch) -> Tensor:
    """Logits [B, T, V] in the model's own mode, with the same dropout each time."""
    torch.manual_seed(1)
    with torch.no_grad():
        return arch.logits(setup["model"], batch).float()


def influence(arch: Arch, setup: Setup, key: str = "") -> Tensor:
    """[B, T, B, T]: how far the logits of a target move when the token at a source is replaced by another word."""
    batch, key = setup["batches"][0], key or arch.ids_key
    base = outputs(arch, setup, batch)
    ids = batch[key]
    moved = torch.zeros(*ids.shape, *base.shape[:2])
    for b in range(ids.shape[0]):
        for s in range(ids.shape[1]):
            changed = ids.clone()
            changed[b, s] = FIRST_WORD + (int(ids[b, s]) + 17) % (V - FIRST_WORD - 4)
            moved[b, s] = (outputs(arch, setup, {**batch, key: changed}) - base).abs().amax(-1).nan_to_num(0.0)
    return moved


def real(arch: Arch, batch: Batch) -> Tensor:
    """[B, T] bool: positions of real tokens on the side of the logits."""
    found: Tensor = batch["input_ids"] != 0
    if arch.intent == "seq2seq":
        found = batch["labels"] != -100
    elif "attention_mask" in batch:
        found = found & (batch["attention_mask"] != 0)
    return found


def _share(moved: Tensor, forbidden: Tensor, allowed: Tensor) -> float:
    past = moved[allowed].max().item() if allowed.any() else 0.0
    worst = moved[forbidden].max().item() if forbidden.any() else 0.0
    return worst / past if past > 0 else (float("inf") if worst > 0 else 0.0)


def _grid(moved: Tensor) -> tuple[Tensor, Tensor]:
    """(same example [B, 1, B, 1], source before target [T, 1, T])."""
    B, T = moved.shape[:2]
    same = torch.eye(B, dtype=torch.bool)[:, None, :, None]
    before = (torch.arange(T)[:, None] < torch.arange(moved.shape[3]))[:, None]
    return same.expand(B, 1, B, 1), before


def future_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Largest movement by a later token over the largest by an earlier one."""
    moved = influence(arch, broken)
    same, before = _grid(moved)
    is_real = real(arch, broken["batches"][0])
    judged = is_real.clone()
    judged[:, : PREFIX if "prefix" in arch.traits else 0] = False  # a prefix may see itself
    both = is_real[:, :, None, None] & judged[None, None]
    after = before.permute(2, 1, 0)
    return _share(moved, (same & after & both), (same & before & both))


def padding_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Largest movement of a real position by a PAD over the largest by a real token."""
    batch = broken["batches"][0]
    moved = influence(arch, broken, "input_ids")
    pad = (batch["input_ids"] == 0)[:, :, None, None]
    target = torch.ones(moved.shape[2:], dtype=torch.bool)
    if arch.intent != "contrastive":
        target = real(arch, batch)
    same = _grid(moved)[0]
    return _share(moved, same & pad & target[None, None], same & ~pad & target[None, None])


def other_example_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Largest movement in another example over the largest in the own one."""
    moved = influence(arch, broken)
    same = _grid(moved)[0]
    return _share(moved, (~same).expand_as(moved), same.expand_as(moved))


def document_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Largest movement in a later document over the largest in the own one."""
    moved = influence(arch, broken)
    document = (broken["batches"][0]["position_ids"] == 0).cumsum(1)
    own = document[:, :, None, None] == document[None, None]
    same = _grid(moved)[0]
    return _share(moved, same & ~own, same & own)


def context_lost(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of (earlier token, target) pairs that move the target in the healthy twin and not here."""
    now, before = influence(arch, broken), influence(arch, healthy)
    same, earlier = _grid(now)
    is_real = real(arch, broken["batches"][0])
    pairs = same & is_real[:, :, None, None] & is_real[None, None]
    if arch.intent in ("causal", "seq2seq"):
        pairs = pairs & earlier
    else:
        pairs = pairs & ~torch.eye(now.shape[1], now.shape[3], dtype=torch.bool)[:, None]
    seen = pairs & (before > 1e-6)
    return ((now <= 1e-6) & seen).sum().item() / max(int(seen.sum()), 1)


def output_change(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Largest change of a real position's logits against the healthy twin on its own batch, over the logits' standard deviation."""
    one, two = outputs(arch, broken, broken["batches"][0]), outputs(arch, healthy, healthy["batches"][0])
    if arch.intent == "contrastive":
        return float((one - two).norm() / two.norm())
    is_one, is_two = real(arch, broken["batches"][0]), real(arch, healthy["batches"][0])
    return float((one[is_one] - two[is_two]).abs().max() / two[is_two].std())


def gradients(setup: Setup) -> dict[str, Tensor]:
    """Gradients of the user's loss, summed over the accumulation window."""
    model: Any = setup["model"]
    model.zero_grad()
    torch.manual_seed(1)
    for batch in setup["batches"][: setup.get("accumulation_steps", 1)]:
        setup["loss_fn"](model, batch).backward()
    found = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gradient_change(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Norm of the difference of the two gradients over the norm of the healthy one; infinite if one is not finite or missing."""
    one, two = gradients(broken), gradients(healthy)
    if set(two) - set(one):
        return float("inf")
    difference = sum((one[n] - two[n]).square().sum() for n in two)
    norm = sum(g.square().sum() for g in two.values())
    change = (torch.as_tensor(difference) / torch.as_tensor(norm)).sqrt().item()
    return float("inf") if math.isnan(change) else change


def take_steps(setup: Setup, steps: int = 4) -> dict[str, Tensor]:
    """Run the user's training step; how far each parameter moved (copies, so that tensors replaced meanwhile count)."""
    model: Any = setup["model"]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for i in range(steps):
        torch.manual_seed(i)
        setup["train_step"](model, setup["optimizer"], setup["batches"][i % len(setup["batches"])])
    return {n: p.detach().float() - before[n].float() for n, p in model.named_parameters()}


def movement_change(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """After four steps: norm of the difference of the movements over the norm of the healthy movement."""
    one, two = take_steps(broken), take_steps(healthy)
    shared = [n for n in one if n in two and one[n].shape == two[n].shape]
    difference = sum(((one[n] - two[n]).square().sum() for n in shared), torch.zeros(()))
    norm = sum((two[n].square().sum() for n in shared), torch.zeros(()))
    change = (difference / norm).sqrt().item()
    return float("inf") if math.isnan(change) else change


def unmoved_share(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Share of the parameters that move in the healthy twin's four steps and not here."""
    one, two = take_steps(broken), take_steps(healthy)
    moving = [n for n in two if bool((two[n] != 0).any())]
    still = [n for n in moving if n not in one or not bool((one[n] != 0).any())]
    return len(still) / max(len(moving), 1)
