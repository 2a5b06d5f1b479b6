"""Faults of what is trained on (GS2): labels, their shift, their weights, what is supervised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mutations import harm
from tests.mutations.architectures import (
    BOS,
    EOS,
    FIRST_WORD,
    MASK,
    PAD,
    Arch,
    Batch,
    Setup,
    next_token_loss,
    sentences,
    standard,
    tokenizer,
)
from tests.mutations.fault import Fault, Measure
from tests.mutations.mask_faults import on, packed_batch

GRADIENT = "norm of the gradient's error, over the norm of the right gradient"


def is_causal(arch: Arch) -> bool:
    """A decoder-only language model."""
    return arch.intent == "causal"


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


def pads_supervised(arch: Arch) -> Setup:
    """Labels that are a plain copy of the ids."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, PAD) if arch.intent == "seq2seq" else batch["input_ids"].clone()
    return standard(arch, batches=batches)


def pad_is_eos(broken: bool) -> Callable[[Arch], Setup]:
    """PAD and EOS share an id; the labels drop every PAD id, the real EOS with them. The twin drops by the mask."""

    def make(arch: Arch) -> Setup:
        model: Any = arch.build()
        _fill_row_of_old_pad(arch, model)
        batches = []
        for seed in range(3):
            ids, mask = sentences(seed, "right")
            ids = ids.masked_fill(mask == 0, EOS)
            labels = ids.masked_fill(ids == EOS, -100) if broken else ids.masked_fill(mask == 0, -100)
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        if arch.hf:
            model.config.pad_token_id = EOS
        setup = standard(arch, model=model, batches=batches)
        return {**setup, "tokenizer": tokenizer(pad="</s>"), "pad_token_id": EOS}

    return make


def _fill_row_of_old_pad(arch: Arch, model: Any) -> None:
    """Row 0 is an ordinary token here; some classes initialise it with zeros because the config calls it PAD."""
    table = (model.get_input_embeddings() if arch.hf else model.trunk.embed).weight
    torch.manual_seed(4)
    with torch.no_grad():
        table[PAD] = torch.randn(table.shape[1]) * table[FIRST_WORD].std()


