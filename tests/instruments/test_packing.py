"""The logical shape of packed tables is computed where the packing shows it, and said to be unknown where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ghoststep.checks.vocab.shrunk_table import shrunk_table
from ghoststep.checks.vocab.token_id_out_of_range import token_id_out_of_range
from ghoststep.checks.vocab.unaligned_vocab import unaligned_vocab
from ghoststep.checks.vocab.vocab_size_disagreement import vocab_size_disagreement
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, Tables, TensorInfo
from ghoststep.evidence.wiring import Tie
from ghoststep.instruments.declared import from_config
from ghoststep.instruments.inventory import tables
from ghoststep.registry import Answer, Clear, Found, Unknown
from tests.checks import builders as b

D = 32
EMBED, HEAD = "model.embed_tokens", "lm_head"
NOTHING = Missing(reason="not there")
Tensors = dict[str, tuple[tuple[int, ...], str]]
NORMS: Tensors = {f"model.layers.{i}.input_layernorm.weight": ((D,), "bf16") for i in range(2)}


def stored(tensors: Tensors) -> StoredTensors:
    infos = {
        name: TensorInfo(name=name, shape=shape, dtype=dtype, file="m", num_bytes=1)
        for name, (shape, dtype) in {**NORMS, **tensors}.items()
    }
    return StoredTensors(format="safetensors", tensors=infos)


def config(vocab: int, **more: object) -> Declared:
    return from_config({"vocab_size": vocab, "hidden_size": D, **more}, file="config.json")


def found(tensors: Tensors, vocab: int = 80, **more: object) -> Tables:
    result: Tables = tables(stored(tensors), config(vocab, **more))
    return result


def bnb(rows: int, name: str = EMBED, dtype: str = "u8", values_per_item: int = 2) -> Tensors:
    weight = f"{name}.weight"
    return {weight: ((rows * D // values_per_item, 1), dtype), f"{weight}.absmax": ((rows * D // 64,), "u8"),
            f"{weight}.quant_map": ((16,), "f32"), f"{weight}.quant_state.bitsandbytes__nf4": ((90,), "u8")}  # fmt: skip


PACKED: dict[str, Callable[[int], Tensors]] = {
    "nf4": bnb,
    "nf4 stored as bf16": lambda rows: bnb(rows, dtype="bf16", values_per_item=4),
    "int8": lambda rows: {f"{EMBED}.weight": ((rows, D), "i8"), f"{EMBED}.SCB": ((rows,), "f32")},
    "fp8": lambda rows: {f"{EMBED}.weight": ((rows, D), "f8_e4m3"), f"{EMBED}.weight_scale_inv": ((rows, 1), "f32")},
    "mxfp4": lambda rows: {f"{EMBED}.weight": ((rows, D // 2), "u8"), f"{EMBED}.weight_scale": ((rows, 1), "u8")},
    "compressed-tensors": lambda rows: {
        f"{EMBED}.weight_packed": ((rows, D // 8), "i32"),
        f"{EMBED}.weight_shape": ((2,), "i64"),
    },
    "mlx 4-bit": lambda rows: {f"{EMBED}.weight": ((rows, D // 8), "u32"), f"{EMBED}.scales": ((rows, 1), "bf16")},
    "mlx 6-bit": lambda rows: {f"{EMBED}.weight": ((rows, D * 6 // 32), "u32"), f"{EMBED}.scales": ((rows, 1), "bf16")},
    "gptq": lambda rows: {f"{EMBED}.qweight": ((D // 8, rows), "i32"), f"{EMBED}.scales": ((1, rows), "f16")},
    "awq": lambda rows: {f"{EMBED}.qweight": ((D, rows // 8), "i32"), f"{EMBED}.scales": ((1, rows), "f16")},
}


@pytest.mark.parametrize("kind", PACKED)
def test_the_rows_come_from_the_storage_not_from_the_config(kind: str) -> None:
    for rows in (64, 80, 128):
        table = found(PACKED[kind](rows)).input
        assert (table.num_rows, table.num_dims, table.rows_measured, table.unmeasured) == (rows, D, True, None)
        assert table.unreadable is not None


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_table_that_is_too_short_is_found(kind: str) -> None:
    vocabulary = b.vocabulary(80)
    short, right = found(PACKED[kind](64)), found(PACKED[kind](80))
    assert isinstance(vocab_size_disagreement(short, config(80), NOTHING), Found)
    assert isinstance(vocab_size_disagreement(right, config(80), NOTHING), Clear)
    assert isinstance(token_id_out_of_range(short, vocabulary, NOTHING, NOTHING), Found)
    assert isinstance(token_id_out_of_range(right, vocabulary, NOTHING, NOTHING), Clear)


def test_packed_head_of_an_ordinary_table() -> None:
    plain: Tensors = {f"{EMBED}.weight": ((80, D), "bf16")}
    head = {name.replace(EMBED, HEAD): value for name, value in PACKED["gptq"](64).items()}
    short = found({**plain, **head})
    assert short.output is not None
    assert (short.output.num_rows, short.output.rows_measured) == (64, True)
    assert isinstance(vocab_size_disagreement(short, config(80), NOTHING), Found)


UNCLEAR: dict[str, Tensors] = {
    "an unknown packing": {f"{EMBED}.weight": ((77, 7), "u8"), f"{EMBED}.scales": ((77, 1), "f32")},
    "values that no dims divide": {f"{EMBED}.weight": ((1001, 1), "u8"), f"{EMBED}.weight.absmax": ((16,), "f32")},
    "awq without its scales": {f"{EMBED}.qweight": ((D, 10), "i32"), f"{EMBED}.qzeros": ((1, 10), "i32")},
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_what_the_storage_does_not_show_is_unknown_not_clear(kind: str) -> None:
    result = found(UNCLEAR[kind])
    assert (result.input.num_rows, result.input.rows_measured) == (80, False)
    vocabulary = b.vocabulary(80, max_id=90, holes=(1,))
    said: list[Answer] = [
        vocab_size_disagreement(result, config(80), NOTHING),
        token_id_out_of_range(result, vocabulary, NOTHING, NOTHING),
        shrunk_table(result, vocabulary),
        unaligned_vocab(result, b.stored(), b.tie(Tie.TIED), NOTHING),
    ]
    for answer in said:
        assert isinstance(answer, Unknown)
        assert "does not follow from its stored shape" in answer.reason


def test_the_alignment_of_a_measured_head_is_still_judged() -> None:
    result = found(UNCLEAR["an unknown packing"])
    head: Table = b.table(128, role="output", name="lm_head.weight")
    both = Tables(input=result.input, output=head)
    assert isinstance(unaligned_vocab(both, b.stored(), b.tie(Tie.UNTIED), NOTHING), Clear)
    assert isinstance(vocab_size_disagreement(both, config(80), NOTHING), Unknown)


def test_narrow_embeddings_are_not_taken_for_a_short_table() -> None:
    """Dims that the config gives under another key, half the hidden size: as many values as half the rows would have."""
    weight = f"{EMBED}.weight"
    tensors: Tensors = {weight: ((80 * 16 // 2, 1), "u8"), f"{weight}.absmax": ((20,), "f32")}
    table = found(tensors, word_embed_proj_dim=16).input
    assert (table.num_rows, table.num_dims, table.rows_measured) == (80, 16, True)
    ambiguous = found({**tensors, weight: ((70 * 16 // 2, 1), "u8")}, word_embed_proj_dim=16).input
    assert not ambiguous.rows_measured


def test_without_a_config_the_norms_give_the_dims() -> None:
    table = tables(stored(bnb(64)), NOTHING).input
    assert (table.num_rows, table.num_dims, table.rows_measured) == (64, D, True)
