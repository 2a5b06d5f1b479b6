"""Tiny checkpoints built by hand, with the truth about each kept beside it.

One byte-level tokenizer serves all: 256 byte tokens (0 to 255, in byte order), one token without a merge that nothing
produces, and four special tokens. The tables have alignment rows behind it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS, NUM_DIMS = 320, 8
LETTER_A, LETTER_B, PARTIAL = ord("J"), ord("X"), 0xE0
UNREACHABLE, BOS, MARKER, RESERVED = 256, 257, 258, 259
ALIGNMENT = 310
FED = {LETTER_A: "text", LETTER_B: "text", BOS: "role", MARKER: "template"}
"""The letters stand in no role name, so that the template does not emit them."""
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}"

ATTENTION, MAMBA, PARALLEL = "attention", "recurrent-gated", "recurrent-gated with attention beside it"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One checkpoint. `near` and `zero` are ids of input rows; `seed` decides the table's content."""

    name: str
    wiring: str = ATTENTION
    tied: bool = False
    near: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    identical: tuple[int, ...] = ()
    seed: int = 0
    with_template: bool = False
    with_tokenizer: bool = True
    norm: float = 1e-12
    config: Mapping[str, object] = field(default_factory=dict)


@functools.cache
def tokenizer_files(with_template: bool) -> Mapping[str, bytes]:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = _byte_names()
    vocab = {name: i for i, name in enumerate(names)}
    vocab["zzq"] = UNREACHABLE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|extra_0|>"]
    assert tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials]) == 3
    assert tokenizer.token_to_id("<|extra_0|>") == RESERVED
    config: dict[str, object] = {"bos_token": "<s>"}
    if with_template:
        config["chat_template"] = TEMPLATE
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def _byte_names() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's byte-level alphabet, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(shifted)) for b in range(256)]


def input_table(plan: Plan) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [320, 8]: ordinary rows of norm about 3, the near ones of norm `plan.norm`, the zero ones 0."""
    table = np.random.default_rng(plan.seed).normal(size=(NUM_ROWS, NUM_DIMS)).astype(np.float32)
    for row in plan.near:
        table[row] = plan.norm / np.sqrt(NUM_DIMS)
    table[list(plan.zero)] = 0
    if plan.identical:
        table[list(plan.identical)] = table[plan.identical[0]]
    return table


def files(plan: Plan) -> dict[str, bytes]:
    """The files of the checkpoint."""
    from safetensors.numpy import save

    table = input_table(plan)
    head = np.random.default_rng(plan.seed + 10_000).normal(size=(NUM_ROWS, NUM_DIMS)).astype(np.float32)
    square = np.ones((NUM_DIMS, NUM_DIMS), dtype=np.float32)
    names = ("backbone.embeddings.weight", "mixer") if plan.wiring == MAMBA else ("model.embed_tokens.weight", "mamba")
    stack = names[0].split(".")[0]
    tensors = {names[0]: table}
    for layer in range(2):
        at = f"{stack}.layers.{layer}"
        if plan.wiring in (ATTENTION, PARALLEL):
            tensors |= {f"{at}.self_attn.{p}_proj.weight": square for p in "qkvo"}
        if plan.wiring in (MAMBA, PARALLEL):
            tensors |= {f"{at}.{names[1]}.A_log": square, f"{at}.{names[1]}.conv1d.weight": square[:, None, :4]}
            tensors |= {f"{at}.{names[1]}.in_proj.weight": square, f"{at}.{names[1]}.D": square[0]}
    if not plan.tied:
        tensors["lm_head.weight"] = head
    config = {
        "vocab_size": NUM_ROWS,
        "hidden_size": NUM_DIMS,
        "num_hidden_layers": 2,
        "tie_word_embeddings": plan.tied,
        "architectures": ["BuiltForCausalLM"],
        **plan.config,
    }
    contents = {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}
    return contents | (dict(tokenizer_files(plan.with_template)) if plan.with_tokenizer else {})


def write(plan: Plan, root: Path) -> Path:
    """The checkpoint as a folder of this name."""
    folder = root / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files(plan).items():
        (folder / name).write_bytes(content)
    return folder


def plans() -> list[Plan]:
    """48 readable checkpoints: every wiring, tied and untied, every way a row can be fed or not; two duplicates."""
    many = [
        Plan(name=f"healthy-{wiring[:5]}{len(wiring)}-{tied}-{i}", wiring=wiring, tied=tied, seed=100 * i + len(wiring) + tied)
        for wiring in (ATTENTION, MAMBA, PARALLEL)
        for tied in (True, False)
        for i in range(5)
    ]
    kinds: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("text", (LETTER_A, LETTER_B), ()),
        ("bos", (BOS,), ()),
        ("partial", (PARTIAL, PARTIAL + 1), ()),
        ("reserved", (RESERVED,), ()),
        ("unreachable", (UNREACHABLE,), ()),
        ("alignment", (ALIGNMENT, ALIGNMENT + 1), (ALIGNMENT + 2,)),
        ("zero-text", (), (LETTER_A,)),
        ("mixed", (LETTER_A, PARTIAL, UNREACHABLE), (LETTER_B, ALIGNMENT)),
    ]
    many += [
        Plan(name=f"mamba-{n}", wiring=MAMBA, near=near, zero=zero, seed=1000 + i) for i, (n, near, zero) in enumerate(kinds)
    ]
    many += [
        Plan(name="mamba-template", wiring=MAMBA, near=(MARKER,), with_template=True, seed=2000),
        Plan(name="attention-template", near=(MARKER,), zero=(LETTER_A,), with_template=True, seed=2001),
        Plan(name="attention-text", near=(LETTER_A,), seed=2002),
        Plan(name="tied-text", tied=True, near=(LETTER_A,), seed=2003),
        Plan(name="parallel-text", wiring=PARALLEL, near=(LETTER_A, PARTIAL), seed=2004),
        Plan(name="just-above", wiring=MAMBA, near=(LETTER_A,), norm=2e-6, seed=2005),
        Plan(name="tiny-norm", wiring=MAMBA, near=(LETTER_A,), norm=1e-30, seed=2006),
        Plan(name="identical", identical=(70, 71, 72), seed=2007),
        Plan(name="copy-of-mamba-text", wiring=MAMBA, near=(LETTER_A, LETTER_B), seed=1000),
        Plan(name="copy-of-attention-text", near=(LETTER_A,), seed=2002),
    ]
    assert len(many) == 48
    return many
