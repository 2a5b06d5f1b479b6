"""What the config files declare: nested, native, GGUF, adapters, and values of a wrong type."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ghoststep.errors import CannotLook
from ghoststep.instruments.declared import declared, from_config, from_gguf


class Files:
    """A checkpoint of parsed files only."""

    kind = "checkpoint"
    name = "made-up"

    def __init__(self, files: Mapping[str, object], metadata: Mapping[str, object] | None = None) -> None:
        self.files = files
        self._metadata = metadata or {}

    def read_json(self, file: str, *, limit_bytes: int = 0) -> object:
        found = self.files.get(file)
        if isinstance(found, Exception):
            raise found
        return found

    def metadata(self) -> Mapping[str, object]:
        return self._metadata


PLAIN: dict[str, object] = {
    "model_type": "anything",
    "architectures": ["AnythingForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "tie_word_embeddings": True,
}


def test_plain_config_with_places() -> None:
    facts = declared(Files({"config.json": PLAIN, "generation_config.json": {"eos_token_id": 7, "bos_token_id": [1]}}))
    assert (facts.vocab_size, facts.vocab_size_key, facts.hidden_size, facts.num_layers) == (1000, "vocab_size", 64, 4)
    assert (facts.bos_token_ids, facts.eos_token_ids, facts.pad_token_ids) == ((1,), (2, 3), ())
    assert facts.generation == {"eos": (7,), "bos": (1,)}
    assert (facts.tie_word_embeddings, facts.tie_key) == (True, "tie_word_embeddings")
    assert facts.problems == ()
    assert facts.raw == PLAIN


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "decoder", "some_new_inner_model"])
def test_nested_text_config_is_found_by_its_vocabulary(key: str) -> None:
    vision = {"hidden_size": 9, "num_hidden_layers": 2, "vocab_size": 50_000}
    config = {"architectures": ["VForConditionalGeneration"], "vision_config": vision, key: PLAIN}
    facts = from_config(config, file="config.json")
    assert (facts.vocab_size, facts.vocab_size_key, facts.hidden_size) == (1000, f"{key}.vocab_size", 64)
    assert facts.architectures == ("VForConditionalGeneration",)


def test_text_config_two_levels_down() -> None:
    config = {"thinker_config": {"audio_config": {"d_model": 8}, "text_config": PLAIN}, "talker_config": {"vocab_size": 99}}
    assert from_config(config, file="config.json").vocab_size_key == "thinker_config.text_config.vocab_size"


def test_vocabulary_size_at_the_root_beside_a_nested_config_without_it() -> None:
    config = {"vocab_size": 777, "text_config": {"hidden_size": 32, "num_hidden_layers": 3}}
    facts = from_config(config, file="config.json")
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (777, 32, 3)


def test_config_without_vocabulary_size_is_fine() -> None:
    facts = from_config({"hidden_size": 64}, file="config.json")
    assert facts.vocab_size is None
    assert facts.problems == ()


@pytest.mark.parametrize("value", ["32000", -1, 0, 1.5, True, 1 << 40, [1], {"a": 1}])
def test_impossible_vocabulary_size_is_undeclared_and_said(value: object) -> None:
    facts = from_config({**PLAIN, "vocab_size": value}, file="config.json")
    assert facts.vocab_size is None
    assert len(facts.problems) == 1
    assert facts.problems[0].startswith("config.json: vocab_size is ")
    assert facts.hidden_size == 64, "one bad value blinds nothing else"


def test_null_is_undeclared_without_a_problem() -> None:
    facts = from_config({**PLAIN, "vocab_size": None}, file="config.json")
    assert facts.vocab_size is None
    assert facts.problems == ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-1, ()), ([2, -1], (2,)), ((1 << 32) - 1, ()), ("2", ()), ([2, "3"], ()), (True, ()), ([[1]], ()), ([5, 5], (5,))],
)
def test_token_ids(value: object, expected: tuple[int, ...]) -> None:
    assert from_config({**PLAIN, "eos_token_id": value}, file="config.json").eos_token_ids == expected


@pytest.mark.parametrize("junk", ["x", 3, None, [1], [{"a": 1}], {"k": "v"}, 1e308, ["a" * 1000]])
def test_no_value_of_any_key_raises(junk: object) -> None:
    keys = [*PLAIN, "text_config", "auto_map", "quantization_config", "layer_types", "attn_layer_indices", "linear_attn_config",
            "hybrid_override_pattern", "attn_layer_period", "scale_embedding", "embedding_multiplier", "attn_type_list"]  # fmt: skip
    for key in keys:
        from_config({**PLAIN, key: junk}, file="config.json", generation={"eos_token_id": junk})


def test_deeply_nested_config_is_bounded() -> None:
    config: dict[str, object] = {}
    inner = config
    for _ in range(500):
        inner["a_config"] = {}
        inner = inner["a_config"]  # type: ignore[assignment]
    inner["vocab_size"] = 5
    assert from_config({**config, **{f"c{i}": {"x": {}} for i in range(2000)}}, file="config.json").vocab_size is None


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (True, False, True),
        (None, True, True),
        (None, False, False),
        (False, False, False),
        (False, True, None),
        (True, None, True),
    ],
)
def test_tie_flag_of_a_composite_config(outer: bool | None, inner: bool | None, expected: bool | None) -> None:
    text = {k: v for k, v in PLAIN.items() if k != "tie_word_embeddings"}
    text.update({} if inner is None else {"tie_word_embeddings": inner})
    config = {"text_config": text, **({} if outer is None else {"tie_word_embeddings": outer})}
    facts = from_config(config, file="config.json")
    assert facts.tie_word_embeddings is expected
    if (outer, inner) == (False, True):
        assert facts.tie_key == "tie_word_embeddings=false, text_config.tie_word_embeddings=true"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("embedding_multiplier", 12.0, 12.0), ("scale_emb", 12, 12.0), ("scale_embedding", True, 8.0), ("scale_embedding", False, 1.0),
     ("embedding_scale", 0.5, 0.5), ("embedding_multiplier_scale", 78.4, 78.4), ("embedding_multiplier", "12", None),
     ("sine_position_embedding_scale", 3.0, None), ("logit_scale", 2.0, None), ("attention_multiplier", 2.0, None),
     ("embedding_multiplier", None, None), ("scale_embedding", -1, None)],
)  # fmt: skip
def test_embedding_multiplier(key: str, value: object, expected: float | None) -> None:
    facts = from_config({**PLAIN, key: value}, file="config.json")
    assert facts.embedding_multiplier == expected
    if expected is not None:
        assert facts.embedding_multiplier_key is not None
        assert key in facts.embedding_multiplier_key


@pytest.mark.parametrize(
    ("found", "expected"),
    [({"quant_method": "gptq", "bits": 4}, "gptq 4-bit"),
     ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
     ({"quant_method": "fp8"}, "fp8"), ({}, "quantization_config"), (None, None)],
)  # fmt: skip
def test_quantization(found: object, expected: str | None) -> None:
    assert from_config({**PLAIN, "quantization_config": found}, file="config.json").quantization == expected


def test_remote_code_is_listed_not_run() -> None:
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoTokenizer": ["tokenization_x.X", None]}
    facts = from_config({**PLAIN, "auto_map": auto_map}, file="config.json")
    assert facts.remote_code == ("configuration_x.XConfig", "tokenization_x.X")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({"layer_types": ["mamba", "attention"] * 2}, ("mamba", "attention", "mamba", "attention")),
     ({"block_types": ["recurrent", "recurrent", "attention"]}, ("recurrent", "recurrent", "attention", "recurrent")),
     ({"hybrid_override_pattern": "M-*E"}, ("mamba", "mlp", "attention", "moe")),
     ({"attn_layer_indices": [2]}, ("recurrent", "recurrent", "attention", "recurrent")),
     ({"full_attn_idxs": [0]}, ("attention", "recurrent", "recurrent", "recurrent")),
     ({"attn_layer_period": 4, "attn_layer_offset": 1}, ("recurrent", "attention", "recurrent", "recurrent")),
     ({"full_attention_interval": 2}, ("recurrent", "attention", "recurrent", "attention")),
     ({"attn_type_list": [0, 0, 0, 1]}, ("linear_attention", "linear_attention", "linear_attention", "attention")),
     ({"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
      ("recurrent", "recurrent", "recurrent", "attention")),
     ({"layer_types": ["mamba", 3]}, ()), ({}, ())],
)  # fmt: skip
def test_layer_kinds(keys: Mapping[str, object], expected: tuple[str, ...]) -> None:
    assert from_config({**PLAIN, **keys}, file="config.json").layer_kinds == expected


def test_native_params_json() -> None:
    params = {"dim": 4096, "n_layers": 32, "vocab_size": 32_000, "tied_embeddings": True}
    facts = declared(Files({"params.json": params}))
    assert (facts.file, facts.vocab_size, facts.hidden_size, facts.num_layers) == ("params.json", 32_000, 4096, 32)
    assert (facts.tie_word_embeddings, facts.tie_key) == (True, "tied_embeddings")


def test_native_params_with_minus_one_as_vocabulary() -> None:
    facts = declared(Files({"params.json": {"dim": 64, "vocab_size": -1}}))
    assert facts.vocab_size is None
    assert "params.json: vocab_size is -1" in facts.problems[0]


def test_gguf_metadata() -> None:
    metadata = {
        "general.architecture": "llama", "llama.vocab_size": 49152, "llama.block_count": 30, "llama.embedding_length": 576,
        "llama.attention.head_count": 9, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3, "tokenizer.ggml.tokens": ("a",) * 49152, "llama.embedding_scale": 12.0,
    }  # fmt: skip
    facts = declared(Files({}, metadata))
    assert (facts.vocab_size, facts.vocab_size_key) == (49152, "llama.vocab_size")
    assert (facts.hidden_size, facts.num_layers, facts.embedding_multiplier) == (576, 30, 12.0)
    assert (facts.bos_token_ids, facts.eos_token_ids, facts.pad_token_ids) == ((1,), (2,), (3,))
    assert facts.tie_word_embeddings is None
    assert "tokenizer.ggml.tokens" not in facts.raw, "the token list is not copied into the facts"


def test_gguf_vocabulary_from_the_token_list_and_per_layer_heads() -> None:
    metadata = {"general.architecture": "h", "h.block_count": 3, "h.attention.head_count_kv": (0, 8, 0), "h.ssm.state_size": 16,
                "tokenizer.ggml.tokens": ("a", "b")}  # fmt: skip
    facts = from_gguf(metadata)
    assert (facts.vocab_size, facts.vocab_size_key) == (2, "tokenizer.ggml.tokens")
    assert facts.layer_kinds == ("recurrent", "attention", "recurrent")


def test_adapter_config_alone() -> None:
    facts = declared(Files({"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "org/base"}}))
    assert facts.file == "adapter_config.json"
    assert facts.vocab_size is None


def test_no_config_at_all_and_a_broken_one() -> None:
    with pytest.raises(CannotLook, match=r"config\.json beside its weights"):
        declared(Files({}))
    with pytest.raises(CannotLook, match="not valid JSON"):
        declared(Files({"config.json": CannotLook("config.json is not valid JSON")}))


def test_further_table_sizes_are_listed_with_their_key() -> None:
    values = {"vocab_size": 50277, "d_model": 8, "embedding_size": 50304, "ssm_cfg": {"pad_vocab_size_multiple": 8}}
    found = from_config({**values, "vision_config": {"vocab_size": 16384}}, file="config.json")
    assert found.table_sizes == {
        50304: "embedding_size",
        50280: "vocab_size 50277 rounded up to ssm_cfg.pad_vocab_size_multiple 8",
    }
    assert from_config({"pad_vocab_size_multiple": 8}, file="config.json").table_sizes == {}


@pytest.mark.parametrize("value", ["8", 0, -8, 1 << 40, True, 8.0, [8], {}, None])
def test_unusable_table_sizes_are_passed_over(value: object) -> None:
    for key in ("embedding_size", "pad_vocab_size_multiple", "make_vocab_size_divisible_by", "additional_vocab_size"):
        assert from_config({"vocab_size": 64, key: value, "model_parallel_size": value}, file="config.json").table_sizes == {}
