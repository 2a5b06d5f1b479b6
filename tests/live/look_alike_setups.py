"""Healthy setups that look broken, and near them broken ones that must be found. All go through the whole `ghoststep.check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.live import influence_faults as faults
from tests.live.influence_models import D, T, TinyLM, V, right
from tests.live.test_xray_faults import Words

BOS, EOS, END = 1, 2, 3
Given = dict[str, Any]


def ids_of(
    seed: int, *, examples: int = 4, side: str = "right", lengths: tuple[int, ...] = (16, 13, 11, 8), end: int = EOS
) -> Given:
    """BOS, words, an end token, then PAD; labels are the ids at real positions."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([4 + torch.randperm(V - 4, generator=g)[:T] for _ in range(examples)])
    at, length = torch.arange(T)[None], torch.tensor(lengths[:examples])[:, None]
    ids[:, 0] = BOS
    ids = torch.where(at == length - 1, end, ids)
    keep = (at < length).long()
    ids = torch.where(keep == 1, ids, 0)
    if side == "left":
        ids, keep = (torch.stack([r.roll(T - int(k.sum())) for r, k in zip(t, keep, strict=True)]) for t in (ids, keep))
    return {"input_ids": ids, "attention_mask": keep, "labels": torch.where(keep == 1, ids, -100)}


def counted(batch: Given, filler: int) -> Given:
    """Positions that count real tokens; PAD gets `filler` (transformers: 1)."""
    keep = batch["attention_mask"]
    return {**batch, "position_ids": (keep.cumsum(1) - 1).masked_fill(keep == 0, filler)}


def setup(model: nn.Module, batch: Given | None = None, *, seeds: tuple[int, ...] = (0, 1), **more: Any) -> Given:
    """A whole setup: two batches, tokenizer, AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    given: Given = {
        "model": model, "batches": [ids_of(s) for s in seeds] if batch is None else [batch], "tokenizer": Words(size=V),
        "optimizer": torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0),
    }  # fmt: skip
    return {k: v for k, v in {**given, **more}.items() if v is not None}


def hf(name: str, **more: Any) -> nn.Module:
    """A tiny causal model of the library with `V` rows and weights large enough to see things by."""
    import transformers

    torch.manual_seed(0)
    size: Given = {
        "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": BOS, "eos_token_id": EOS, "initializer_range": 0.2, **more,
    }  # fmt: skip
    if name == "GPT2":
        del size["intermediate_size"]
    model: nn.Module = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**size)
    )
    return model.train()


def tiny(*given: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(*given, **more).train()


def over_pads(ids: torch.Tensor, keep: Any, at: Any) -> Any:
    """Padding attends to padding; real tokens do not see it."""
    both = (keep[:, :, None] == 0) & (keep[:, None, :] == 0)
    return right(ids, keep, at) | both[:, None]


class Wide(nn.Module):
    """Sixteen more rows than tokens, small as training leaves them, or large as garbage."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = TinyLM()
        self.inner.embed = nn.Embedding(V + 16, D)
        self.inner.head = nn.Linear(D, V + 16, bias=False)
        with torch.no_grad():
            self.inner.head.weight[V:] *= scale

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids, attention_mask).logits
        return logits


def plain_loss(model: Any, batch: Given, **more: Any) -> torch.Tensor:
    out = model(batch["input_ids"], batch["attention_mask"])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), **more)


def summed(model: Any, batch: Given) -> torch.Tensor:
    return plain_loss(model, batch, reduction="sum")


def per_example(model: Any, batch: Given) -> Any:
    """Mean of means: short answers weigh more."""
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (each.sum(1) / (labels >= 0).sum(1)).mean()


class TwoAhead(TinyLM):
    """Multi-token prediction: a second head for the token after the next, or (broken) for the token itself."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.second, self.ahead = nn.Linear(V, V, bias=False), ahead

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, position_ids, labels)
        if labels is not None and out.loss is not None:
            far = self.second(out.logits)[:, : T - self.ahead]
            out.loss = out.loss + 0.3 * functional.cross_entropy(far.reshape(-1, V), labels[:, self.ahead :].reshape(-1))
        return out


def masked_batch(seed: int = 0, *, kept_share: float = 0.2, noisy: bool = False) -> Given:
    """Masked-LM: a part of the tokens is predicted; most are hidden, some are kept as they are. `noisy`: another part in each
    example, given as `share` (diffusion)."""
    b = ids_of(seed)
    g = torch.Generator().manual_seed(seed + 40)
    share = torch.tensor([0.3, 0.5, 0.7, 0.9])[: len(b["input_ids"])] if noisy else torch.full((len(b["input_ids"]),), 0.4)
    chosen = (torch.rand(b["input_ids"].shape, generator=g) < share[:, None]) & (b["attention_mask"] == 1)
    hidden = chosen & (torch.rand(chosen.shape, generator=g) > kept_share)
    return {
        "input_ids": b["input_ids"].masked_fill(hidden, END), "attention_mask": b["attention_mask"],
        "labels": b["input_ids"].masked_fill(~chosen, -100), **({"share": share} if noisy else {}),
    }  # fmt: skip


def diffusion_loss(model: Any, batch: Given) -> Any:
    """A masked diffusion LM: hidden tokens are predicted in place, weighted by one over the share that was to be hidden."""
    hidden = batch["labels"] >= 0
    logits = model(batch["input_ids"], batch["attention_mask"])
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    each = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(hidden.shape)
    return (each.sum(1) / batch["share"]).sum() / batch["attention_mask"].sum()


class Experts(nn.Module):
    """Top-1 of `num` experts; the gate of the last ones is so low that no token comes, or (broken) the gate is cut off."""

    def __init__(self, num: int = 6, *, cut: bool = False) -> None:
        super().__init__()
        self.gate, self.cut = nn.Linear(D, num), cut
        self.ups = nn.ModuleList(nn.Linear(D, D) for _ in range(num))
        with torch.no_grad():
            self.gate.bias[num // 2 :] = -50.0

    def forward(self, x: torch.Tensor) -> Any:
        share = self.gate(x).softmax(-1)
        top = share.argmax(-1)
        out = torch.zeros_like(x)
        for i, up in enumerate(self.ups):
            chosen = (top == i)[..., None]
            if bool(chosen.any()):
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cut):
                    out = out + chosen * up(x)
        return x + out * share.amax(-1, keepdim=True)


class Lora(nn.Module):
    """A frozen projection with a low-rank addition; `b` starts at zero, so `a` has a zero gradient at the first step."""

    def __init__(self, base: nn.Module, rank: int = 2, *, detach: bool = False) -> None:
        super().__init__()
        self.base, self.detach = base, detach
        self.lora_A, self.lora_B = nn.Linear(D, rank, bias=False), nn.Linear(rank, D, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_A(x)
        out: torch.Tensor = self.base(x) + self.lora_B(low.detach() if self.detach else low)
        return out


def lora(*, detach: bool = False) -> nn.Module:
    model: Any = tiny()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.out = Lora(layer.out, detach=detach)
        layer.out.base.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def made(function: Callable[[], Given]) -> Given:
    torch.manual_seed(0)
    return function()


FAULTS = faults