def stop_probability_lost(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """After 30 steps: the twin's probability of EOS where a text ends, minus this one's."""
    found = []
    for setup in (broken, healthy):
        optimizer = torch.optim.AdamW([p for p in setup["model"].parameters() if p.requires_grad], lr=1e-2)
        for step in range(30):
            torch.manual_seed(step)
            setup["train_step"](setup["model"], optimizer, setup["batches"][step % 3])
        batch = healthy["batches"][0]
        last = batch["attention_mask"].sum(1) - 2
        logits = harm.outputs(arch, setup, batch)[torch.arange(4), last]
        found.append(logits.softmax(-1)[:, EOS].mean().item())
    return found[1] - found[0]


def example_means(arch: Arch) -> Setup:
    """The mean over examples of each example's mean: a token of a short example weighs more."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        logits, labels = arch.logits(model, batch), batch["labels"]
        return torch.stack([next_token_loss(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]).mean()

    return standard(arch, loss_fn=loss_fn)


def accumulated(by_window: bool) -> Callable[[Arch], Setup]:
    """Two uneven micro-batches an optimizer step; divided by the window's count of labels, or each by its own."""

    def make(arch: Arch) -> Setup:
        lengths = ((20, 19, 20, 18), (5, 4, 6, 4))
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
                return next_token_loss(logits, labels, reduction="sum") / batch["num_items_in_batch"]
            return next_token_loss(logits, labels) / 2

        setup = standard(arch, loss_fn=loss_fn, batches=batches)
        del setup["train_step"]  # it would take one micro-batch for a whole step
        return {**setup, "accumulation_steps": 2}

    return make


def roles_batch(seed: int, lengths: tuple[int, ...] = (20, 13, 9, 16)) -> tuple[Batch, Tensor]:
    """A prompt (the first five tokens) and an answer; PAD counts as prompt."""
    ids, mask = sentences(seed, "right", lengths)
    roles = ((torch.arange(ids.shape[1]) >= 5) & (mask == 1)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}, roles


def prompted(supervised: bool) -> Callable[[Arch], Setup]:
    """The prompt in the loss, or not."""

    def make(arch: Arch) -> Setup:
        pairs = [roles_batch(s) for s in range(3)]
        batches = [b if supervised else {**b, "labels": b["labels"].masked_fill(r == 0, -100)} for b, r in pairs]
        return {**standard(arch, batches=batches), "token_roles": pairs[0][1]}

    return make


def truncated(cut: bool) -> Callable[[Arch], Setup]:
    """Answers that were cut at the maximal length, so that no EOS is left in three of four."""

    def make(arch: Arch) -> Setup:
        batches, roles = [], []
        for seed in range(3):
            batch, role = roles_batch(seed, (20, 20, 20, 16))
            if cut:
                generator = torch.Generator().manual_seed(seed)
                batch["input_ids"][:3, -1] = torch.randint(FIRST_WORD, 64, (3,), generator=generator)
                batch["labels"][:3, -1] = batch["input_ids"][:3, -1]
            batch["labels"] = batch["labels"].masked_fill(role == 0, -100)
            batches.append(batch)
            roles.append(role)
        return {**standard(arch, batches=batches), "token_roles": roles[0]}

    return make


def all_ignored(arch: Arch) -> Setup:
    """A marker that is never found: every label is −100."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return standard(arch, batches=batches)


def nothing_learned(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """1 if the gradient is zero, missing or not finite."""
    found = harm.gradients(broken)
    norm = sum(g.square().sum().item() for g in found.values())
    return 0.0 if 0 < norm < float("inf") else 1.0


def doubled_bos(arch: Arch) -> Setup:
    """The template writes BOS and the tokenizer adds one more."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        for key in ("input_ids", "labels"):
            batch[key] = torch.cat([torch.full((4, 1), BOS), batch[key][:, :-1]], 1)
        batch["attention_mask"] = torch.cat([torch.ones(4, 1, dtype=torch.long), batch["attention_mask"][:, :-1]], 1)
        batch["input_ids"][0, -1], batch["labels"][0, -1] = EOS, EOS
    return {**standard(arch, batches=batches), "tokenizer": tokenizer(bos=True)}


def single_bos(arch: Arch) -> Setup:
    """BOS once, by the same tokenizer."""
    return {**standard(arch), "tokenizer": tokenizer(bos=True)}


def bos_change(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Change of the logits behind the start of the text, in standard deviations."""
    for setup in (broken, healthy):
        setup["model"].eval()
    one = harm.outputs(arch, broken, broken["batches"][0])[1:, 2:8]
    two = harm.outputs(arch, healthy, healthy["batches"][0])[1:, 1:7]
    return ((one - two).abs().max() / two.std()).item()


def across_documents(supervised: bool) -> Callable[[Arch], Setup]:
    """Isolated documents whose first token is a target of the one before, or not."""

    def make(arch: Arch) -> Setup:
        batches = [packed_batch(s) for s in range(3)]
        if supervised:
            batches = [{**b, "labels": b["input_ids"].clone()} for b in batches]
        return standard(arch, batches=batches)

    return make


def smoothed_columns(masked: bool) -> Callable[[Arch], Setup]:
    """Label smoothing over a head whose unused columns are pushed to −1e9."""

    def make(arch: Arch) -> Setup:
        def loss_fn(model: Any, batch: Batch) -> Tensor:
            logits = arch.logits(model, batch)[:, :-1].clone()
            logits[..., MASK] = -1e9
            flat, labels = logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
            if masked:
                return F.cross_entropy(flat, labels, ignore_index=-100, label_smoothing=0.1)
            kept = [i for i in range(flat.shape[-1]) if i != MASK]
            return F.cross_entropy(flat[:, kept], labels - (labels > MASK).long(), ignore_index=-100, label_smoothing=0.1)

        return standard(arch, loss_fn=loss_fn)

    return make


def loss_ratio(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """This loss over the twin's, on the first batch."""
    values = []
    for setup in (broken, healthy):
        torch.manual_seed(1)
        values.append(setup["loss_fn"](setup["model"], setup["batches"][0]).item())
    return values[0] / values[1]


def _fault(name: str, code: str, make: Any, healthy: Any, measure: Measure = harm.gradient_change, **options: Any) -> Fault:
    chosen = {"codes": (code,), "bound": 0.05, "unit": GRADIENT, "family": "labels", **options}
    return Fault(name=name, make=make, healthy=healthy, measure=measure, **chosen)


def _share_without_stop(arch: Arch, broken: Setup, healthy: Setup) -> float:
    lost = [(b["labels"] == EOS).any(1).float().mean().item() for b in (broken["batches"][0], healthy["batches"][0])]
    return lost[1] - lost[0]


FAULTS: tuple[Fault, ...] = (
    _fault("unshifted", "GS201", on(is_causal, shifted_by(0)), shifted_by(1)),
    _fault("shifted_twice", "GS202", on(is_causal, shifted_by(2)), shifted_by(1)),
    _fault("shifted_by_the_collator", "GS202", on(is_causal, shifted_by_the_collator), standard),
    _fault(
        "decoder_gets_labels",
        "",
        on(lambda a: a.intent == "seq2seq", decoder_gets_labels),
        standard,
        codes=("GS201", "GS203"),
        why="an encoder-decoder's unshifted input is a visible target",
    ),
    _fault("masking_forgotten", "GS203", on(lambda a: a.intent == "masked", masking_forgotten), standard),
    _fault("pads_supervised", "GS204", on(lambda a: a.intent in ("causal", "seq2seq"), pads_supervised), standard),
    _fault(
        "pad_is_eos",
        "GS208",
        on(is_causal, pad_is_eos(True)),
        pad_is_eos(False),
        stop_probability_lost,
        bound=0.2,
        unit="probability of stopping lost after 30 steps",
    ),
    _fault("example_means", "GS206", on(is_causal, example_means), shifted_by(1), severity="warning", why="a choice of some"),
    _fault(
        "means_of_micro_batches",
        "GS206",
        on(is_causal, accumulated(False)),
        accumulated(True),
        severity="warning",
        why="a choice of some",
    ),
    _fault("prompt_supervised", "GS205", on(is_causal, prompted(True)), prompted(False), severity="warning", why="a choice of some"),
    _fault(
        "answers_truncated",
        "GS210",
        on(is_causal, truncated(True)),
        truncated(False),
        _share_without_stop,
        bound=0.5,
        unit="share of the answers that lost their end",
        severity="warning",
    ),
    _fault(
        "all_ignored",
        "GS207",
        on(lambda a: a.intent != "contrastive", all_ignored),
        standard,
        nothing_learned,
        bound=1.0,
        unit="1 if no finite, non-zero gradient is left",
    ),
    _fault(
        "doubled_bos",
        "GS209",
        on(is_causal, doubled_bos),
        single_bos,
        bos_change,
        bound=0.1,
        unit="largest change of a logit, in standard deviations",
        severity="warning",
        why="the model may have been trained with two",
    ),
    _fault(
        "target_across_documents",
        "GS211",
        on(lambda a: "packs" in a.traits, across_documents(True)),
        across_documents(False),
        severity="warning",
        why="one token a document",
    ),
    _fault(
        "smoothed_masked_columns",
        "GS010",
        on(is_causal, smoothed_columns(True)),
        smoothed_columns(False),
        loss_ratio,
        bound=10.0,
        unit="loss over the right loss",
    ),
)
