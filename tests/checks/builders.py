"""Evidence built by hand: the checks are pure, so their tests need no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, Tables, TensorInfo
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.evidence.rows import InputRows, OutputRows, RowFacts
from ghoststep.evidence.tokenizer import Reach, SuspectReach, TemplateTokens, Vocabulary
from ghoststep.evidence.wiring import Mixing, MixingClass, Tie, TieState

FILE = "model.safetensors"


def table(rows: int = 64, dims: int = 8, *, role: str = "input", name: str = "model.embed_tokens.weight") -> Table:
    info = TensorInfo(name=name, shape=(rows, dims), dtype="f32", file=FILE, num_bytes=rows * dims * 4)
    return Table(tensor=info, role=role, num_rows=rows, num_dims=dims, reason="built")


def tables(rows: int = 64, output_rows: int | None = None, dims: int = 8) -> Tables:
    head = None if output_rows is None else table(output_rows, dims, role="output", name="lm_head.weight")
    return Tables(input=table(rows, dims), output=head)


def row_facts(
    norms: Mapping[int, float] | None = None,
    *,
    rows: int = 64,
    median: float = 1.0,
    groups: Sequence[Sequence[int]] = (),
    close: Mapping[int, float] | None = None,
    nonfinite: Sequence[int] = (),
    role: str = "input",
) -> RowFacts:
    norms_R = np.full(rows, median)
    for i, norm in (norms or {}).items():
        norms_R[i] = norm
    common_R = np.ones(rows)
    for i, distance in (close or {}).items():
        common_R[i] = distance
    nonfinite_R = np.zeros(rows, dtype=bool)
    nonfinite_R[list(nonfinite)] = True
    norms_R[list(nonfinite)] = np.nan
    return RowFacts(
        table=table(rows, role=role),
        norms_R=norms_R,
        zero_R=norms_R == 0,
        nonfinite_R=nonfinite_R,
        identical_groups=tuple(tuple(g) for g in groups),
        common_distance_R=common_R,
        median_norm=median,
        storage="f32",
        smallest_nonzero=1.4e-45,
    )


def inputs(norms: Mapping[int, float] | None = None, *, multiplier: float = 1.0, **more: object) -> InputRows:
    return InputRows(rows=row_facts(norms, **more), multiplier=multiplier)  # type: ignore[arg-type]


def outputs(norms: Mapping[int, float] | None = None, *, tied: bool = False, **more: object) -> OutputRows:
    return OutputRows(rows=row_facts(norms, role="output", **more), tied=tied)  # type: ignore[arg-type]


def mixing(kind: Mixing = Mixing.RECURRENT_GATED, *, lifted: bool = False, causal: bool | None = True) -> MixingClass:
    return MixingClass(mixing=kind, reason="4 of 4 layers hold a recurrence", causal=causal, lifted_by_positions=lifted)


def reach(kinds: Mapping[int, Reach], *, starts: Sequence[int] = ()) -> SuspectReach:
    return SuspectReach(reach=dict(kinds), tokens={i: f"tok{i}" for i in kinds}, starts_document=frozenset(starts))


def template(ids: Sequence[int] = (), first: Sequence[int] = ()) -> TemplateTokens:
    return TemplateTokens(ids=tuple(ids), first_ids=tuple(first), texts={i: f"<|t{i}|>" for i in ids})


def vocabulary(num_tokens: int = 60, **more: object) -> Vocabulary:
    values: dict[str, object] = {
        "file": "tokenizer.json",
        "kind": "BPE",
        "num_tokens": num_tokens,
        "max_id": num_tokens - 1,
        **more,
    }
    return Vocabulary(**values)  # type: ignore[arg-type]


def plan(kind: TrainingKind = TrainingKind.FULL) -> TrainingPlan:
    return TrainingPlan(training=kind, training_declared=True)


def declared(**more: object) -> Declared:
    values: dict[str, object] = {"file": "config.json", "vocab_size": 64, "vocab_size_key": "vocab_size", **more}
    return Declared(**values)  # type: ignore[arg-type]


def tie(kind: Tie = Tie.UNTIED, **more: object) -> TieState:
    return TieState(tie=kind, reason="built", declared=None, **more)  # type: ignore[arg-type]


def stored(parameters: int = 1000) -> StoredTensors:
    info = TensorInfo(name="w", shape=(parameters,), dtype="f32", file=FILE, num_bytes=4 * parameters)
    return StoredTensors(format="safetensors", tensors={"w": info})
