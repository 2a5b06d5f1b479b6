"""Faults of labels, their shift and their weights (GS2, GS010)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutations import harm
from tests.mutations.architectures import (
    MASK,
    PREFIX,
    Arch,
    Batch,
    Setup,
    next_token_loss,
    sentences,
    standard,
)
from tests.mutations.fault import Fault, Measure
from tests.mutations.planting import (
    is_causal,
    on,
)

GRADIENT = "norm of the gradient's error, over the norm of the right gradient"


def shifted_by(shift: int) -> Callable[[Arch], Setup]:
    """The user's own cross-entropy over the model's logits, shifted by `shift`."""

    def make(arch: Arch) -> Setup:
        def loss_fn(model: Any, batch: Batch) -> Tensor:
            return next_token_loss(arch.logits(model, batch), batch["labels"], shift)

        return standard(arch, loss_fn=loss_fn)

    return make


def shifted_by_the_collator(arch: Arch) -> Setup:
    """Labels that are already the next tokens, given to a model that shifts."""
    batches = []
    for seed in range(3):
        batch = arch.batch(seed)
        labels = torch.full_like(batch["labels"], -100)
        labels[:, :-1] = batch["labels"][:, 1:]
        batches.append({**batch, "labels": labels})
    return standard(arch, batches=batches)


def decoder_gets_labels(arch: Arch) -> Setup:
    """The decoder is fed the target itself instead of the target shifted right."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        batch["decoder_input_ids"] = batch["labels"].clamp(min=0)
    return standard(arch, batches=batches)


def masking_forgotten(arch: Arch) -> Setup:
    """Labels at the chosen tokens, and the tokens still in the input."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        batch["input_ids"] = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    return standard(arch, batches=batches)


def example_means(arch: Arch) -> Setup:
    """The mean over examples of each example's mean: a token of a short example weighs more."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        logits, labels = arch.logits(model, batch), batch["labels"]
        return torch.stack([next_token_loss(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]).mean()

    return standard(arch, loss_fn=loss_fn)


def accumulated(by_window: bool) -> Callable[[Arch], Setup]:
    """Two uneven micro-batches an optimizer step; divided by the window's count of labels, or each by its own."""

    def make(arch: Arch) -> Setup:
        longer = PREFIX + 2 if "prefix" in arch.traits else 0  # a text that ends within the prefix trains nothing
        lengths = ((20, 19, 20, 18), (5 + longer, 4 + longer, 6 + longer, 4 + longer))
        batches = []
        for seed, n in enumerate(lengths):
            ids, mask = sentences(seed, "right", n)
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
        count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        for batch in batches:
            batch["num_items_in_batch"] = torch.tensor(count)

        def loss_fn(model: Any, batch: Batch) -> Tensor:
            logits, labels = arch.logits(model, batch), batch["labels"]
            if by_window:
                summed: Tensor = next_token_loss(logits, labels, reduction="sum") / batch["num_items_in_batch"]
                return summed
            return next_token_loss(logits, labels) / 2

        setup = standard(arch, loss_fn=loss_fn, batches=batches)
        del setup["train_step"]  # it would take one micro-batch for a whole step
        return {**setup, "accumulation_steps": 2}

    return make


def smoothed_columns(masked: bool) -> Callable[[Arch], Setup]:
    """Label smoothing over a head whose unused columns are pushed to −1e9."""

    def make(arch: Arch) -> Setup:
        def loss_fn(model: Any, batch: Batch) -> Tensor:
            logits = arch.logits(model, batch)[:, :-1].clone()
            logits[..., MASK] = -1e9
            flat, labels = logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
            if masked:
                return torch.nn.functional.cross_entropy(flat, labels, ignore_index=-100, label_smoothing=0.1)
            kept = [i for i in range(flat.shape[-1]) if i != MASK]
            return torch.nn.functional.cross_entropy(
                flat[:, kept], labels - (labels > MASK).long(), ignore_index=-100, label_smoothing=0.1
            )

        return standard(arch, loss_fn=loss_fn)

    return make


def loss_ratio(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """This loss over the twin's, on the first batch."""
    values = []
    for setup in (broken, healthy):
        torch.manual_seed(1)
        values.append(setup["loss_fn"](setup["model"], setup["batches"][0]).item())
    return float(values[0] / values[1])


def label_fault(
    name: str, code: str, make: Any, healthy: Any, measure: Measure = harm.gradient_change, **options: Any
) -> Fault:
    chosen = {"codes": (code,), "bound": 0.05, "unit": GRADIENT, "family": "labels", **options}
    return Fault(name=name, make=make, healthy=healthy, measure=measure, **chosen)


FAULTS: tuple[Fault, ...] = (
    label_fault("unshifted", "GS201", on(is_causal, shifted_by(0)), shifted_by(1)),
    label_fault("shifted_twice", "GS202", on(is_causal, shifted_by(2)), shifted_by(1)),
    label_fault("shifted_by_the_collator", "GS202", on(is_causal, shifted_by_the_collator), standard),
    label_fault(
        "decoder_gets_labels",
        "",
        on(lambda a: a.intent == "seq2seq", decoder_gets_labels),
        standard,
        codes=("GS201", "GS203"),
        why="an encoder-decoder's unshifted input is a visible target",
    ),
    label_fault("masking_forgotten", "GS203", on(lambda a: a.intent == "masked", masking_forgotten), standard),
    label_fault(
        "example_means", "GS206", on(is_causal, example_means), shifted_by(1), severity="warning", why="a choice of some"
    ),
    label_fault(
        "means_of_micro_batches",
        "GS206",
        on(is_causal, accumulated(False)),
        accumulated(True),
        severity="warning",
        why="a choice of some",
    ),
    label_fault(
        "smoothed_masked_columns",
        "GS010",
        on(is_causal, smoothed_columns(True)),
        smoothed_columns(False),
        loss_ratio,
        bound=10.0,
        unit="loss over the right loss",
    ),
)
