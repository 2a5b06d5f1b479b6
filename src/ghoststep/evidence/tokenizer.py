"""Facts about a tokenizer. V runs over token ids 0 … num_ids - 1 (holes included)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NEVER_BUILT = "the merges never build it"
"""Cause of an unreachable BPE token: it is in the vocabulary, but no sequence of merges ends in it."""
ADDED_NOT_MATCHED = "an added token that its own string does not match"
"""Cause of an unreachable added token: the text it was added for encodes to something else."""


class Reach(enum.IntEnum):
    """Whether text can produce an id (values are array codes; larger is not worse)."""

    NO_TOKEN = 0
    """The id has no token: a hole, or a table row past the vocabulary (alignment padding)."""
    REACHABLE = 1
    """Some text encodes to it: decode → re-encode gave it back, alone or beside an anchor."""
    SPECIAL = 2
    """A special or control token: produced by its literal string, by the template or by the tokenizer itself."""
    TEMPLATE = 3
    """The chat template emits it (whatever else it is)."""
    PARTIAL_UTF8 = 4
    """Decodes to an incomplete UTF-8 sequence: undetermined alone, real text may produce it."""
    UNREACHABLE = 5
    """No anchor gave it back; `causes` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary(Evidence):
    """Sizes and special ids. `num_tokens` entries lie in ids 0 … `max_id`; `holes` are ids in that range without a token.

    `special_ids` maps role ("bos", "eos", "pad", "unk", "sep", "cls", "mask") to id as the tokenizer's own files say;
    `added` maps id to string for added tokens, `added_special` the ids among them flagged special.
    `bos_is_added` is True if encoding plain text puts a BOS (or CLS) in front, None if it could not be tried.
    """

    file: str
    kind: str
    num_tokens: int
    max_id: int
    holes: tuple[int, ...] = ()
    special_ids: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[int, str] = field(default_factory=dict)
    added_special: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    bos_is_added: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTokens(Evidence):
    """Ids that the chat template really emits around messages: rendered, then encoded without adding special tokens.

    `first_ids` can stand at position 0 of a conversation. `texts` maps id to its string. `split_markers` are template
    literals shaped like markers (`<|im_start|>`) that encode to several ids: no single row stands for them.
    """

    ids: tuple[int, ...]
    first_ids: tuple[int, ...]
    texts: Mapping[int, str] = field(default_factory=dict)
    split_markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectReach(Evidence):
    """Reachability of the table rows that look wrong (zero, tiny, identical, close to the common vector), by row.

    `reach` has a key for every table row that was asked about; a row without one was not looked at (it is not NO_TOKEN).

    `starts_document` holds those ids that can stand first in an encoded text when the tokenizer puts nothing in front.
    """

    reach: Mapping[int, Reach]
    tokens: Mapping[int, str]
    causes: Mapping[int, str] = field(default_factory=dict)
    starts_document: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyReach(Evidence):
    """Reachability of every id. reach_V: uint8 `Reach` codes. `cause_counts` splits the unreachable ids by cause.

    `examples` holds up to 20 unreachable ids with their strings and causes, rare causes first. `num_sampled` is None when
    every id was tried.
    """

    reach_V: NDArray[np.uint8]
    cause_counts: Mapping[str, int]
    examples: tuple[tuple[int, str, str], ...] = ()
    num_sampled: int | None = None

    def count(self, reach: Reach) -> int:
        """How many ids have this class."""
        return int((self.reach_V == int(reach)).sum())
