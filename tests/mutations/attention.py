"""Attention tampered with as a user's own attention or mask code would: a transform of the additive mask, before the softmax.

Shapes: B examples, Q queries, K keys. A mask is additive, [B, 1, Q, K]: 0 visible, the smallest number of its dtype hidden.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutations.architectures import Arch
from tests.mutations.plain import HIDDEN, MaskTransform, attend

_NUMBERS = itertools.count()
WINDOW = 4


def tamper(arch: Arch, model: nn.Module, transform: MaskTransform, gain: float = 1.0) -> nn.Module:
    """Make every self-attention of the decoder (or encoder) use the mask that `transform(bias, training)` returns.

    gain: factor on the scores before the mask is added.
    """
    if "plain" in arch.traits:
        trunk: Any = model.trunk
        trunk.transform = transform
        for block in trunk.blocks:
            block.gain = gain
    elif "wrapped" in arch.traits:
        for module in model.modules():
            if hasattr(module, "query_key_value"):
                _wrap(module, transform, gain)
    else:
        _register(model, transform, gain)
    return model


def _register(model: Any, transform: MaskTransform, gain: float) -> None:
    """A custom attention implementation, as transformers documents it. The transform `inverted_for_sdpa` goes through PyTorch's
    `scaled_dot_product_attention` as the boolean it is."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    name = f"mine_{next(_NUMBERS)}"

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        B, Q, K = query.shape[0], query.shape[2], key.shape[2]
        bias = torch.zeros(B, 1, Q, K) if attention_mask is None else attention_mask[..., :K].float().expand(B, 1, Q, K)
        if _is_own(module, Q, K, options):
            bias = transform(bias, module.training)
        scale = options.get("scaling")
        positions = options.get("position_bias")
        total = bias if positions is None else bias + positions
        if transform is inverted_for_sdpa:
            shown = bias > HIDDEN / 2
            result = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=shown, scale=options.get("scaling")
            )
            return result.transpose(1, 2).contiguous(), None
        scale = gain * (query.shape[-1] ** -0.5 if scale is None else scale)
        out = attend(query, key, value, total, scale, options.get("softcap"))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(name)


def _is_own(module: Any, Q: int, K: int, options: dict[str, Any]) -> bool:
    """False for cross-attention, and for the encoder of an encoder-decoder."""
    config = getattr(module, "config", None)
    if not getattr(config, "is_encoder_decoder", False) and not hasattr(module, "is_decoder"):
        return True
    causal = options.get("is_causal", getattr(module, "is_causal", None))
    cross = getattr(module, "is_cross_attention", False)
    return Q == K and not cross and (bool(causal) or not getattr(config, "is_encoder_decoder", False))


def _wrap(module: Any, transform: MaskTransform, gain: float) -> None:
    """Replace the module's forward by one that changes the mask it is handed."""
    forward = module.forward
    module.inv_norm_factor = module.inv_norm_factor * gain

    def changed(*args: Any, **kwargs: Any) -> Any:
        bias = kwargs["attention_mask"]
        kwargs["attention_mask"] = transform(bias, module.training)
        return forward(*args, **kwargs)

    module.forward = changed


def output_projections(arch: Arch, model: nn.Module) -> list[Any]:
    """The linear layer that ends each self-attention."""
    names = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "blocks.0.out", "blocks.1.out", "SelfAttention.o")
    return [m for n, m in model.named_modules() if n.endswith(names) and hasattr(m, "weight")]


def _parts(bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(visible, key is real [B, 1, 1, K], causal [Q, K])."""
    visible = bias > HIDDEN / 2
    return visible, visible[:, :, -1:, :], torch.ones(bias.shape[-2:], dtype=torch.bool).tril()


def _additive(visible: Tensor, hidden: float = HIDDEN) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


def no_causal(bias: Tensor, training: bool) -> Tensor:
    """The padding mask alone."""
    visible, key, _ = _parts(bias)
    return _additive(key.expand_as(visible))


def inverted(bias: Tensor, training: bool) -> Tensor:
    """True taken for "hidden": a boolean convention mixed up."""
    return _additive(~(bias > HIDDEN / 2))


def inverted_for_sdpa(bias: Tensor, training: bool) -> Tensor:
    """`masked = ~visible` handed to `scaled_dot_product_attention`, where True means visible."""
    return inverted(bias, training)


def keys_inverted(bias: Tensor, training: bool) -> Tensor:
    """Only the padding part inverted, the causal part kept if there was one."""
    visible, key, causal = _parts(bias)
    was_causal = not bool(visible[..., 0, 1:].any())
    return _additive((~key & causal) if was_causal else (~key).expand_as(visible))


def over_queries(bias: Tensor, training: bool) -> Tensor:
    """`mask[:, None, :, None]` for `mask[:, None, None, :]`."""
    visible, key, causal = _parts(bias)
    was_causal = not bool(visible[..., 0, 1:].any())
    query = key.transpose(-1, -2).expand_as(visible)
    return _additive(query & causal if was_causal else query)


def zero_one(bias: Tensor, training: bool) -> Tensor:
    """The 0/1 mask itself added to the scores."""
    return (bias > HIDDEN / 2).float()


def soft(value: float) -> MaskTransform:
    """Hidden keys get `value` instead of minus infinity."""

    def transform(bias: Tensor, training: bool) -> Tensor:
        return _additive(bias > HIDDEN / 2, value)

    return transform


def window_edge(bias: Tensor, training: bool) -> Tensor:
    """The last query of each window sees one key too many."""
    _, key, causal = _parts(bias)
    q, k = torch.arange(bias.shape[-2])[:, None], torch.arange(bias.shape[-1])
    return _additive((causal | ((k == q + 1) & ((q + 1) % WINDOW == 0))) & key)


def chunk(bias: Tensor, training: bool) -> Tensor:
    """Inside a chunk everything is seen."""
    _, key, causal = _parts(bias)
    q, k = torch.arange(bias.shape[-2])[:, None], torch.arange(bias.shape[-1])
    return _additive((causal | (k // WINDOW == q // WINDOW)) & key)


def only_self(bias: Tensor, training: bool) -> Tensor:
    """A mask of the diagonal: no context."""
    return _additive(torch.eye(bias.shape[-1], dtype=torch.bool).expand_as(bias))


def late_queries_blind(bias: Tensor, training: bool) -> Tensor:
    """From the middle on, queries have no key at all."""
    visible, _, _ = _parts(bias)
    late = torch.arange(bias.shape[-2])[:, None] >= bias.shape[-2] // 3
    return _additive(visible & ~late)


def in_train_only(bias: Tensor, training: bool) -> Tensor:
    """Causal in eval, open in train."""
    return no_causal(bias, training) if training else bias


def with_padding_only(bias: Tensor, training: bool) -> Tensor:
    """Causal only while nothing is padded."""
    return bias if bool(_parts(bias)[1].all()) else no_causal(bias, training)
