"""What the census keeps of one checkpoint: plain values, a few hundred bytes, never an array.

Text from strangers (names, token strings, reasons) is stored with every character that cannot be seen written as an escape.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ghoststep.evidence.wiring import Mixing, Tie

STATE_VERSION = 1
"""Raised when a record's fields change meaning: an older state file is then refused, not misread."""


class Status(enum.Enum):
    """How far one checkpoint could be looked at."""

    OK = "ok"
    """Everything in its line was measured."""
    PARTIAL = "partial"
    """The table was measured; something else was not, and the reason says what."""
    FAILED = "failed"
    """The table could not be measured, and the reason says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Table rows of one kind (near zero, or exactly zero) by what feeds their tokens; the parts add up to `raw`.

    `raw` counts all rows of the table. `reachable`: ordinary text, the chat template or a role of the tokenizer (BOS, EOS,
    CLS, SEP) feeds the token. `undetermined`: part of a multi-byte character, open until real text is seen. `reserved`: a
    special token that only its literal string produces. `unreachable`: nothing produces it (padding included). `no_token`:
    alignment rows without a token. `unknown`: could not be asked, for want of a readable tokenizer.
    """

    raw: int = 0
    reachable: int = 0
    undetermined: int = 0
    reserved: int = 0
    unreachable: int = 0
    no_token: int = 0
    unknown: int = 0

    @property
    def is_open(self) -> bool:
        """No row is known to be reachable, but some might be."""
        return self.reachable == 0 and self.undetermined + self.unknown > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One reachable near-zero or zero row; `norm` is the effective L2 norm, `fed_by` says how the token gets in."""

    table_row: int
    token: str
    norm: float
    fed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the census.

    `subject` is what the user wrote, `name` that with the resolved revision, `revision` the full commit (None for files).
    `retry` is True when time or the network ended it, so that another run may see more. None stands for "not measured".
    `multiplier` is the factor after the lookup: the 1e-6 line is applied to multiplier × norm. `template_hits`: near-zero and
    zero rows that the chat template emits. `fingerprint` identifies the table's content: shape, storage and every norm.
    `bytes_read`: bodies received over the network, or bytes asked of local files (asked twice counts twice).
    """

    subject: str
    name: str
    status: Status
    reason: str | None = None
    retry: bool = False
    revision: str | None = None
    num_rows: int | None = None
    num_dims: int | None = None
    storage: str | None = None
    tie: Tie | None = None
    wiring: Mixing | None = None
    multiplier: float | None = None
    median_norm: float | None = None
    near_zero: RowCounts | None = None
    zero: RowCounts | None = None
    nonfinite_rows: int | None = None
    template_hits: int | None = None
    identical_groups: int | None = None
    identical_rows: int | None = None
    examples: tuple[Example, ...] = ()
    fingerprint: str | None = None
    seconds: float = 0.0
    bytes_read: int = 0

    @property
    def was_read(self) -> bool:
        """The table was measured."""
        return self.status is not Status.FAILED

    @property
    def num_reachable(self) -> int:
        """Reachable rows that are near zero or zero."""
        return sum(counts.reachable for counts in (self.near_zero, self.zero) if counts is not None)
