"""Builders of the tiny models: every call builds one from the global random state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.mutations.plain import PlainLM, SentenceEncoder, last_of, mean_of

VOCAB = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _hf(model_name: str, config_name: str, **options: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = getattr(transformers, config_name)(**{**_COMMON, **options})
    model: nn.Module = getattr(transformers, model_name)(config)
    return model


def _gated(model_name: str, config_name: str, **options: Any) -> nn.Module:
    return _hf(
        model_name, config_name, **{"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False, **options}
    )


def llama() -> nn.Module:
    """Rotary positions, grouped keys, separate head."""
    return _gated("LlamaForCausalLM", "LlamaConfig")


def qwen2_tied() -> nn.Module:
    """Rotary positions, tied head."""
    return _gated("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True)


def qwen3() -> nn.Module:
    """Rotary positions, normalised queries and keys."""
    return _gated("Qwen3ForCausalLM", "Qwen3Config", head_dim=8)


def gpt2() -> nn.Module:
    """Learned absolute positions, tied head, dropout 0.1."""
    return _hf("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64)


def neox() -> nn.Module:
    """Parallel residual, partial rotary."""
    return _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", intermediate_size=48, tie_word_embeddings=False)


def gemma2() -> nn.Module:
    """Soft-capped scores and logits, alternating sliding windows, tied head."""
    return _gated("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, query_pre_attn_scalar=8, tie_word_embeddings=True)


def bloom() -> nn.Module:
    """ALiBi positions, tied head."""
    return _hf("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4)


def opt() -> nn.Module:
    """Learned positions counted from the mask, tied head, dropout 0.1."""
    return _hf("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32, init_std=0.2)


def mixtral() -> nn.Module:
    """Mixture of four experts."""
    return _gated("MixtralForCausalLM", "MixtralConfig", num_local_experts=4)


def olmoe() -> nn.Module:
    """Mixture of four experts with normalised queries and keys."""
    return _gated("OlmoeForCausalLM", "OlmoeConfig", num_experts=4, num_experts_per_tok=2)


def mamba() -> nn.Module:
    """Selective state space, tied head."""
    return _hf("MambaForCausalLM", "MambaConfig", state_size=8)


def mamba2() -> nn.Module:
    """State space with heads."""
    options = {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8, "tie_word_embeddings": False}
    return _hf("Mamba2ForCausalLM", "Mamba2Config", **options)


def jamba() -> nn.Module:
    """One state-space layer and one attention layer with experts."""
    options = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba_options = {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return _gated("JambaForCausalLM", "JambaConfig", **options, **mamba_options)


def falcon_h1() -> nn.Module:
    """Attention and a state space side by side in each layer."""
    options = {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return _gated("FalconH1ForCausalLM", "FalconH1Config", **options, mamba_chunk_size=8)


def bert() -> nn.Module:
    """A masked-LM encoder, tied head, dropout 0.1."""
    return _hf("BertForMaskedLM", "BertConfig", intermediate_size=48)


def bart() -> nn.Module:
    """An encoder-decoder with learned positions, tied head, dropout 0.1."""
    shape = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    sizes = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.2, "decoder_start_token_id": 2}
    return _hf("BartForConditionalGeneration", "BartConfig", **shape, **sizes)


def t5() -> nn.Module:
    """An encoder-decoder with relative position biases, dropout 0.1."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 0.3}
    return _hf("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=2, tie_word_embeddings=False)


def plain_tensor() -> nn.Module:
    """Returns logits."""
    return PlainLM(VOCAB, "tensor")


def plain_tuple() -> nn.Module:
    """Returns (logits, hidden)."""
    return PlainLM(VOCAB, "tuple")


def plain_dict() -> nn.Module:
    """Takes one dict, returns {"logits", "hidden"}."""
    return PlainLM(VOCAB, "dict")


def sentence_mean() -> nn.Module:
    """A bidirectional encoder with mean pooling."""
    return SentenceEncoder(VOCAB, "mean")


def sentence_last() -> nn.Module:
    """A causal encoder with last-token pooling."""
    return SentenceEncoder(VOCAB, "last")


def prefix_lm() -> nn.Module:
    """Returns logits; the first five positions see each other."""
    model = PlainLM(VOCAB, "tensor")
    model.trunk.prefix = 5
    return model


class PooledModel(nn.Module):
    """A Hugging Face trunk without head, with a pooling and a scale on top."""

    def __init__(self, trunk: nn.Module, pooling: str) -> None:
        super().__init__()
        self.encoder = trunk
        self.pool = mean_of if pooling == "mean" else last_of
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] ids and mask to unit vectors [B, D]."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return torch.nn.functional.normalize(self.pool(hidden, attention_mask), dim=-1)

    def get_input_embeddings(self) -> nn.Module:
        """The trunk's."""
        found: nn.Module = self.encoder.get_input_embeddings()  # type: ignore[operator]
        return found

    def get_base_model(self) -> nn.Module:
        """The trunk."""
        return self.encoder


def bert_mean() -> nn.Module:
    """A BERT whose last hidden states are averaged, dropout 0.1."""
    from transformers import BertConfig, BertModel

    config = BertConfig(**_COMMON, intermediate_size=48)
    return PooledModel(BertModel(config, add_pooling_layer=False), "mean")


def llama_last() -> nn.Module:
    """A Llama whose last real hidden state is the text's vector."""
    from transformers import LlamaConfig, LlamaModel

    return PooledModel(LlamaModel(LlamaConfig(**_COMMON, intermediate_size=48, num_key_value_heads=2)), "last")


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y: Tensor = self.base(x) + x @ self.lora_A.T @ self.lora_B.T
        return y


def lora_by_hand() -> nn.Module:
    """A frozen Llama with low-rank additions at queries, values and the MLP's end."""
    model: Any = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    result: nn.Module = model
    return result


def peft_llama() -> nn.Module:
    """The same by the peft library."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model: nn.Module = get_peft_model(llama(), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    return model
