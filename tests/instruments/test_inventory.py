"""Finding the tables from names, shapes and config together; what must never be taken for one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Tables, TensorInfo
from ghoststep.instruments.declared import from_config
from ghoststep.instruments.inventory import tables
from tests.instruments.zoo import build, score, stored_of

NO_CONFIG = Missing(reason="no config")
V, D = 4096, 64
LAYER = {f"model.layers.{i}.{rest}": shape for i in range(2) for rest, shape in (
    ("self_attn.q_proj.weight", (D, D)), ("mlp.down_proj.weight", (D, V)), ("mlp.up_proj.weight", (V, D)),
    ("input_layernorm.weight", (D,)))}  # fmt: skip


def config(**extra: object) -> Declared:
    return from_config({"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, **extra}, file="config.json")


def found(shapes: Mapping[str, tuple[int, ...]], declared: Declared | Missing | None = None) -> Tables:
    result: Tables = tables(stored_of({**LAYER, **shapes}), config() if declared is None else declared)
    return result


def names(result: Tables) -> tuple[str, str | None, tuple[str, ...]]:
    output = result.output.tensor.name if result.output else None
    return result.input.tensor.name, output, tuple(t.tensor.name for t in result.others)


@pytest.mark.parametrize("declared", [config(), NO_CONFIG], ids=["config", "names only"])
@pytest.mark.parametrize(
    ("input_name", "output_name"),
    [("model.embed_tokens.weight", "lm_head.weight"), ("transformer.wte.weight", "lm_head.weight"),
     ("gpt_neox.embed_in.weight", "embed_out.weight"), ("tok_embeddings.weight", "output.weight"),
     ("token_embd.weight", "output.weight"), ("backbone.embedding.weight", "lm_head.weight"), ("emb.weight", "head.weight"),
     ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"),
     ("embedding.word_embeddings.weight", "output_layer.weight"), ("model.transformer.wte.weight", "model.transformer.ff_out.weight"),
     ("decoder.embed_tokens.weight", "decoder.output_projection.weight"), ("bert.embeddings.word_embeddings.weight",
      "cls.predictions.decoder.weight"), ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
     ("_orig_mod.transformer.wte.weight", "_orig_mod.lm_head.weight"), ("module.tok_emb.weight", "module.unembed.weight")],
)  # fmt: skip
def test_common_names_both_ways(input_name: str, output_name: str, declared: Declared | Missing) -> None:
    pair = {input_name: (V, D), output_name: (V, D)}
    assert names(found(pair, declared)) == (input_name, output_name, ())
    assert names(found({input_name: (V, D)}, declared)) == (input_name, None, ())


def test_reason_in_words() -> None:
    result = found({"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)})
    assert result.input.reason == "named …embed_tokens.weight, 4096 table rows = vocab_size, 64 dims = hidden_size"
    assert result.output is not None
    assert "named …lm_head.weight" in result.output.reason
    assert (result.input.num_rows, result.input.num_dims, result.input.unreadable) == (V, D, None)


@pytest.mark.parametrize("declared", [config(), NO_CONFIG], ids=["config", "names only"])
@pytest.mark.parametrize(
    "wrong",
    ["transformer.wpe.weight", "model.embed_positions.weight", "bert.embeddings.position_embeddings.weight", "position_embd.weight",
     "bert.embeddings.token_type_embeddings.weight", "transformer.positions_embed.weight", "model.decoder.pos_emb.weight"],
)  # fmt: skip
def test_position_and_type_tables_are_never_taken(wrong: str, declared: Declared | Missing) -> None:
    alone = {wrong: (V, D)}
    with pytest.raises(CannotLook, match="none of 9 stored tensors is an input embedding"):
        found(alone, declared)
    result = found({**alone, "model.embed_tokens.weight": (V, D)}, declared)
    assert names(result)[:2] == ("model.embed_tokens.weight", None)


@pytest.mark.parametrize(
    "head", ["score.weight", "classifier.weight", "v_head.summary.weight", "reward_head.weight", "lm_head.weight"]
)
def test_classifier_and_reward_heads_are_no_output_table(head: str) -> None:
    result = found({"model.embed_tokens.weight": (V, D), head: (1, D)})
    assert result.output is None
    assert head in result.output_reason


def test_vision_language_model_takes_the_text_table() -> None:
    shapes = {"vision_tower.patch_embed.weight": (V, D), "visual.pos_embed.weight": (V, D), "audio_tower.embed_tokens.weight": (V, D),
              "model.language_model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}  # fmt: skip
    assert names(found(shapes))[:2] == ("model.language_model.embed_tokens.weight", "lm_head.weight")


def test_encoder_decoder_with_stored_copies() -> None:
    shapes = {"shared.weight": (V, D), "encoder.embed_tokens.weight": (V, D), "decoder.embed_tokens.weight": (V, D),
              "lm_head.weight": (V, D)}  # fmt: skip
    result = found(shapes)
    assert names(result) == ("shared.weight", "lm_head.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"))
    assert all("stored copy or a second one" in t.reason for t in result.others)


def test_encoder_decoder_with_two_own_tables() -> None:
    result = found({"model.encoder.embed_tokens.weight": (V, D), "model.decoder.embed_tokens.weight": (V, D)})
    assert names(result)[:2] == ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    assert result.output is not None
    assert "its head is tied to" in result.output.reason


def test_further_tables_are_others() -> None:
    shapes = {"model.embed_tokens.weight": (V, D), "model.embed_tokens_per_layer.weight": (V, 128), "lm_head.weight": (V, D),
              "model.layers.9.embed_tokens.weight": (V, D), "model.layers.9.shared_head.head.weight": (V, D)}  # fmt: skip
    result = found(shapes)
    assert names(result)[:2] == ("model.embed_tokens.weight", "lm_head.weight")
    assert list(names(result)[2]) == ["model.embed_tokens_per_layer.weight", "model.layers.9.embed_tokens.weight",
                    "model.layers.9.shared_head.head.weight"]  # fmt: skip


def test_alignment_rows_and_a_table_that_disagrees_with_the_config() -> None:
    padded = found({"model.embed_tokens.weight": (V + 128, D), "lm_head.weight": (V + 128, D)})
    assert "4224 table rows = vocab_size 4096 + 128" in padded.input.reason
    assert padded.output is not None
    short = found({"model.embed_tokens.weight": (V - 7, D), "lm_head.weight": (V - 7, D)})
    assert "4089 table rows where vocab_size is 4096" in short.input.reason
    assert short.output is not None


def test_head_with_a_row_more_than_the_input() -> None:
    result = found({"model.embed_tokens.weight": (V + 1, D), "lm_head.weight": (V, D)})
    assert names(result)[:2] == ("model.embed_tokens.weight", "lm_head.weight")


def test_reduced_output_vocabulary_is_said() -> None:
    result = found({"model.embed_tokens.weight": (V, D), "lm_head.weight": (500, D)})
    assert result.output is not None
    assert "its own vocabulary" in result.output.reason


def test_factorised_tables() -> None:
    declared = config(embedding_size=16)
    result = found({"albert.embeddings.word_embeddings.weight": (V, 16), "predictions.decoder.weight": (V, 16)}, declared)
    assert "16 dims = embedding_size" in result.input.reason
    assert result.output is not None


def test_transposed_head_is_named_and_unreadable() -> None:
    result = found({"model.embed_tokens.weight": (V, D), "lm_head.weight": (D, V)})
    assert result.output is not None
    assert (result.output.num_rows, result.output.num_dims) == (V, D)
    assert result.output.unreadable == "stored transposed, [64 dims, 4096 table rows]"


def quantised(name: str, shape: tuple[int, ...], dtype: str, *companions: str, container: str = "safetensors") -> StoredTensors:
    tensors = dict(stored_of(LAYER).tensors)
    for each, size, kind in ((name, shape, dtype), *((c, (V,), "f32") for c in companions)):
        tensors[each] = TensorInfo(name=each, shape=size, dtype=kind, file="m", num_bytes=1)
    return StoredTensors(format=container, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "companions"),
    [("model.embed_tokens.weight", (V, D), "i8", ("model.embed_tokens.weight_scale",)),
     ("model.embed_tokens.weight", (V * D // 2, 1), "u8", ("model.embed_tokens.weight.absmax",)),
     ("model.embed_tokens.weight", (V, D // 8), "u32", ("model.embed_tokens.scales", "model.embed_tokens.biases")),
     ("model.embed_tokens.qweight", (V, D // 8), "i32", ("model.embed_tokens.qzeros",)),
     ("model.embed_tokens.weight_packed", (V, D // 8), "i32", ("model.embed_tokens.weight_shape",)),
     ("model.embed_tokens.weight", (V, D), "f8_e4m3", ("model.embed_tokens.weight_scale_inv",))],
)  # fmt: skip
def test_packed_tables_are_said_not_guessed(name: str, shape: tuple[int, ...], dtype: str, companions: tuple[str, ...]) -> None:
    for declared in (config(), NO_CONFIG):
        table = tables(quantised(name, shape, dtype, *companions), declared).input
        assert table.unreadable is not None
        assert dtype in table.unreadable
        assert companions[0] in table.unreadable
    assert tables(quantised(name, shape, dtype, *companions), config()).input.num_rows == V


@pytest.mark.parametrize(
    ("dtype", "container"), [("q8_0", "gguf"), ("q4_k", "gguf"), ("bf16", "safetensors"), ("f8_e4m3", "safetensors")]
)
def test_readable_storage_stays_readable(dtype: str, container: str) -> None:
    stored = quantised("model.embed_tokens.weight", (V, D), dtype, container=container)
    assert tables(stored, config()).input.unreadable is None


def adapter(shapes: Mapping[str, tuple[int, ...]]) -> StoredTensors:
    return StoredTensors(format="safetensors", tensors=stored_of(shapes).tensors, base_model="org/base")


def test_adapter_with_saved_tables() -> None:
    prefix = "base_model.model.model."
    shapes = {f"{prefix}embed_tokens.weight": (V, D), "base_model.model.lm_head.modules_to_save.default.weight": (V, D),
              f"{prefix}layers.0.self_attn.q_proj.lora_A.weight": (8, D)}  # fmt: skip
    result = tables(adapter(shapes), config())
    assert names(result) == (f"{prefix}embed_tokens.weight", "base_model.model.lm_head.modules_to_save.default.weight", ())


def test_adapter_without_tables() -> None:
    prefix = "base_model.model.model."
    lora = {f"{prefix}embed_tokens.lora_embedding_A": (8, V), f"{prefix}embed_tokens.lora_embedding_B": (D, 8),
            f"{prefix}embed_tokens.token_adapter.trainable_tokens_delta": (3, D)}  # fmt: skip
    with pytest.raises(CannotLook, match=r"adapter for org/base stores no embedding table .*trainable_tokens_delta"):
        tables(adapter(lora), NO_CONFIG)
    both = tables(adapter({**lora, f"{prefix}embed_tokens.weight": (V, D)}), NO_CONFIG)
    assert [t.reason for t in both.others] == ["3 trained tokens of an adapter, not the whole vocabulary"]


def test_nothing_found_names_the_nearest() -> None:
    with pytest.raises(CannotLook) as caught:
        found({"vision_tower.patch_embed.weight": (768, D), "projector.linear.weight": (D, D)})
    assert "Nearest: " in str(caught.value)
    assert "vision_tower.patch_embed.weight [768, 64]" in str(caught.value)


def test_empty_checkpoint() -> None:
    with pytest.raises(CannotLook, match="none of 0 stored tensors"):
        tables(stored_of({}), NO_CONFIG)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.one_of(
            st.text(max_size=30), st.sampled_from(["a.embed_tokens.weight", "lm_head.weight", "x.0.weight", ".", "..weight"])
        ),
        st.lists(st.integers(0, 1 << 60), max_size=4).map(tuple),
        max_size=6,
    )
)
def test_any_names_and_shapes_give_an_answer_or_a_reason(shapes: dict[str, tuple[int, ...]]) -> None:
    for declared in (config(), NO_CONFIG):
        with contextlib.suppress(CannotLook):
            assert tables(stored_of(shapes), declared).input.tensor.name in shapes


SAMPLE = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "BloomForCausalLM", "Gemma3ForConditionalGeneration", "OPTForCausalLM",
    "Qwen2VLForConditionalGeneration", "BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "RemBertForMaskedLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "T5GemmaForConditionalGeneration", "MambaForCausalLM",
    "Mamba2ForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "Zamba2ForCausalLM",
    "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
    "xLSTMForCausalLM", "Qwen3NextForCausalLM", "OlmoHybridForCausalLM", "KimiLinearForCausalLM", "MiniMaxForCausalLM",
    "DeepseekV3ForCausalLM", "BltForCausalLM", "VisualBertForPreTraining",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_the_truth_of_real_classes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    assert score(build(name)) == ()


@pytest.mark.slow
def test_the_whole_zoo() -> None:
    pytest.importorskip("transformers")
    from tests.instruments.zoo import Exhibit, whole_zoo

    exhibits = [item for item in whole_zoo() if isinstance(item, Exhibit)]
    wrong = {e.name: misses for e in exhibits if (misses := score(e))}
    assert len(exhibits) > 150
    assert len(wrong) <= 0.03 * len(exhibits), wrong
