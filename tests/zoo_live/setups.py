"""The right setup for a class: right pads, attention mask, labels that fit the family, float32, the class's own loss, AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.zoo_live.overrides import (
    LABELS_OF_THE_SAME_POSITION,
    LEFT_PADS,
    NO_MASK_OF_ITS_OWN,
    NO_PADS,
    OWN_DECODER_IDS,
    PAD_IS_ONE,
)  # fmt: skip
from tests.zoo_live.tiny import BOS, EOS, FIRST_WORD, MASK, NUM_TOKENS, PAD

if TYPE_CHECKING:
    import torch

LENGTHS, TARGET_LENGTHS = (20, 15, 18, 11), (14, 9, 12, 7)


def kind_of(model: Any, family: str) -> str:
    """What this class is trained as: some classes of the masked and seq2seq mappings are decoders or encoder-decoders."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "seq2seq"
    return "causal" if family == "seq2seq" else family


def text(lengths: tuple[int, ...], seed: int, *, bos: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words between BOS and EOS, right-padded: int64 ids [B, T] and bool real [B, T]."""
    import torch

    length = max(lengths)
    ids = torch.randint(FIRST_WORD, NUM_TOKENS, (len(lengths), length), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    if bos:
        ids[:, 0] = BOS
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = EOS
    return ids.masked_fill(~real, PAD), real


def batch(kind: str, *, shifted: bool, pads: bool = True, seed: int = 1) -> dict[str, torch.Tensor]:
    """One right batch. `shifted`: the labels of a causal batch are shifted here, for a class whose loss does not do it."""
    import torch

    ids, real = text(LENGTHS if pads else (max(LENGTHS),) * len(LENGTHS), seed)
    given = {"input_ids": ids, "attention_mask": real.long()}
    if kind == "causal":
        labels = ids.masked_fill(~real, -100)
        if shifted:
            labels = torch.cat([labels[:, 1:], labels.new_full((len(ids), 1), -100)], dim=1)
        return {**given, "labels": labels}
    if kind == "masked":
        chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3) & real & (ids >= FIRST_WORD)
        return {**given, "input_ids": ids.masked_fill(chosen, MASK), "labels": ids.masked_fill(~chosen, -100)}
    answers, kept = text(TARGET_LENGTHS, seed + 100, bos=False)
    return {**given, "labels": answers.masked_fill(~kept, -100)}


def decoder_ids(labels: torch.Tensor) -> torch.Tensor:
    """The labels one position later, begun with EOS."""
    import torch

    return torch.cat([labels.new_full((len(labels), 1), EOS), labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)], dim=1)


def needs_shifted(model: Any) -> bool:
    """True if the class's causal loss compares the logits of a position with the label of the same position.

    Told by the loss itself, with one label only: it is the cross-entropy of that position, or of the one before it.
    """
    import torch
    from torch.nn import functional

    if not takes_labels(model):
        return False
    given = batch("causal", shifted=False, pads=False)
    ids, at = given["input_ids"], 7
    labels = torch.full_like(ids, -100)
    labels[0, at] = ids[0, at]
    mode = model.training
    with torch.no_grad():
        output = model.eval()(**{**given, "labels": labels})
    model.train(mode)
    if output.loss is None or output.logits.shape[1] < ids.shape[1]:
        return False
    logits = output.logits[0, -ids.shape[1] :]
    here, before = (float(functional.cross_entropy(logits[t], ids[0, at])) for t in (at, at - 1))
    return abs(float(output.loss) - here) < abs(float(output.loss) - before)


def own_loss(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The class's own loss, or the shifted cross-entropy for one that computes none."""
    from torch.nn import functional

    output = model(**{k: v for k, v in given.items() if k != "labels" or takes_labels(model)})
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    labels = functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    return functional.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def takes_labels(model: Any) -> bool:
    import inspect

    return "labels" in inspect.signature(model.forward).parameters


def with_pad_one(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PAD and BOS change places, in the ids and in the labels."""
    return {k: v if k == "attention_mask" else v.where(v > 1, (1 - v).where(v >= 0, v)) for k, v in given.items()}


def with_left_pads(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pads of every example before its text."""
    import torch

    pads = (given["attention_mask"] == 0).sum(1).tolist()
    return {k: torch.stack([row.roll(n) for row, n in zip(v, pads, strict=True)]) for k, v in given.items()}


def with_causal_permutation(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """perm_mask [B, T, T] is 1 where a position must not see another: the later ones."""
    num, length = given["input_ids"].shape
    return {**given, "perm_mask": given["input_ids"].new_ones(num, length, length).triu(1).float()}


def tokenizer(*, pad: int = PAD) -> Any:
    """A tokenizer with one word a token, so that every id of the models has a token. BOS is the other of the first two."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {pad: "<pad>", PAD + BOS - pad: "<s>", EOS: "</s>", MASK: "<mask>", 4: "<unk>"}
    words = {names.get(i, f"word{i}"): i for i in range(NUM_TOKENS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    backend: Any = PreTrainedTokenizerFast
    return backend(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>", unk_token="<unk>",
        padding_side="right",
    )  # fmt: skip


def setup(model: Any, family: str, name: str, *, pads: bool | None = None) -> dict[str, Any]:
    """What `ghoststep.check` is called with. `pads` None means: unless the class is one of `NO_PADS`."""
    import torch

    kind = kind_of(model, family)
    shifted = kind == "causal" and (name in LABELS_OF_THE_SAME_POSITION or needs_shifted(model))
    padded = name not in NO_PADS if pads is None else pads
    batches = [batch(kind, shifted=shifted, pads=padded, seed=seed) for seed in (1, 2)]
    if name in PAD_IS_ONE:
        batches = [with_pad_one(b) for b in batches]
    if name in LEFT_PADS:
        batches = [with_left_pads(b) for b in batches]
    if name in NO_MASK_OF_ITS_OWN and kind == "causal":
        batches = [with_causal_permutation(b) for b in batches]
    if name in OWN_DECODER_IDS:
        batches = [{**b, "decoder_input_ids": decoder_ids(b["labels"])} for b in batches]
    return {
        "model": model,
        "batches": batches,
        "token_roles": batches[0]["attention_mask"] if kind == "causal" else None,  # 1: every token is an answer
        "loss_fn": own_loss,
        "total_steps": 1000,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "tokenizer": tokenizer(pad=BOS if name in PAD_IS_ONE else PAD) if padded else None,  # a tokenizer pads, sooner or later
    }
