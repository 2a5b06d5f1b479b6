"""What the tests of equivalence share: tiny models of transformers, facts, and what is left after diagnosis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.subjects.setup import make_setup
from tests.live.influence_models import PAD, V, registry, seeded, verdicts

tr = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}


def llama(**more: Any) -> nn.Module:
    return seeded(lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES, **more)))


def large(model: nn.Module) -> nn.Module:
    """Weights four times as large: scores and positions matter as in a trained model."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.dim() == 2 else 1.0)
    return model


def gpt() -> nn.Module:
    return seeded(lambda: tr.GPT2LMHeadModel(tr.GPT2Config(**GPT)))


def fact(kind: type, model: nn.Module, batch: dict[str, torch.Tensor], **more: Any) -> Any:
    return Case([make_setup({"model": model, "batch": batch, "pad_token_id": PAD, **more})], registry().instruments).fact(kind)


def told(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Verdict]:
    """Errors and warnings after diagnosis."""
    said = diagnose(list(verdicts(model, batch).values()), registry().checks)
    return {v.code: v for v in said if v.outcome is Outcome.FOUND and v.severity is not Severity.NOTE}


def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, dropout: float = 0.0, **more: Any) -> Any:
    """Grouped attention of our own; `more["times"]` spoils its scale, `more["flip"]` its mask."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scaling * more.get("times", 1.0)
    hidden = ~mask if mask.dtype == torch.bool else mask < -1
    hidden = ~hidden if more.get("flip") else hidden
    return (scores.masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).contiguous(), None


def with_attention(**spoilt: Any) -> nn.Module:
    """A Llama that runs `attention` under a name of its own."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("ours", lambda *args, **more: attention(*args, **{**more, **spoilt}))
    AttentionMaskInterface.register("ours", eager_mask)
    model: Any = llama()
    model.config._attn_implementation = "ours"
    return large(model)


def shifted_with_mask(model: nn.Module) -> nn.Module:
    """Positions start at 1 as soon as a mask is passed."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("attention_mask") is not None and kwargs.get("past_key_values") is None:
            ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
            kwargs["position_ids"] = torch.arange(1, ids.shape[1] + 1)[None]
        return args, kwargs

    model.get_submodule("transformer").register_forward_pre_hook(hook, with_kwargs=True)
    return model


def forgetful(model: nn.Module) -> nn.Module:
    """Positions start at 0 in every call, also behind a cache."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        return args, {**kwargs, "position_ids": torch.arange(ids.shape[1])[None]}

    name = "model" if hasattr(model, "model") else "transformer"
    model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return model
