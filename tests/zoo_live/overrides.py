"""What a default config lacks to be built tiny, by class."""

from __future__ import annotations

from collections.abc import Mapping

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Each layer draws its dropout from a seed of the operating system: no two runs could be compared.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0}

CONFIG: Mapping[str, Mapping[str, object]] = {
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "CpmAntForCausalLM": {"prompt_types": 3, "prompt_length": 2},  # or its table is nine times the head
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "EncoderDecoderModel": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 128},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 128},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "KimiLinearForCausalLM": {"linear_head_dim": 8, "linear_num_heads": 4},
    # Texts are filled up to a multiple of the window.
    "LongformerForMaskedLM": {"attention_window": [4, 4]},
    "MPNetForMaskedLM": {"pad_token_id": 1, "bos_token_id": 0},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Nemotron3_5TranscribeForConditionalGeneration": {"blank_token_id": 127},
    "PerceiverForMaskedLM": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1},
    # Its head is a matrix of its own, whatever the default config says.
    "LukeForMaskedLM": {"tie_word_embeddings": False, "entity_vocab_size": 16, "entity_emb_size": 32},
    "Qwen4ExpForCausalLM": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                            "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "full_attention"]},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ReformerForMaskedLM": {"axial_pos_embds": False, "is_decoder": False, "attn_layers": ["local", "local"], **_NO_DROPOUT},
    "ReformerModelWithLMHead": {"axial_pos_embds": False, "num_buckets": 2, "attn_layers": ["local", "local"], **_NO_DROPOUT},
    "RoCBertForCausalLM": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    "RoCBertForMaskedLM": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"num_hidden_layers": 6, "layer_types": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}  # fmt: skip
CAUSAL_CONFIG: Mapping[str, Mapping[str, object]] = {
    "XLMWithLMHeadModel": {"causal": True},
}
"""Further values where a class that can be trained in both ways is trained to predict the next token."""
NO_PADS: Mapping[str, str] = {
    "ConvBertForMaskedLM": "its convolution over positions takes no mask: pads reach the real tokens beside them",
    "FNetForMaskedLM": "its Fourier transform over positions takes no mask",
    "MobileBertForMaskedLM": "each position is fed the embeddings of its two neighbours, pads too",
    "NystromformerForMaskedLM": "its landmarks and its convolution take pads in",
    "FunnelForMaskedLM": "it pools neighbouring positions, pads too",
    "YosoForMaskedLM": "its mask is int(1 + mask / 10000), made for an additive mask, of a mask of ones and zeros: 1 everywhere",
}
"""Classes in which pads are seen by construction: the right batch has none. With pads, they must be found (the plant "pads")."""
OWN_DECODER_IDS: frozenset[str] = frozenset({"FSMTForConditionalGeneration"})
"""Encoder-decoders that make no decoder ids from the labels."""
LEFT_PADS: frozenset[str] = frozenset({"CpmAntForCausalLM"})
"""Classes that mask as many positions at the left as an example has pads, wherever those stand."""
NO_MASK_OF_ITS_OWN: frozenset[str] = frozenset({"XLNetLMHeadModel"})
"""Causal classes that every position sees everything in unless a `perm_mask` is passed (`attn_type` "uni" takes no batch)."""
LABELS_OF_THE_SAME_POSITION: frozenset[str] = frozenset({"ProphetNetForCausalLM"})
"""Causal classes whose labels the user shifts, where it cannot be told from one position's logits: the loss averages streams."""
PAD_IS_ONE: frozenset[str] = frozenset({"MPNetForMaskedLM"})
"""Classes whose padding_idx is 1 whatever their config says: PAD and BOS change places."""
