"""Tiny models of several families and setups around them, for the tests of wiring and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.registry import Registry, load
from ghoststep.subjects.setup import Setup, make_setup

V, D = 40, 16
_REGISTRY: list[Registry] = []


def registry() -> Registry:
    if not _REGISTRY:
        _REGISTRY.append(load(plugins=False))
    return _REGISTRY[0]


class GruLM(nn.Module):
    """A recurrent language model that returns a tuple: not a transformer, not an HF model."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.token_table = nn.Embedding(V, D, padding_idx=padding_idx)
        self.cell = nn.GRU(D, D, batch_first=True)
        self.norm = nn.LayerNorm(D)
        self.out = nn.Linear(D, V)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        hidden, _ = self.cell(self.token_table(tokens))
        logits = self.out(self.norm(hidden))
        if targets is None:
            return (logits,)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()), logits


def batch(seed: int = 0, size: int = 6, length: int = 9, high: int = V) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, high, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "targets": tokens.clone()}


def gru_loss(model: Any, given: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**given)[0]
    return loss


def good_step(model: Any, optimizer: Any, given: Any) -> float:
    optimizer.zero_grad()
    loss = gru_loss(model, given)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def gru(**more: Any) -> dict[str, Any]:
    """A healthy setup of the recurrent model; keywords replace entries, callables are given the model."""
    torch.manual_seed(0)
    model = more.pop("model", None) or GruLM()
    setup: dict[str, Any] = {
        "model": model,
        "batches": [batch(s) for s in range(3)],
        "loss_fn": gru_loss,
        "train_step": good_step,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    setup.update({k: v(model) if k == "optimizer" and callable(v) else v for k, v in more.items()})
    return {k: v for k, v in setup.items() if v is not None}


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]


def lm_batch(seed: int = 0, high: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, high, (4, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def hf(model: Any, **more: Any) -> dict[str, Any]:
    """A healthy setup of an HF model, stepped by the instrument itself."""
    setup: dict[str, Any] = {
        "model": model,
        "batches": [lm_batch(s) for s in range(2)],
        "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
    }
    setup.update(more)
    return setup


def setup_of(given: dict[str, Any], **more: Any) -> Setup:
    return make_setup(given, **more)


def verdicts(given: dict[str, Any], *codes: str) -> dict[str, Verdict]:
    """Ask the checks whose codes begin with `codes` about a setup."""
    case = Case([make_setup(given)], registry().instruments)
    return {c.code: ask(case, c) for c in registry().select(codes)}


OWN = ("GS007", "GS405", "GS406", "GS407", "GS412", "GS413", "GS507", "GS508", "GS6")


def alarms(given: dict[str, Any], *codes: str) -> dict[str, str]:
    """Codes that found a warning or an error, or broke, with the first message."""
    found = {}
    for code, v in verdicts(given, *(codes or OWN)).items():
        if v.outcome is Outcome.BROKEN:
            found[code] = f"BROKEN {v.reason}"
        elif v.outcome is Outcome.FOUND and v.severity.rank >= Severity.WARNING.rank:
            found[code] = v.findings[0].message
    return found


def snapshot(given: dict[str, Any]) -> list[Any]:
    """Everything that must not change, as values."""
    model, optimizer = given["model"], given.get("optimizer")
    kept: list[Any] = [p.detach().clone() for p in model.parameters()]
    kept += [b.detach().clone() for b in model.buffers()]
    kept += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kept += [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]
    kept += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    kept += [len(p._backward_hooks or ()) for p in model.parameters()]
    kept += ["forward" in vars(m) for m in model.modules()]
    kept.append(torch.get_rng_state().clone())
    for one in optimizer if isinstance(optimizer, list) else [optimizer] if optimizer is not None else []:
        state = one.state_dict()
        kept += [v.clone() if isinstance(v, torch.Tensor) else v for s in state["state"].values() for v in s.values()]
        kept.append(repr(state["param_groups"]))
        kept.append(len(getattr(one, "_optimizer_step_post_hooks", {})))
    for key in ("scheduler", "scaler"):
        if given.get(key) is not None:
            kept.append(repr(given[key].state_dict()))
    return kept


def same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and torch.equal(a, b)
        return bool(a == b)

    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


Step = Callable[[Any, Any, Any], float]
