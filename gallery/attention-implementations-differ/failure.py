"""An attention function of one's own divides the scores by the head size, not by its root: another model than the weights are.

## What people see
Fine-tuning starts at a worse loss than the model card promises, recovers somewhat, and the result is bad wherever it is served.

## What really happens
The model library lets anyone register an attention function, for speed. This one scales by 1 / d instead of the 1 / sqrt(d) that
the weights were made for. It masks rightly, so nothing leaks and nothing crashes; only the attention is much too flat.

## The cure
Use the `scaling` that the layer hands over.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

HARM = "largest change of a logit against the model's own plain attention"
HARMLESS = 1e-4
V = 48


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Plain attention, [B, H, T, d] each; returns [B, T, H, d]."""
    scores = query @ key.transpose(-1, -2) * scaling + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous()


def flat(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> tuple[torch.Tensor, None]:
    """Scaled by the head size."""
    return attend(query, key, value, mask, 1.0 / query.shape[-1]), None


def plain(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> tuple[torch.Tensor, None]:
    """Scaled as the layer asks."""
    return attend(query, key, value, mask, scaling), None


def make(name: str, function: Any) -> dict[str, Any]:
    """A decoder with sharp attention, as training makes it, that runs the function under a name."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.weight, std=0.3)
    model.config._attn_implementation = name
    ids = torch.randint(3, V, (2, 14), generator=torch.Generator().manual_seed(0))
    return {
        "model": model,
        "batch": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
        "pad_token_id": 0,
    }


def broken() -> dict[str, Any]:
    """The flat one."""
    return make("flat", flat)


def cured() -> dict[str, Any]:
    """The one that scales as asked."""
    return make("plain", plain)


def harm(setup: dict[str, Any]) -> float:
    """The batch with the registered function and with the library's own."""
    model, batch = setup["model"].eval(), setup["batch"]
    name = model.config._attn_implementation
    with torch.no_grad():
        ours = model(**batch).logits
        model.config._attn_implementation = "eager"
        theirs = model(**batch).logits
    model.config._attn_implementation = name
    return float((ours - theirs).abs().max())
