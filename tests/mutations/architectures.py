"""The architectures that faults are planted in: how each is built, fed, called and trained.

Shapes: B examples, T positions, V tokens. Ids: 0 PAD, 1 BOS, 2 EOS, 3 MASK, words from 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutations import models

V, T, LENGTHS = 64, 20, (20, 13, 9, 16)
PREFIX = 5
PAD, BOS, EOS, MASK, FIRST_WORD = 0, 1, 2, 3, 4
Setup = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture. `traits` say what can be planted in it; `name` is the row of the table.

    intent: causal, masked, seq2seq or contrastive. hf: called as `model(**batch)` and returns an object with `.loss`.
    """

    name: str
    intent: str
    make: Callable[[], nn.Module]
    hf: bool = True
    traits: frozenset[str] = frozenset()

    def build(self) -> nn.Module:
        """A fresh model in train mode; the same weights each time."""
        torch.manual_seed(0)
        return self.make().train()

    def batch(self, seed: int = 0, side: str = "right") -> Batch:
        """A fresh batch of four examples of unequal length (eight pairs if contrastive)."""
        return {"causal": causal_batch, "masked": masked_batch, "seq2seq": seq2seq_batch, "contrastive": pair_batch}[
            self.intent
        ](seed, side)

    def call(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output, without its loss."""
        fed = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "position_ids", "decoder_input_ids")}
        if self.hf:
            return model(**fed)
        if self.name == "plain_dict":
            return model(fed)
        return model(fed["input_ids"], fed.get("attention_mask"), fed.get("position_ids"))

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[B, T, V]; for sentence encoders the vectors of the first sentences, [B, 1, D]."""
        found: Tensor
        if self.intent == "contrastive":
            found = model(batch["input_ids"], batch["attention_mask"])[:, None]
            return found
        out = self.call(model, batch)
        if isinstance(out, Tensor):
            return out
        found = out[0] if isinstance(out, tuple) else out["logits"]
        return found

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The healthy loss."""
        if self.intent == "contrastive":
            return contrastive_loss(model, batch)
        if self.hf:
            loss: Tensor = model(**{k: v for k, v in batch.items() if k != "num_items_in_batch"}).loss
            return loss
        return next_token_loss(self.logits(model, batch), batch["labels"])

    @property
    def ids_key(self) -> str:
        """The batch entry whose tokens the logits must not see the future of."""
        return "decoder_input_ids" if self.intent == "seq2seq" else "input_ids"


def next_token_loss(logits: Tensor, labels: Tensor, shift: int = 1, **options: Any) -> Tensor:
    """Cross-entropy of the logits at t with the label at t + shift."""
    end = logits.shape[1] - shift
    return torch.nn.functional.cross_entropy(
        logits[:, :end].reshape(-1, logits.shape[-1]), labels[:, shift:].reshape(-1), ignore_index=-100, **options
    )


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    """InfoNCE of first against second sentences, in both directions."""
    a = model(batch["input_ids"], batch["attention_mask"])
    p = model(batch["positive_ids"], batch["positive_mask"])
    similarity = a @ p.T * model.logit_scale.exp()  # type: ignore[operator]
    target = torch.arange(len(a))
    return (torch.nn.functional.cross_entropy(similarity, target) + torch.nn.functional.cross_entropy(similarity.T, target)) / 2


def sentences(seed: int, side: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, T]: BOS, words, EOS, then PAD (on `side`)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, V, (len(lengths), T), generator=generator)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        start = 0 if side == "right" else T - n
        ids[i, start], ids[i, start + n - 1] = BOS, EOS
        mask[i, start : start + n] = 1
    return ids * mask, mask


def causal_batch(seed: int, side: str) -> Batch:
    """Labels are the ids, -100 on PAD; left pads come with position ids (1 on PAD, then 0, 1, 2)."""
    ids, mask = sentences(seed, side)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if side == "left":
        batch["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return batch


def masked_batch(seed: int, side: str) -> Batch:
    """A third of the words is replaced by MASK and supervised."""
    ids, mask = sentences(seed, side)
    chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed + 99)) < 0.33) & (ids >= FIRST_WORD)
    return {
        "input_ids": ids.masked_fill(chosen, MASK),
        "attention_mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
    }


def seq2seq_batch(seed: int, side: str) -> Batch:
    """A source and a target; the decoder's inputs are the target shifted right behind EOS."""
    source, mask = sentences(seed, side)
    target, target_mask = sentences(seed + 1000, "right", (12, 20, 15, 8))
    decoder = torch.cat([torch.full((len(target), 1), EOS), target[:, :-1]], 1)
    return {
        "input_ids": source,
        "attention_mask": mask,
        "decoder_input_ids": decoder,
        "labels": target.masked_fill(target_mask == 0, -100),
    }


def pair_batch(seed: int, side: str) -> Batch:
    """Eight pairs of sentences that share their words."""
    first, mask = sentences(seed, side, LENGTHS * 2)
    second, positive_mask = sentences(seed + 500, side, (14, 20, 11, 9) * 2)
    for i in range(len(first)):
        words = first[i][first[i] >= FIRST_WORD]
        place = second[i] >= FIRST_WORD
        second[i, place] = words[torch.arange(int(place.sum())) % len(words)]
    return {"input_ids": first, "attention_mask": mask, "positive_ids": second, "positive_mask": positive_mask}


def tokenizer(words: int = V, *, bos: bool = False, pad: str = "<pad>") -> Any:
    """A word-level tokenizer with `words` tokens; `bos` makes it add BOS itself."""
    from tokenizers import Tokenizer
    from tokenizers import models as token_models
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<mask>", *(f"w{i}" for i in range(FIRST_WORD, words))]
    made = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<mask>"))
    made.pre_tokenizer = WhitespaceSplit()
    if bos:
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, pad_token=pad, bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )


