"""A real recurrent model with a tokenizer and decayed rows, saved by transformers, for the tests of `ghoststep fix`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import SPECIALS, TEMPLATE, WORDS, write_tokenizer

ROWS = len(SPECIALS) + len(WORDS)
BROKEN = {10: 1e-30, 11: 1e-12, 12: 0.0, 40: 1e-30}


def build_mamba2(
    folder: Path, broken: Mapping[int, float] = BROKEN, *, tied: bool = False, dtype: torch.dtype = torch.float32,
    layers: int = 8, shard_size: str = "5GB",
) -> Path:  # fmt: skip
    """Mamba-2, 8 layers of width 32: the smallest that overflows with a margin. `broken` sets rows to these L2 norms."""
    import transformers

    torch.manual_seed(0)
    config: Any = transformers.Mamba2Config(
        vocab_size=ROWS, hidden_size=32, num_hidden_layers=layers, state_size=16, num_heads=4, head_dim=16, n_groups=1,
        chunk_size=16, tie_word_embeddings=tied, use_cache=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model: Any = transformers.Mamba2ForCausalLM(config)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        for row, norm in broken.items():
            direction = torch.randn(32, dtype=torch.float64)
            table[row] = (direction / direction.norm() * norm).to(table.dtype)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, SPECIALS, TEMPLATE)
    return folder


def lost_steps(folder: Path, tokens: list[int], steps: int = 100) -> int:
    """Steps of a plain training loop, torch's clip, whose gradients all became 0 or whose clip coefficient fell below 1e-3."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    lost = 0
    for step in range(steps):
        ids = torch.randint(13, 40, (2, 12), generator=generator)
        ids[0, 6] = tokens[step % len(tokens)]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        lost += not norm < 1e3
        optimizer.step()
    return lost
