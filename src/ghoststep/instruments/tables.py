"""Measures the rows of embedding tables from the bytes of the files: no model is built.

Shapes: R table rows, D embedding dimensions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Table, Tables
from ghoststep.evidence.rows import InputRows, OutputRows, RowFacts
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments.common_vector import common_distances
from ghoststep.instruments.row_blocks import RowDecoder
from ghoststep.instruments.row_scan import build_reference, gather, scan_rows, single_threaded_torch
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ghoststep.instruments.row_scan import RowScan
    from ghoststep.subjects.base import RowStore


def measure_rows(store: RowStore, table: Table, *, num_threads: int | None = None) -> RowFacts:
    """Measure every row of a table in one pass over its bytes.

    `store.raw_rows` is called from `num_threads` threads at once (default: up to four CPUs). An empty table gives empty
    arrays and a NaN median. Raises `CannotLook` where `table.unreadable` says so, for a dtype that cannot be decoded
    exactly, and for a table without columns.
    Norms have a relative error below 1e-6 from the smallest subnormal up: float32 sums, and float64 from the bits wherever
    a float32 square may have been lost or have overflowed.
    Cost on two free cores, a warm 1 GB bf16 table: 2.5 to 3 times the time of summing the bytes; memory about 200 bytes a table row
    and 4 MB a thread beside the file's map. Rows that look identical or close to a common vector are read once more.
    """
    import numpy as np

    if table.unreadable is not None:
        raise CannotLook(f"{table.tensor.name}: {table.unreadable}")
    if store.num_dims < 1:
        raise CannotLook(f"{table.tensor.name} in {table.tensor.file} has shape [{store.num_rows}, 0]: a table without columns")
    decoder = RowDecoder(store)
    if store.num_rows < 1:
        return _facts(table, decoder, None, (), np.empty(0))
    with single_threaded_torch():
        reference = build_reference(store, decoder)
        scan = scan_rows(store, decoder, reference, num_threads)
        groups = identical_groups(store, scan, decoder.rows_per_block)
        distance_R = common_distances(store, decoder, reference, scan)
    return _facts(table, decoder, scan, groups, distance_R)


def _facts(
    table: Table,
    decoder: RowDecoder,
    scan: RowScan | None,
    groups: tuple[tuple[int, ...], ...],
    common_distance_R: NDArray[np.float64],
) -> RowFacts:
    import numpy as np

    norms = np.empty(0) if scan is None else scan.norms_R
    finite = norms[np.isfinite(norms)]
    return RowFacts(
        table=table,
        norms_R=norms,
        zero_R=np.empty(0, dtype=np.bool_) if scan is None else scan.zero_R,
        nonfinite_R=np.empty(0, dtype=np.bool_) if scan is None else scan.nonfinite_R,
        identical_groups=groups,
        common_distance_R=common_distance_R,
        median_norm=float(np.median(finite)) if len(finite) else float("nan"),
        storage=decoder.storage,
        smallest_nonzero=decoder.smallest_nonzero,
        storage_note=decoder.storage_note,
    )


def identical_groups(store: RowStore, scan: RowScan, rows_per_block: int) -> tuple[tuple[int, ...], ...]:
    """Groups of at least two table rows with the same bytes, finite and not zero; ascending, the largest group first.

    Rows whose keys from the pass coincide are candidates; the 16-byte BLAKE2 digest of their bytes decides.
    """
    import numpy as np

    ordered = np.sort(scan.keys_R)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return ()
    place = np.minimum(np.searchsorted(repeated, scan.keys_R), len(repeated) - 1)
    candidates = np.flatnonzero((repeated[place] == scan.keys_R) & ~scan.zero_R & ~scan.nonfinite_R)
    by_digest: dict[bytes, list[int]] = {}
    for rows, raw in gather(store, candidates, rows_per_block):
        for row, content in zip(rows.tolist(), raw, strict=True):
            by_digest.setdefault(hashlib.blake2b(content, digest_size=16).digest(), []).append(row)
    groups = [tuple(rows) for rows in by_digest.values() if len(rows) > 1]
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))


@instrument
def input_rows(checkpoint: Checkpoint, tables: Tables, declared: Declared | Missing) -> InputRows:
    """The rows of the input embedding, with the factor that the config applies after the lookup."""
    rows = measure_rows(checkpoint.rows(tables.input.tensor.name), tables.input)
    multiplier = None if isinstance(declared, Missing) else declared.embedding_multiplier
    return InputRows(rows=rows, multiplier=1.0 if multiplier is None else multiplier)


@instrument
def output_rows(
    checkpoint: Checkpoint, tables: Tables, tie_state: TieState | Missing, input_rows: InputRows | Missing
) -> OutputRows:
    """The rows of the output head: its own table, or the input table again where the two are tied.

    `DoesNotApply` where there is no head at all; `CannotLook` where a head is declared but not stored.
    """
    tie = None if isinstance(tie_state, Missing) else tie_state.tie
    if tables.output is not None and tie is not Tie.TIED:
        return OutputRows(rows=measure_rows(checkpoint.rows(tables.output.tensor.name), tables.output), tied=False)
    if isinstance(tie_state, Missing):
        raise CannotLook(f"no output head is stored, and whether it is tied is unknown: {tie_state.reason}")
    if tie is Tie.NO_HEAD:
        raise DoesNotApply(tie_state.reason)
    if tie is not Tie.TIED:
        raise CannotLook(f"the output head cannot be measured: {tie_state.reason}")
    if isinstance(input_rows, Missing):
        raise CannotLook(f"the output head is the input table, and that could not be measured: {input_rows.reason}")
    return OutputRows(rows=input_rows.rows, tied=True)