def train_step_of(loss_fn: Callable[[Any, Batch], Tensor]) -> Callable[[Any, Any, Batch], float]:
    """One healthy step."""

    def train_step(model: Any, optimizer: Any, batch: Batch) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return train_step


def _behind_prefix(batch: Batch) -> Tensor:
    """Labels without those of the prefix, and of the two tokens after it: no position of the prefix is trained, even shifted twice."""
    positions = batch.get("position_ids", torch.arange(T).expand_as(batch["labels"]))
    found: Tensor = batch["labels"].masked_fill(positions < PREFIX + 2, -100)
    return found


def standard(
    arch: Arch, *, model: nn.Module | None = None, loss_fn: Any = None, batches: Any = None, side: str = "right"
) -> Setup:
    """The healthy setup of an architecture, or one with another model, loss or batches."""
    model = arch.build() if model is None else model
    loss_fn = loss_fn or arch.loss
    batches = batches or [arch.batch(s, side) for s in range(3)]
    if "prefix" in arch.traits:
        batches = [{**b, "labels": _behind_prefix(b)} for b in batches]
    return {
        **({"intent": "prefix"} if "prefix" in arch.traits else {}),
        "model": model,
        "batches": batches,
        "loss_fn": loss_fn,
        "train_step": train_step_of(loss_fn),
        "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0),
        "pad_token_id": PAD,
        "tokenizer": tokenizer(),
    }


_ATTENTION = frozenset({"attention"})
_FIXED = frozenset({"attention", "absolute"})

ARCHITECTURES: tuple[Arch, ...] = (
    Arch(name="llama", intent="causal", make=models.llama, traits=_ATTENTION | {"packs"}),
    Arch(name="qwen2_tied", intent="causal", make=models.qwen2_tied, traits=_ATTENTION | {"packs", "tied"}),
    Arch(name="qwen3", intent="causal", make=models.qwen3, traits=_ATTENTION | {"packs"}),
    Arch(name="gpt2", intent="causal", make=models.gpt2, traits=_FIXED | {"packs", "tied"}),
    Arch(name="neox", intent="causal", make=models.neox, traits=_ATTENTION | {"packs"}),
    Arch(name="gemma2", intent="causal", make=models.gemma2, traits=_ATTENTION | {"packs", "tied"}),
    Arch(
        name="bloom", intent="causal", make=models.bloom, traits=frozenset({"attention", "wrapped", "tied", "mask_positions"})
    ),
    Arch(name="opt", intent="causal", make=models.opt, traits=_ATTENTION | {"tied", "mask_positions"}),
    Arch(name="mixtral", intent="causal", make=models.mixtral, traits=_ATTENTION | {"packs", "moe"}),
    Arch(name="olmoe", intent="causal", make=models.olmoe, traits=_ATTENTION | {"packs", "moe"}),
    Arch(name="mamba", intent="causal", make=models.mamba, traits=frozenset({"recurrent", "tied"})),
    Arch(name="mamba2", intent="causal", make=models.mamba2, traits=frozenset({"recurrent"})),
    Arch(name="jamba", intent="causal", make=models.jamba, traits=frozenset({"attention", "recurrent", "hybrid", "moe"})),
    Arch(name="falcon_h1", intent="causal", make=models.falcon_h1, traits=_ATTENTION | {"recurrent", "hybrid"}),
    Arch(name="bert", intent="masked", make=models.bert, traits=_FIXED | {"tied"}),
    Arch(name="bart", intent="seq2seq", make=models.bart, traits=frozenset({"attention", "tied"})),
    Arch(name="t5", intent="seq2seq", make=models.t5, traits=frozenset({"attention"})),
    Arch(name="plain_tensor", intent="causal", make=models.plain_tensor, hf=False, traits=_FIXED | {"packs", "plain"}),
    Arch(name="plain_tuple", intent="causal", make=models.plain_tuple, hf=False, traits=_FIXED | {"packs", "plain"}),
    Arch(name="plain_dict", intent="causal", make=models.plain_dict, hf=False, traits=_FIXED | {"packs", "plain"}),
    Arch(name="prefix_lm", intent="causal", make=models.prefix_lm, hf=False, traits=_FIXED | {"plain", "prefix"}),
    Arch(name="sentence_mean", intent="contrastive", make=models.sentence_mean, hf=False, traits=_FIXED | {"plain", "encoder"}),
    Arch(name="sentence_last", intent="contrastive", make=models.sentence_last, hf=False, traits=_FIXED | {"plain"}),
    Arch(name="bert_mean", intent="contrastive", make=models.bert_mean, hf=False, traits=_FIXED | {"encoder"}),
    Arch(name="llama_last", intent="contrastive", make=models.llama_last, hf=False, traits=_ATTENTION),
    Arch(name="lora_by_hand", intent="causal", make=models.lora_by_hand, traits=_ATTENTION | {"adapters", "packs"}),
    Arch(name="peft", intent="causal", make=models.peft_llama, traits=_ATTENTION | {"adapters", "packs"}),
)
BY_NAME = {a.name: a for a in ARCHITECTURES}
