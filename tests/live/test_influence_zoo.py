"""Real architectures built tiny: the right setup silent, and a future planted into each of them found.

A sample; every causal class of the installed transformers is covered by a script of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.finding import Outcome, Severity
from tests.live.influence_models import bad, registry, seeded, verdicts

tr = pytest.importorskip("transformers")
tr.utils.logging.set_verbosity_error()

V = 96
LLAMA_LIKE = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT_LIKE = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MAMBA_LIKE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def like(name: str, given: dict[str, Any] = LLAMA_LIKE, *, config: str = "", **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(tr, name)(getattr(tr, config or name.replace("ForCausalLM", "Config"))(**{**given, **more}))
        return made

    return make


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "Llama": like("LlamaForCausalLM"),
    "Mistral, window": like("MistralForCausalLM", sliding_window=4),
    "Qwen2": like("Qwen2ForCausalLM"),
    "Qwen3": like("Qwen3ForCausalLM", head_dim=8),
    "Qwen3-MoE": like("Qwen3MoeForCausalLM", head_dim=8, **EXPERTS),
    "Mixtral": like("MixtralForCausalLM", num_local_experts=4),
    "OLMoE": like("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "Gemma2": like("Gemma2ForCausalLM", head_dim=8, sliding_window=4),
    "Gemma3": like("Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=8, sliding_window=4),
    "Llama4, chunks": like(
        "Llama4ForCausalLM", config="Llama4TextConfig", num_local_experts=2, head_dim=8, attention_chunk_size=4,
        intermediate_size_mlp=40,
    ),
    "gpt-oss, sinks": like("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "Phi": like("PhiForCausalLM"),
    "Cohere2": like("Cohere2ForCausalLM", sliding_window=4),
    "SmolLM3": like("SmolLM3ForCausalLM"),
    "StableLM": like("StableLmForCausalLM"),
    "GPT-NeoX": like("GPTNeoXForCausalLM"),
    "Falcon": like("FalconForCausalLM"),
    "Falcon, alibi": like("FalconForCausalLM", alibi=True),
    "GPT-2": like("GPT2LMHeadModel", GPT_LIKE, config="GPT2Config"),
    "GPT-J": like("GPTJForCausalLM", GPT_LIKE, rotary_dim=8),
    "OpenAI-GPT": like("OpenAIGPTLMHeadModel", GPT_LIKE, config="OpenAIGPTConfig"),
    "CTRL": like("CTRLLMHeadModel", GPT_LIKE, config="CTRLConfig", dff=40),
    "Bloom": like("BloomForCausalLM", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "OPT": like("OPTForCausalLM", ffn_dim=40, word_embed_proj_dim=32),
    "BERT as decoder": like("BertLMHeadModel", config="BertConfig", is_decoder=True),
    "Mamba": like("MambaForCausalLM", MAMBA_LIKE),
    "Mamba2": like("Mamba2ForCausalLM", MAMBA_LIKE, head_dim=8, num_heads=8, n_groups=1, chunk_size=8),
    "RWKV": like("RwkvForCausalLM", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "RecurrentGemma": like("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=4, num_hidden_layers=3),
    "Jamba": like(
        "JambaForCausalLM", mamba_d_state=8, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (4, 20), generator=g)
    keep = torch.arange(20) < torch.tensor([20, 15, 18, 11])[:, None]
    ids = ids.masked_fill(~keep, 0)
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.masked_fill(~keep, -100)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_right_padding_mask_and_labels_are_silent(name: str, train: bool) -> None:
    found = verdicts(seeded(DECODERS[name], train=train), batch())
    assert bad(found) == set(), {c: found[c].findings[0].message for c in bad(found) if found[c].findings}
    for code in ("GS101", "GS102", "GS103", "GS105"):
        assert found[code].outcome is Outcome.CLEAR, (code, found[code].reason)
    notes = {c for c, v in found.items() if v.outcome is Outcome.FOUND}
    allowed = {"GS106"}  # "would break if padded on the left", for learned positions
    allowed |= {"GS112"} if name == "Falcon, alibi" else set()  # its eager attention adds the position bias twice
    assert notes <= allowed
    assert not any(v.outcome is Outcome.UNKNOWN for v in found.values()), found


def last_layer(model: nn.Module) -> nn.Module:
    return next(m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and "expert" not in n)[-1]


@pytest.mark.parametrize("name", DECODERS)
def test_a_planted_future_is_found(name: str) -> None:
    model = seeded(DECODERS[name])

    def mix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def leak(hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.01 * hidden.roll(-1, -2)

        if args:
            return (leak(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": leak(kwargs["hidden_states"])}

    last_layer(model).register_forward_pre_hook(mix, with_kwargs=True)
    found = verdicts(model, batch())
    assert found["GS101"].outcome is Outcome.FOUND
    assert found["GS101"].severity is Severity.ERROR


def sdpa_sees_everything(*args: Any, **more: Any) -> Any:
    more = {k: v for k, v in more.items() if k not in ("attn_mask", "is_causal")}
    return torch._C._nn.scaled_dot_product_attention(*args[:3], **more)


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "Gemma3", "Llama4, chunks", "GPT-NeoX", "OPT", "GPT-2", "Jamba"])
def test_a_mask_that_shows_everything_is_one_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ghoststep.diagnosis import diagnose

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa_sees_everything)
    found = verdicts(seeded(DECODERS[name]), batch())
    told = diagnose(list(found.values()), registry().checks)
    assert [v.code for v in told if v.outcome is Outcome.FOUND and v.severity is not Severity.NOTE] == ["GS101"]
    assert "GS102" in {s.code for v in told for f in v.findings for s in f.symptoms}


class TestOthers:
    def test_masked_language_model(self) -> None:
        given = batch()
        chosen = (torch.rand(4, 20, generator=torch.Generator().manual_seed(5)) < 0.4) & (given["attention_mask"] == 1)
        given["labels"] = given["input_ids"].masked_fill(~chosen, -100)
        given["input_ids"] = given["input_ids"].masked_fill(chosen, 4)
        found = verdicts(seeded(like("BertForMaskedLM", config="BertConfig")), given)
        assert bad(found) == set()
        assert found["GS101"].outcome is Outcome.NOT_APPLICABLE

    def test_an_encoder_used_as_a_decoder(self) -> None:
        found = verdicts(seeded(like("BertLMHeadModel", config="BertConfig")), batch())
        assert found["GS101"].outcome is Outcome.FOUND

    @pytest.mark.parametrize("length", [11, 20])
    @pytest.mark.parametrize("name", ["T5", "BART", "Marian"])
    def test_encoder_decoders(self, name: str, length: int) -> None:
        bart = {
            "vocab_size": V, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
            "pad_token_id": 0, "decoder_start_token_id": 2,
        }  # fmt: skip
        t5 = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
        apart = {"decoder_vocab_size": V, "share_encoder_decoder_embeddings": False}
        make = {
            "T5": like("T5ForConditionalGeneration", t5, config="T5Config", decoder_start_token_id=0),
            "BART": like("BartForConditionalGeneration", bart, config="BartConfig"),
            "Marian": like("MarianMTModel", bart, config="MarianConfig", **apart),
        }[name]
        given = batch()
        given["labels"] = torch.randint(3, V, (4, length), generator=torch.Generator().manual_seed(6))
        given["labels"][1, 8:] = -100
        found = verdicts(seeded(make), given)
        assert bad(found) == set(), {c: found[c].findings[0].message for c in bad(found) if found[c].findings}
        assert found["GS101"].outcome is Outcome.CLEAR
        assert found["GS102"].outcome is Outcome.CLEAR
        del given["attention_mask"]
        found = verdicts(seeded(make), given)
        assert bad(found) == {"GS102"}
        assert "of the encoder" in found["GS102"].findings[0].message

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["Llama", "Mixtral", "OLMoE", "Mamba2", "GPT-2"])
    def test_low_precision(self, name: str, dtype: torch.dtype) -> None:
        found = verdicts(seeded(lambda: DECODERS[name]().to(dtype)), batch())
        assert bad(found) == set(), {c: found[c].findings[0].message for c in bad(found) if found[c].findings}
        assert found["GS101"].outcome is Outcome.CLEAR

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing(self, reentrant: bool) -> None:
        model: Any = seeded(DECODERS["Llama"])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = verdicts(model.train(), batch())
        assert bad(found) == set()
        assert found["GS101"].power is not None
        assert found["GS101"].power.smallest_detectable == 1e-6  # the gradient was read
