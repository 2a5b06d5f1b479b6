"""How a model moves information between positions, from parameter names and config keys alone.

Every numbered layer is judged by the parameters in it: a recurrence or gated convolution, attention, or both beside each
other. The config's own layer list is a second reading; where the two disagree the stored parameters count, and the reason
says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.wiring import Mixing, MixingClass
from ghoststep.instruments.config_values import text_part
from ghoststep.instruments.direction import is_causal, is_encoder_decoder, position_table
from ghoststep.instruments.mixing_names import ATTENTION_KIND, RECURRENT_KIND, LayerProof, layer_proof
from ghoststep.instruments.tensor_names import is_draft, is_modality, layer_of
from ghoststep.registry import instrument

_RECURRENT_KEY = re.compile(
    r"^(?:mamba_|ssm_cfg|ssm_state|ssm\.|state_size|time_step_|time_step|dt_rank|linear_(?:num_\w+heads|key_head_dim|conv_kernel)"
    r"|linear_attn_config|lru_width|conv_L_cache|shortconv|wkv|rescale_every|attention_hidden_size|slstm|mlstm|qk_dim_factor"
    r"|lightning_|retention)"
)
_ATTENTION_KEY = re.compile(r"^(?:num_attention_heads|n_heads?|num_key_value_heads|attention\.head_count|num_query_heads)$")
MOSTLY = 0.5
"""A stack with fewer than this share of the longest stack's layers (a resampler, a draft head) is not the text stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Layers of the text stacks: purely recurrent, purely attention, both in parallel; one example name of each proof."""

    recurrent: int
    attention: int
    parallel: int
    recurrent_proof: str | None
    attention_proof: str | None


@instrument
def mixing_class(stored: StoredTensors, declared: Declared | Missing) -> MixingClass:
    """Classify the wiring: recurrent-gated, recurrent with attention beside it in every recurrent layer, or attention only.

    Works from names alone or from a config alone; `reason` names the proof and how the two agree. Raises `CannotLook` when
    neither shows how positions mix (a Fourier mixer, an adapter that stores only some projections). Reads no values.
    """
    facts = declared if isinstance(declared, Declared) else None
    counts = _count_layers(stored)
    if counts.recurrent or counts.parallel or (counts.attention and stored.base_model is None):
        mixing, reason = _by_names(counts, facts)
        num_recurrent: int | None = counts.recurrent + counts.parallel
        num_attention: int | None = counts.attention + counts.parallel
    elif facts is not None:
        mixing, reason, num_recurrent, num_attention = _by_config(facts)
    else:
        raise CannotLook(_nothing(stored))
    causal, why = is_causal(stored, facts)
    two_sided, sides = is_encoder_decoder(stored, facts)
    if two_sided:
        causal, why = None, sides
    lifting = position_table(stored, facts)
    notes = [reason, why, f"learned positions in {lifting} are added to the embedding" if lifting else ""]
    return MixingClass(
        mixing=mixing,
        reason="; ".join(filter(None, notes)),
        num_recurrent_layers=num_recurrent,
        num_attention_layers=num_attention,
        causal=causal,
        lifted_by_positions=lifting is not None,
        is_encoder_decoder=two_sided,
    )


def _count_layers(stored: StoredTensors) -> Counts:
    """Group parameters by layer and judge each one."""
    layers: dict[tuple[str, int], list[str]] = {}
    for name in stored.tensors:
        if ".experts." in name and ".experts.0." not in name:
            continue  # one expert shows what all of them are; a large model has 100,000 such names
        layer = layer_of(name)
        if layer is not None and not is_draft(layer.stack):
            layers.setdefault((layer.stack, layer.index), []).append(layer.rest)
    text = {key: rests for key, rests in layers.items() if not is_modality(key[0])}
    layers = text or layers  # "visual" may only be part of the model's own prefix
    judged = {key: layer_proof(rests) for key, rests in _text_layers(layers).items()}
    values = [(f"{stack}.{index}", proof) for (stack, index), proof in judged.items()]
    return Counts(
        recurrent=sum(1 for _, p in values if p.recurrent and not p.attention),
        attention=sum(1 for _, p in values if p.attention and not p.recurrent),
        parallel=sum(1 for _, p in values if p.attention and p.recurrent),
        recurrent_proof=_proof(values, recurrent=True),
        attention_proof=_proof(values, recurrent=False),
    )


def _text_layers(layers: Mapping[tuple[str, int], list[str]]) -> dict[tuple[str, int], list[str]]:
    sizes: dict[str, int] = {}
    for stack, _ in layers:
        sizes[stack] = sizes.get(stack, 0) + 1
    longest = max(sizes.values(), default=0)
    return {key: rests for key, rests in layers.items() if sizes[key[0]] >= MOSTLY * longest}


