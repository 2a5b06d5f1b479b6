"""Whether positions see only the past, and whether learned positions lift the embedding: from names and config."""

from __future__ import annotations

import re

from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.instruments.config_values import text_part
from ghoststep.instruments.tensor_names import STRONG_INPUT, layer_of, parse

_CAUSAL_TASK = re.compile(r"(?:CausalLM|LMHeadModel|LMHead|ForConditionalGeneration|DoubleHeadsModel)$")
_MASKED_TASK = re.compile(r"(?:ForMaskedLM|MaskedLM)$")
_ENCODER_NAME = re.compile(r"(?:^|\.)(?:pooler\.|token_type_embeddings?\.|cls\.predictions\.|token_types\.)")


def is_causal(stored: StoredTensors, facts: Declared | None) -> tuple[bool | None, str]:
    """True for decoders, False for encoders, None where the files do not say (encoder-decoders too), with the proof in words."""
    if facts is not None:
        values = {**facts.raw, **text_part(facts.raw).values}
        gguf = values.get(f"{facts.model_type}.attention.causal")
        if isinstance(gguf, bool):
            return gguf, f"attention.causal is {gguf}".lower()
        if values.get("is_encoder_decoder") is True:
            return None, "an encoder-decoder"
        if values.get("use_bidirectional_attention") is True or values.get("is_causal") is False:
            return False, "the config declares attention in both directions"
        if values.get("is_decoder") is True:
            return True, "is_decoder is true"
        for name in facts.architectures:
            if _MASKED_TASK.search(name):
                return False, f"architectures names {name}"
            if _CAUSAL_TASK.search(name):
                return True, f"architectures names {name}"
    sign = next((name for name in stored.tensors if _ENCODER_NAME.search(name)), None)
    if sign is not None:
        return False, f"{sign} belongs to an encoder"
    if stored.format == "gguf" and "token_embd.weight" in stored.tensors:
        return True, "a GGUF language model without attention.causal=false"
    return None, ""


def position_table(stored: StoredTensors, facts: Declared | None) -> str | None:
    """The name of a learned absolute position table as wide as the embedding, outside layers and other modalities, or None."""
    named = [(t, parse(t.name)) for t in stored.tensors.values() if len(t.shape) == 2 and layer_of(t.name) is None]
    widths = {t.shape[1] for t, n in named if STRONG_INPUT.match(n.own) and n.is_plain}
    if facts is not None and facts.hidden_size is not None:
        widths.add(facts.hidden_size)
    for tensor, name in named:
        fits = tensor.shape[0] >= 8 and (not widths or tensor.shape[1] in widths)
        if name.position and fits and not name.modality and not name.own.startswith("rel"):
            return tensor.name
    return None
