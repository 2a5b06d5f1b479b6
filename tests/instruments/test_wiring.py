"""The wiring class from parameter names and config, each alone and both together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors
from ghoststep.evidence.wiring import Mixing, MixingClass
from ghoststep.instruments.declared import from_config, from_gguf
from ghoststep.instruments.wiring import mixing_class
from tests.instruments.zoo import stored_of

NO_CONFIG = Missing(reason="no config")
ATTENTION = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.gate_proj.weight")
MAMBA = ("mamba.A_log", "mamba.conv1d.weight", "mamba.in_proj.weight", "mamba.x_proj.weight", "mamba.out_proj.weight")
DELTA = (
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "linear_attn.q_proj.weight",
    "linear_attn.k_proj.weight",
    "linear_attn.conv1d.weight",
)
SHORT_CONV = ("conv.conv.weight", "conv.in_proj.weight", "conv.out_proj.weight")


def model(*layers: Sequence[str], stack: str = "model.layers") -> StoredTensors:
    return stored_of({f"{stack}.{i}.{rest}": (8, 8) for i, rests in enumerate(layers) for rest in rests})


def by_names(*layers: Sequence[str]) -> MixingClass:
    found: MixingClass = mixing_class(model(*layers), NO_CONFIG)
    return found


def config(**values: object) -> Declared:
    return from_config(values, file="config.json")


RECURRENT = {
    "mamba": MAMBA,
    "mamba mixer": ("mixer.A_log", "mixer.D", "mixer.conv1d.weight", "mixer.in_proj.weight", "mixer.out_proj.weight"),
    "gated delta net": DELTA,
    "delta attention": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.forget_gate.A_log",
        "self_attn.b_proj.weight",
    ),
    "short convolution": SHORT_CONV,
    "rg-lru": ("temporal_block.rg_lru.recurrent_param", "temporal_block.conv_1d.weight", "temporal_block.linear_x.weight"),
    "rwkv": ("attention.time_decay", "attention.time_mix_key", "attention.key.weight", "attention.value.weight"),
    "rwkv 7": ("att.x_r", "att.w0", "att.key.weight", "att.receptance.weight"),
    "mlstm": (
        "mlstm_layer.q.weight",
        "mlstm_layer.k.weight",
        "mlstm_layer.igate_preact.weight",
        "mlstm_layer.fgate_preact.weight",
    ),
    "lightning": ("self_attn.qkv_proj.weight", "self_attn.output_gate.weight", "self_attn.out_proj.weight"),
    "retention": ("retention.q_proj.weight", "retention.k_proj.weight", "retention.g_proj.weight"),
    "gguf ssm": ("ssm_a", "ssm_in.weight", "ssm_conv1d.weight"),
    "gguf delta net": ("attn_qkv.weight", "attn_gate.weight", "ssm_a", "ssm_beta.weight"),
}
ATTENTIONS = {
    "llama": ATTENTION,
    "gpt-2": ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight"),
    "neox": ("attention.query_key_value.weight", "mlp.dense_h_to_4h.weight"),
    "bert": ("attention.self.query.weight", "attention.self.key.weight"),
    "t5": ("layer.0.SelfAttention.q.weight", "layer.0.SelfAttention.k.weight"),
    "meta": ("attention.wq.weight", "attention.wk.weight", "feed_forward.w1.weight"),
    "latent": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"),
    "gguf": ("attn_q.weight", "attn_k.weight", "ffn_gate.weight"),
    "gated attention": (*ATTENTION, "self_attn.g_proj.weight", "self_attn.gate_proj.weight"),
    "short convolution on the keys": (*ATTENTION, "self_attn.k_proj.sconv.conv1d.weight"),
    "mixture of experts": (*ATTENTION, "mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "block_sparse_moe.router.weight"),
    "dt_proj in softmax attention": (*ATTENTION, "self_attn.dt_proj.weight"),
}


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers(layer: Sequence[str]) -> None:
    found = by_names(layer, layer)
    assert found.mixing is Mixing.RECURRENT_GATED, found.reason
    assert (found.num_recurrent_layers, found.num_attention_layers) == (2, 0)
    assert "model.layers.0." in found.reason


@pytest.mark.parametrize("layer", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_layers(layer: Sequence[str]) -> None:
    found = by_names(layer, layer)
    assert found.mixing is Mixing.ATTENTION, found.reason
    assert (found.num_recurrent_layers, found.num_attention_layers) == (0, 2)


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_interleaved_hybrids_are_recurrent_with_counts(layer: Sequence[str]) -> None:
    found = by_names(layer, ATTENTION, layer)
    assert found.mixing is Mixing.RECURRENT_GATED
    assert (found.num_recurrent_layers, found.num_attention_layers) == (2, 1)


@pytest.mark.parametrize(
    "layer",
    [
        (*MAMBA, *ATTENTION),
        ("mamba.A_log", "mamba.self_attn.q_proj.weight"),
        ("attn_q.weight", "attn_k.weight", "ssm_a", "ssm_in.weight"),
    ],
)
def test_attention_beside_a_recurrence_in_every_layer(layer: Sequence[str]) -> None:
    found = by_names(layer, layer)
    assert found.mixing is Mixing.ATTENTION_BESIDE, found.reason
    assert (found.num_recurrent_layers, found.num_attention_layers) == (2, 2)
    mixed = by_names(layer, MAMBA)
    assert mixed.mixing is Mixing.RECURRENT_GATED, "one layer without attention beside it is enough"


def test_a_vision_tower_does_not_count() -> None:
    text = {f"model.language_model.layers.{i}.{rest}": (8, 8) for i in range(2) for rest in MAMBA}
    vision = {f"model.visual.blocks.{i}.attn.qkv.weight": (8, 8) for i in range(9)}
    found = mixing_class(stored_of({**text, **vision}), NO_CONFIG)
    assert (found.mixing, found.num_attention_layers) == (Mixing.RECURRENT_GATED, 0)


def test_config_list_agrees_or_the_reason_says_what_was_taken() -> None:
    agree = mixing_class(model(MAMBA, ATTENTION), config(layer_types=["mamba", "attention"]))
    assert "layer list agrees (1 recurrent of 2)" in agree.reason
    differ = mixing_class(model(ATTENTION, ATTENTION), config(layer_types=["linear_attention", "full_attention"]))
    assert differ.mixing is Mixing.ATTENTION
    assert "says 1 recurrent layers of 2; the stored parameters were taken" in differ.reason


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"layer_types": ["linear_attention", "full_attention"]}, Mixing.RECURRENT_GATED),
     ({"layer_types": ["sliding_attention", "full_attention"], "mamba_d_state": 16, "num_attention_heads": 2}, Mixing.ATTENTION),
     ({"num_attention_heads": 4}, Mixing.ATTENTION), ({"n_heads": 4}, Mixing.ATTENTION),
     ({"state_size": 16, "time_step_rank": 4}, Mixing.RECURRENT_GATED),
     ({"text_config": {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 4}}, Mixing.ATTENTION)],
)  # fmt: skip
def test_config_alone(values: dict[str, object], expected: Mixing) -> None:
    assert mixing_class(stored_of({}), config(**values)).mixing is expected


def test_both_kinds_of_keys_without_a_list_cannot_be_told() -> None:
    with pytest.raises(CannotLook, match="one or both"):
        mixing_class(stored_of({}), config(mamba_d_ssm=16, num_attention_heads=4))


def test_nothing_to_see() -> None:
    fourier = model(("fourier.output.LayerNorm.weight", "intermediate.dense.weight"))
    for declared in (NO_CONFIG, config(hidden_size=8)):
        with pytest.raises(CannotLook):
            mixing_class(fourier, declared)


def test_an_adapter_proves_recurrence_but_never_attention_only() -> None:
    def adapter(rest: str) -> StoredTensors:
        tensors = stored_of({f"base_model.model.model.layers.0.{rest}": (8, 8)}).tensors
        return StoredTensors(format="safetensors", tensors=tensors, base_model="org/base")

    with pytest.raises(CannotLook, match="adapter for org/base"):
        mixing_class(adapter("self_attn.q_proj.lora_A.weight"), NO_CONFIG)
    assert mixing_class(adapter("mamba.dt_bias.lora_A.weight"), NO_CONFIG).mixing is Mixing.RECURRENT_GATED


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"architectures": ["XForCausalLM"]}, True), ({"architectures": ["GPT2LMHeadModel"]}, True),
     ({"architectures": ["XForMaskedLM"]}, False), ({"architectures": ["XModel"]}, None),
     ({"architectures": ["XForSequenceClassification"]}, None), ({"architectures": ["BertModel"], "is_decoder": True}, True),
     ({"architectures": ["XForConditionalGeneration"], "is_encoder_decoder": True}, None),
     ({"architectures": ["XForConditionalGeneration"]}, True), ({"use_bidirectional_attention": True}, False), ({}, None)],
)  # fmt: skip
def test_causal_from_the_config(values: dict[str, object], expected: bool | None) -> None:
    assert mixing_class(model(ATTENTION), config(**values)).causal is expected


@pytest.mark.parametrize("name", ["pooler.dense.weight", "embeddings.token_type_embeddings.weight", "cls.predictions.bias"])
def test_encoders_by_name(name: str) -> None:
    stored = stored_of({**{f"encoder.layer.0.{r}": (8, 8) for r in ATTENTIONS["bert"]}, name: (2, 8)})
    assert mixing_class(stored, NO_CONFIG).causal is False


def test_causal_of_a_gguf() -> None:
    tensors = stored_of({"token_embd.weight": (64, 8), **{f"blk.0.{r}": (8, 8) for r in ATTENTIONS["gguf"]}}).tensors
    stored = StoredTensors(format="gguf", tensors=tensors)
    metadata: dict[str, object] = {"general.architecture": "a", "a.attention.head_count": 4}
    assert mixing_class(stored, from_gguf(metadata)).causal is True
    assert mixing_class(stored, from_gguf({**metadata, "a.attention.causal": False})).causal is False


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [("transformer.wpe.weight", (128, 16), True), ("model.decoder.embed_positions.weight", (130, 16), True),
     ("position_embd.weight", (128, 16), True), ("embeddings.position_embeddings.weight", (128, 16), True),
     ("encoder.embed_positions.weight", (128, 4), False), ("visual.pos_embed.weight", (128, 16), False),
     ("model.layers.0.attn.relative_position.weight", (128, 16), False), ("pos_conv_embed.weight", (128, 16), False)],
)  # fmt: skip
def test_positions_that_lift_the_embedding(name: str, shape: tuple[int, int], expected: bool) -> None:
    shapes = {"wte.weight": (64, 16), name: shape, **{f"h.0.{r}": (8, 8) for r in ATTENTIONS["gpt-2"]}}
    for declared in (NO_CONFIG, config(n_embd=16, vocab_size=64)):
        found = mixing_class(stored_of(shapes), declared)
        assert found.lifted_by_positions is expected
        assert (name in found.reason) is expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=40), st.from_regex(r"(model\.)?layers\.[0-9]{1,8}\.[a-zA-Z_.]{0,12}")), max_size=8))
def test_any_names_give_an_answer_or_a_reason(names: list[str]) -> None:
    with contextlib.suppress(CannotLook):
        assert mixing_class(stored_of(dict.fromkeys(names, (4, 4))), NO_CONFIG).reason
