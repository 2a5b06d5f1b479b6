"""Tiny models of the classes that transformers maps to a language modelling task, from their default configs.

Nothing here is chosen by model: sizes are set wherever a config has a key of that name, at any depth, and per-layer lists are cut
to the new depth. What cannot be made small that way is in `overrides.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tests.zoo_live.overrides import CAUSAL_CONFIG, CONFIG

NUM_TOKENS = 128
PAD, BOS, EOS, MASK, FIRST_WORD = 0, 1, 2, 3, 5
MOST_PARAMETERS = 8_000_000
FAMILIES: Mapping[str, str] = {"causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM"}
DEPTH = 2
NOTHING: Mapping[str, object] = {}
DEFAULT = object()
"""Leave the key as the config class has it."""
ATTEMPTS: tuple[Mapping[str, object], ...] = (
    {}, {"num_key_value_heads": 4}, {"head_dim": DEFAULT}, {"rotary_dim": DEFAULT}, {"num_key_value_heads": DEFAULT},
    {"head_dim": DEFAULT, "num_key_value_heads": 4}, {"v_head_dim": DEFAULT, "head_dim": DEFAULT}, {"layer_types": DEFAULT},
)  # fmt: skip
"""Other values, tried in turn, when a class does not run with `SIZES`."""


SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim", "hidden_dim", "embedding_size",
                     "embedding_dim", "word_embed_proj_dim", "attention_hidden_size", "lru_width", "rescale_embeddings_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff",
                     "ffn_hidden_size", "ffn_embed_dim", "hidden_dim_ff", "intermediate_size_mlp", "feed_forward_size"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth", "max_window_layers"), DEPTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
                     "num_heads", "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_dim", "dim_head", "rotary_dim", "global_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input",
                     "n_words", "text_vocab_size", "encoder_vocab_size"), NUM_TOKENS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_source_positions",
                     "max_seq_len", "max_sequence_length", "context_length", "seq_length", "max_length_positions"), 64),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "o_lora_rank",
                     "mamba_dt_rank", "time_step_rank", "laurel_rank", "hidden_size_per_layer_input", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_total"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "index_n_heads", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
                     "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups", "n_groups",
                     "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "index_head_dim", "index_topk",
                     "mamba_chunk_size", "chunk_size", "mamba_headdim", "mamba_head_dim", "linear_key_head_dim",
                     "linear_value_head_dim"), 8),
    "mamba_n_heads": 8, "mamba_d_head": 8, "n_mamba_heads": 8, "mamba_num_heads": 8,
    "image_size": 28, "patch_size": 14, "num_mel_bins": 16, "projection_dim": 32, "n_mels": 16, "output_dim": 32,
    "num_kv_shared_layers": 0, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "mask_token_id": MASK,
    "decoder_start_token_id": EOS, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
"""Keys of a config and their tiny values; a key that a config lacks is left alone."""


def class_names(family: str) -> dict[str, str]:
    """Class name → model type, each class once, in the order of transformers' mapping."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{FAMILIES[family]}_MAPPING_NAMES").items():
        for name in (names,) if isinstance(names, str) else names:
            found.setdefault(name, model_type)
    return found


def config_class(name: str) -> Any:
    """The class of the config of this model class."""
    import transformers

    return getattr(transformers, name).config_class


def build(name: str, family: str) -> Any:
    """The tiny model with random weights. Raises what its class raises, and `ValueError` when it stays too big."""
    import torch

    last: Exception | None = None
    for other in ATTEMPTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                model = _build(name, family, other)
                _run(model)
                return model
        except Exception as error:
            last = last or error
    assert last is not None
    raise last


def _build(name: str, family: str, other: Mapping[str, object]) -> Any:
    import torch
    import transformers

    cls = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(tiny_config(name, family, other)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters, more than {MOST_PARAMETERS}, however small its config is made")
    model = cls(tiny_config(name, family, other)).float()
    if getattr(model.config, "is_encoder_decoder", False) and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = PAD
    return model


def _run(model: Any) -> None:
    """One forward over ordinary ids: sizes that do not fit are often told only here."""
    import torch

    ids = torch.full((2, 20), FIRST_WORD)
    more = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)


def tiny_config(name: str, family: str, other: Mapping[str, object] = NOTHING) -> Any:
    """The config of the class with `SIZES`, then `other`, then its own overrides."""
    cls = config_class(name)
    own = {**CONFIG.get(name, {}), **(CAUSAL_CONFIG.get(name, {}) if family == "causal" else {})}
    if family == "causal" and hasattr(cls(), "is_decoder"):
        own = {"is_decoder": True, **own}
    arguments = shrunk(cls, other)
    for key, value in own.items():
        if isinstance(value, Mapping) and hasattr(arguments.get(key), "to_dict"):
            for part_key, part_value in value.items():
                setattr(arguments[key], part_key, part_value)
        else:
            arguments[key] = value
    return cls(**arguments)


def shrunk(cls: Any, other: Mapping[str, object] = NOTHING) -> dict[str, Any]:
    """The arguments that make a config of this class tiny, nested configs included."""
    default = cls()
    renamed: Mapping[str, str] = getattr(cls, "attribute_map", {})
    values = default.to_dict()
    arguments = {k: v for k, v in {**SIZES, **other}.items() if (k in values or k in renamed) and v is not DEFAULT}
    arguments = {k: v for k, v in arguments.items() if renamed.get(k) not in arguments}  # one name a value
    for key in getattr(cls, "sub_configs", {}):
        part = getattr(default, key, None)
        if part is not None and hasattr(part, "to_dict"):
            arguments[key] = type(part)(**shrunk(type(part), other))
    depth = next(
        (getattr(default, k, None) for k in ("num_hidden_layers", "num_layers", "n_layer") if hasattr(default, k)), None
    )
    for key, value in values.items():
        if (
            isinstance(value, list)
            and isinstance(depth, int)
            and len(value) == depth > DEPTH
            and key not in {**arguments, **other}
        ):
            arguments[key] = some_of_each(value)
    return arguments


def some_of_each(values: list[Any]) -> list[Any]:
    """`DEPTH` entries of a per-layer list, of different kinds where there are some."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return (kinds + values)[:DEPTH]
