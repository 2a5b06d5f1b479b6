"""What a config says about each layer: lists of kinds, index lists, periods and patterns, as one kind per layer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice

from ghoststep.instruments.config_values import MAX_LAYERS

LIST_KEYS = ("layer_types", "layers_block_type", "block_types", "_block_types", "layer_type", "layer_kinds")
_PATTERN_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "A": "attention", "m": "mamba", "a": "attention"}
RECURRENT, ATTENTION = "recurrent", "attention"


def layer_kinds(values: Mapping[str, object], num_layers: int | None) -> tuple[tuple[str, ...], str] | None:
    """One kind per layer and the key that says so, or None. Kinds are the config's own words, or "attention"/"recurrent" where
    it only counts. A list that is shorter than the model is a pattern and repeats; a longer one is cut.
    """
    for reader in (_from_list, _from_pattern, _from_indices, _from_period):
        found = reader(values, num_layers)
        if found is not None:
            return found
    return None


def _from_list(values: Mapping[str, object], num_layers: int | None) -> tuple[tuple[str, ...], str] | None:
    for key in LIST_KEYS:
        kinds = values.get(key)
        if not isinstance(kinds, list) or not 0 < len(kinds) <= MAX_LAYERS:
            continue
        if all(isinstance(kind, str) and len(kind) <= 80 for kind in kinds):
            return tuple(islice(cycle(kinds), num_layers or len(kinds))), key
    types = values.get("attn_type_list")
    if isinstance(types, list) and 0 < len(types) <= MAX_LAYERS and all(t in (0, 1) for t in types):
        return tuple(ATTENTION if t else "linear_attention" for t in types), "attn_type_list"
    return None


def _from_pattern(values: Mapping[str, object], num_layers: int | None) -> tuple[tuple[str, ...], str] | None:
    pattern = values.get("hybrid_override_pattern")
    if isinstance(pattern, str) and 0 < len(pattern) <= MAX_LAYERS and set(pattern) <= set(_PATTERN_LETTERS):
        return tuple(_PATTERN_LETTERS[letter] for letter in pattern), "hybrid_override_pattern"
    return None


def _indices(value: object) -> frozenset[int] | None:
    if (
        isinstance(value, list)
        and len(value) <= MAX_LAYERS
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    ):
        return frozenset(value)
    return None


def _from_indices(values: Mapping[str, object], num_layers: int | None) -> tuple[tuple[str, ...], str] | None:
    """Lists of the layers that attend (or, `hybrid_layer_ids`, that attend as well)."""
    if num_layers is None:
        return None
    for key, inside in (("attn_layer_indices", ATTENTION), ("full_attn_idxs", ATTENTION), ("hybrid_layer_ids", "hybrid")):
        chosen = _indices(values.get(key))
        if chosen is not None:
            return tuple(inside if i in chosen else RECURRENT for i in range(num_layers)), key
    linear = values.get("linear_attn_config")
    if isinstance(linear, dict):  # counts layers from 1
        full, recurrent = _indices(linear.get("full_attn_layers")), _indices(linear.get("kda_layers"))
        if full is not None and recurrent is not None:
            kinds = tuple(ATTENTION if i + 1 in full else RECURRENT for i in range(num_layers))
            return kinds, "linear_attn_config.full_attn_layers"
    return None


def _from_period(values: Mapping[str, object], num_layers: int | None) -> tuple[tuple[str, ...], str] | None:
    """Every n-th layer attends, from an offset (default: the last of each group)."""
    if num_layers is None:
        return None
    for key, offset_key in (
        ("attn_layer_period", "attn_layer_offset"),
        ("full_attention_interval", ""),
        ("layer_group_size", ""),
    ):
        period = values.get(key)
        if not isinstance(period, int) or isinstance(period, bool) or not 1 < period <= MAX_LAYERS:
            continue
        offset = values.get(offset_key, period - 1) if offset_key else period - 1
        if isinstance(offset, int):
            return tuple(ATTENTION if i % period == offset % period else RECURRENT for i in range(num_layers)), key
    return None
