"""Models that several test folders build."""

from __future__ import annotations

from typing import Any


def mamba2(num_layers: int, *, vocab_size: int = 160, state_size: int = 16, chunk_size: int = 16) -> Any:
    """An untied Mamba-2 of width 32 with zero conv biases: from 6 layers on a near-zero row in the middle overflows the norm."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=num_layers, state_size=state_size, num_heads=4, head_dim=16,
        n_groups=1, chunk_size=chunk_size, tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return Mamba2ForCausalLM(config)


def with_dead_row(model: Any, token: int) -> Any:
    """The model with every entry of one input row at 1e-30."""
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[token] = 1e-30
    return model