def _proof(values: Iterable[tuple[str, LayerProof]], *, recurrent: bool) -> str | None:
    for layer, proof in values:
        name = proof.recurrent if recurrent else proof.attention
        if name:
            return f"{layer}.{name}"
    return None


def _by_names(counts: Counts, facts: Declared | None) -> tuple[Mixing, str]:
    if counts.recurrent:
        mixing = Mixing.RECURRENT_GATED
        others = counts.attention + counts.parallel
        reason = f"positions mix only by a recurrence or gate in {_layers(counts.recurrent)} ({counts.recurrent_proof}), by attention "
        reason += f"in {_layers(others)} ({counts.attention_proof})" if others else "in none"
    elif counts.parallel:
        mixing = Mixing.ATTENTION_BESIDE
        reason = f"a recurrence in {_layers(counts.parallel)} ({counts.recurrent_proof}) with attention beside it"
        reason += f" ({counts.attention_proof})"
    else:
        mixing = Mixing.ATTENTION
        reason = f"attention in {_layers(counts.attention)} ({counts.attention_proof}), a recurrence or gate in none"
    return mixing, "; ".join(filter(None, (reason, _agreement(counts, facts))))


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _agreement(counts: Counts, facts: Declared | None) -> str:
    """How the config's layer list compares with the parameters; "" where there is no list."""
    if facts is None or not facts.layer_kinds:
        return ""
    said = sum(1 for kind in facts.layer_kinds if RECURRENT_KIND.search(kind))
    either = sum(
        1 for kind in facts.layer_kinds if kind == "hybrid"
    )  # attention with or without a recurrence: the list is silent
    shown = counts.recurrent + counts.parallel
    if said <= shown <= said + either:
        return f"the config's layer list agrees ({said} recurrent of {len(facts.layer_kinds)})"
    return f"the config's layer list says {said} recurrent layers of {len(facts.layer_kinds)}; the stored parameters were taken"


def _by_config(facts: Declared) -> tuple[Mixing, str, int | None, int | None]:
    """No usable parameter names (an adapter, a config alone): the layer list first, then which keys there are."""
    kinds = facts.layer_kinds
    recurrent = [k for k in kinds if RECURRENT_KIND.search(k)]
    attention = [k for k in kinds if ATTENTION_KIND.search(k) and not RECURRENT_KIND.search(k)]
    where = f"{facts.file} lists {len(kinds)} layers"
    if recurrent:
        reason = f"{where}, {len(recurrent)} of them {recurrent[0]!r}; no parameter names of layers to compare"
        return Mixing.RECURRENT_GATED, reason, len(recurrent), len(attention)
    if attention and len(attention) == len(kinds) and not any(kind == "hybrid" for kind in kinds):
        return Mixing.ATTENTION, f"{where}, all attention; no parameter names of layers to compare", 0, len(attention)
    keys = _keys(facts)
    recurrent_keys = [k for k in keys if _RECURRENT_KEY.match(k)]
    attention_keys = [k for k in keys if _ATTENTION_KEY.match(k)]
    if recurrent_keys and attention_keys:
        raise CannotLook(
            f"{facts.file} has {recurrent_keys[0]} and {attention_keys[0]}, but no layer list says whether layers hold one or both, "
            "and no parameter names are there to tell"
        )
    if recurrent_keys:
        return Mixing.RECURRENT_GATED, f"{facts.file} has {', '.join(recurrent_keys[:3])} and no attention heads", None, 0
    if attention_keys:
        return Mixing.ATTENTION, f"{facts.file} has {attention_keys[0]} and no key of a recurrence", 0, None
    raise CannotLook(
        f"neither parameter names nor {facts.file} show how positions mix: expected layers with attention or recurrence "
        "parameters, or keys such as num_attention_heads"
    )


def _keys(facts: Declared) -> list[str]:
    if facts.model_type is not None and "general.architecture" in facts.raw:
        prefix = f"{facts.model_type}."
        return [k[len(prefix) :] for k in facts.raw if k.startswith(prefix)]
    return [k for k, v in text_part(facts.raw).values.items() if v not in (None, False, 0)]


def _nothing(stored: StoredTensors) -> str:
    if stored.base_model is not None:
        base = stored.base_model or "an unnamed base model"
        return f"this adapter for {base} stores only some projections: its wiring is that of the base model"
    return (
        f"none of {len(stored.tensors)} tensor names shows a numbered layer with attention or a recurrence, and there is no config; "
        "put the model's config.json beside its weights"
    )
