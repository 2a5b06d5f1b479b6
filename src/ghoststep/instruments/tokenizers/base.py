"""What every tokenizer format is loaded into, whatever library stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Evidence

MAX_FILE_BYTES = 200 * 2**20
"""Largest tokenizer file that is read. The largest real ones are about 35 MB."""
MAX_CONFIG_BYTES = 16 * 2**20
MAX_ID = 2**24
"""Largest id that is believed (16.8 million). Real vocabularies end below 300,000; holes are listed, so the range is bounded."""
MAX_PIECE_CHARS = 16_384
"""Longest token that is believed. The longest real ones, runs of spaces or dashes, have about a thousand characters."""

PANIC = "PanicException"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Ids of one text, each with the characters [start, stop) of that text which it stands for."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class Backend(Protocol):
    """What reachability needs of a library. Nothing is padded, truncated or put in front by any of these."""

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """The text that each id stands for in running text (with its leading space, if any); None for partial UTF-8."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text encoded without special tokens being added."""
        ...

    def cause(self, token_id: int, text: str) -> str:
        """Why no text gives this id back, found by running each stage of the tokenizer alone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer(Evidence):
    """A loaded tokenizer, shared by the instruments of this family; checks use `Vocabulary` and the reach facts instead.

    `pieces` maps every id that has a token to its raw string (byte-level alphabet, "##" and "▁" as stored).
    `special_ids` maps role to id; `added` id to string; `special` are ids flagged special or named by a role.
    `prefix_ids` stand in front of an encoded text by default, `bos_is_added` is None if that could not be tried.
    `backend` is None when the files do not hold enough to encode text; `backend_reason` then says what is missing.
    `roles` maps template variables ("bos_token", ...) to strings.
    """

    file: str
    kind: str
    pieces: Mapping[int, str]
    backend: Backend | None
    backend_reason: str = ""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[int, str] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    bos_is_added: bool | None = None
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_id(self) -> int:
        """The largest id with a token; -1 for an empty vocabulary."""
        return max(self.pieces, default=-1)

    def need_backend(self) -> Backend:
        """The backend, or `CannotLook` with the reason."""
        if self.backend is None:
            raise CannotLook(self.backend_reason)
        return self.backend


def guarded(what: str, run: Callable[[], T]) -> T:
    """Run a call into a tokenizer library; what it raises on a stranger's file becomes `CannotLook`.

    A panic of a Rust library derives from BaseException, so that `except Exception` would let it end the process; it is known
    by its name, because its class cannot be imported. Other exceptions of that base (an interrupt, a timeout) pass.
    """
    try:
        return run()
    except CannotLook:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        text = " ".join(str(error).split())[:300]
        raise CannotLook(f"{what}: the tokenizer library refused it ({type(error).__name__}: {text})") from error


def check_ids(file: str, pieces: Mapping[int, str]) -> None:
    """`CannotLook` for an empty vocabulary, a token or an id that no real one has."""
    if not pieces:
        raise CannotLook(f"{file}: the vocabulary is empty; expected at least one token")
    longest = max(map(len, pieces.values()))
    if longest > MAX_PIECE_CHARS:
        raise CannotLook(
            f"{file}: a token of {longest} characters, expected at most {MAX_PIECE_CHARS}; the file is not believed"
        )
    low, high = min(pieces), max(pieces)
    if low < 0 or high > MAX_ID:
        raise CannotLook(
            f"{file}: token id {low if low < 0 else high}, expected ids from 0 to {MAX_ID}; the file is not believed"
        )
