"""Which parameters of one layer prove a recurrence or gate over positions, and which prove attention.

A gated MLP (`gate_proj`), a router (`gate`), a `c_attn` of GPT-2's Conv1D class or a short convolution inside an attention
block is no recurrence. Query and key projections inside a module that also holds a recurrence (`linear_attn.q_proj` beside
`linear_attn.A_log`) are no attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RECURRENT_KIND = re.compile(
    r"recurren|mamba|linear|\bconv|ssm|lru|rwkv|lstm|retention|delta|\bkda|lightning|hyena|gla\b|no attention", re.IGNORECASE
)
"""Words in a config's layer list for a layer that mixes positions by a recurrence or gated convolution."""
ATTENTION_KIND = re.compile(r"att|full|sliding|global|local|chunk", re.IGNORECASE)

_RECURRENT_PART = re.compile(
    r"^(?:A_log|A_logs|dt_bias|ssm_\w+|time_(?:mix|decay|maa|faaaa|first|shift)\w*|rg_?lru|lru\w*|recurrent\w*"
    r"|[im]gate\w*|[if]gate_preact|fgate\w*|ifgate\w*|[sm]lstm\w*|slope_rate|(?:query|key|diagonal)_decay|gk_proj|retention|x_[rwkvag]"
    r"|[rwk]_k|forget_gate|shortconv\w*|hyena\w*|kda\w*|gated_delta\w*)$"
)
_ATTENTION_PART = re.compile(
    r"^(?:q|k|[qk]_proj|[qk]_lin|qkv|qkv_(?:proj|lin)|q_(?:a|b)_proj|kv_[ab]_proj\w*|kv_proj|c_attn|q_attn|query|key|query_key_value"
    r"|wqkv|in_proj_weight|[qk]_head|wq|wk|w_pack|att_proj|attn_(?:q|k|qkv|kv_a\w*|q_a)|project_[qk]|to_(?:q|k|qkv|kv)|query_proj|key_proj"
    r"|self_attn_qkv|linear_[qk]|linear_qkv)$",
    re.IGNORECASE,
)
_STATE_PART = re.compile(r"^(?:A_logs?|ssm_a|time_decay|w0|recurrent_param|slope_rate|[if]gate\w*|fgate\w*)$")
_FEED_FORWARD = re.compile(
    r"^(?:mlp\w*|ffn\w*|feed_forward\w*|channel_mix\w*|experts?|block_sparse_moe|router|intermediate\w*)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """For one layer: the parameter that proves a recurrence, and the one that proves attention; None where there is none."""

    recurrent: str | None
    attention: str | None


def layer_proof(rests: Sequence[str]) -> LayerProof:
    """Judge one layer by the names of its parameters (below "layers.N."). Cost: linear in the number of parameters."""
    paths = [rest.split(".") for rest in rests]
    proofs = sorted((path for path in paths if _holds(path, _RECURRENT_PART)), key=_conviction)
    recurrent: dict[str, str] = {}
    for path in proofs:
        recurrent.setdefault(_owner(path, _RECURRENT_PART), ".".join(path))
    for module, name in (*_short_convolutions(paths).items(), *_lightning(paths).items()):
        recurrent.setdefault(module, name)
    modules = {".".join(path[: at + 1]) for path in paths for at, part in enumerate(path[:-2]) if _RECURRENT_PART.match(part)}
    for path in paths:
        if len(path) > 2 and path[-2] == "in_proj" and path[-3] in ("self", "attn", "attention", "self_attn"):
            path = [*path[:-2], "qkv"]  # noqa: PLW2901 - a joint projection under another name
        at = _owner(path, _ATTENTION_PART)
        if _holds(path, _ATTENTION_PART) and not _FEED_FORWARD.match(path[0]):
            if path[0].startswith("attn_"):  # flat names: "ssm_in" is a mixer of its own, other ssm_* belong to attn_*
                beside = not recurrent or any(other[0] == "ssm_in" for other in paths)
            else:
                beside = not any(r == at or r.startswith(f"{at}.") for r in recurrent)
                beside = beside and not any(at == m or at.startswith(f"{m}.") for m in modules)
            if beside:
                return LayerProof(recurrent=next(iter(recurrent.values()), None), attention=".".join(path))
    return LayerProof(recurrent=next(iter(recurrent.values()), None), attention=None)


def _conviction(path: Sequence[str]) -> bool:
    """Sorts a state or forget-gate parameter before other signs: it makes the better proof to print."""
    return not any(_STATE_PART.match(part) for part in path)


def _holds(path: Sequence[str], words: re.Pattern[str]) -> bool:
    return any(words.match(part) for part in path)


def _owner(path: Sequence[str], words: re.Pattern[str]) -> str:
    """The module that owns the first matching part: "mamba" for mamba.A_log, "" where the layer itself owns it."""
    for at, part in enumerate(path):
        if words.match(part):
            return ".".join(path[:at])
    return ".".join(path)


def _short_convolutions(paths: Iterable[Sequence[str]]) -> dict[str, str]:
    """A gated short convolution: a module that owns a convolution, an input and an output projection, and no attention."""
    owned: dict[str, dict[str, str]] = {}
    for path in paths:
        for at, part in enumerate(path[1:], start=1):
            if part in ("conv", "conv1d", "in_proj", "out_proj"):
                owned.setdefault(".".join(path[:at]), {})[part] = ".".join(path)
    return {
        module: found.get("conv") or found["conv1d"]
        for module, found in owned.items()
        if {"in_proj", "out_proj"} <= set(found) and ("conv" in found or "conv1d" in found)
    }


def _lightning(paths: Iterable[Sequence[str]]) -> dict[str, str]:
    """Linear attention whose decay is a constant (not stored): one joint projection and an output gate on the same module."""
    owned: dict[str, set[str]] = {}
    for path in paths:
        if len(path) > 2:
            owned.setdefault(".".join(path[:-2]), set()).add(path[-2])
    return {module: f"{module}.output_gate" for module, found in owned.items() if {"output_gate", "qkv_proj"} <= found}
