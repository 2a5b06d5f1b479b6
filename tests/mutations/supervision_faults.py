"""Faults of what is supervised (GS2): PAD, stop tokens, prompts, cut answers, BOS, documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.mutations import harm
from tests.mutations.architectures import (
    BOS,
    EOS,
    FIRST_WORD,
    PAD,
    Arch,
    Batch,
    Setup,
    sentences,
    standard,
    tokenizer,
)
from tests.mutations.fault import Fault
from tests.mutations.label_faults import label_fault
from tests.mutations.planting import (
    is_causal,
    on,
    packed_batch,
)


def pads_supervised(arch: Arch) -> Setup:
    """Labels that are a plain copy of the ids."""
    batches = [arch.batch(s) for s in range(3)]
    for batch in batches:
        batch["labels"] = (
            batch["labels"].masked_fill(batch["labels"] == -100, PAD)
            if arch.intent == "seq2seq"
            else batch["input_ids"].clone()
        )
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


def _share_without_stop(arch: Arch, broken: Setup, healthy: Setup) -> float:
    lost = [(b["labels"] == EOS).any(1).float().mean().item() for b in (broken["batches"][0], healthy["batches"][0])]
    return float(lost[1] - lost[0])


FAULTS: tuple[Fault, ...] = (
    label_fault("pads_supervised", "GS204", on(lambda a: a.intent in ("causal", "seq2seq"), pads_supervised), standard),
    label_fault(
        "pad_is_eos",
        "GS208",
        on(is_causal, pad_is_eos(True)),
        pad_is_eos(False),
        stop_probability_lost,
        bound=0.2,
        unit="probability of stopping lost after 30 steps",
    ),
    label_fault(
        "prompt_supervised", "GS205", on(is_causal, prompted(True)), prompted(False), severity="warning", why="a choice of some"
    ),
    label_fault(
        "answers_truncated",
        "GS210",
        on(is_causal, truncated(True)),
        truncated(False),
        _share_without_stop,
        bound=0.5,
        unit="share of the answers that lost their end",
        severity="warning",
    ),
    label_fault(
        "all_ignored",
        "GS207",
        on(lambda a: a.intent != "contrastive", all_ignored),
        standard,
        nothing_learned,
        bound=1.0,
        unit="1 if no finite, non-zero gradient is left",
    ),
    label_fault(
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
    label_fault(
        "target_across_documents",
        "GS211",
        on(lambda a: "packs" in a.traits, across_documents(True)),
        across_documents(False),
        severity="warning",
        why="one token a document",
    ),
)
