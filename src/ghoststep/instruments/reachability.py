"""Which ids text can produce: decode an id, put neighbours around it, encode, and look whether it comes back in its place.

One id comes back beside one neighbour and not beside another (a leading space is stripped at the start of a text, a space
joins the word after it), so an id counts as unreachable only after every pair of neighbours failed.
"""

from __future__ import annotations

import bisect
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ghoststep.errors import CannotLook
from ghoststep.evidence.tokenizer import Reach
from ghoststep.instruments.tokenizers.base import Backend, Encoded, Tokenizer
from ghoststep.instruments.tokenizers.causes import ANCHORS, OPEN_CAUSES

BATCH = 8192
"""Texts a call: large enough to keep all threads busy, small enough to look at the clock in between."""
BATCH_CHARS = 1_000_000
MAX_CROWDED_CHARS = 256
"""Longest token that is tried beside many neighbours; longer ones (runs of dashes or spaces) keep their first answer."""
PRINTABLE = string.ascii_letters + string.digits + string.punctuation
CONTRACTED = ("s", "t", "m", "d", "re", "ve", "ll")
CLASSES = ("A", "_", "'", "/", "é", "я", "中", "\t", "\r\n")
RARER = (
    *((left, "") for left in CLASSES),
    *(("", right) for right in (*CLASSES, *CONTRACTED)),
    *(("a", right) for right in CONTRACTED),
)
"""Neighbours of further classes for every id that all of `ANCHORS` failed to bring back: pre-tokenizers look at classes of
characters, and join contractions to the word before them."""
PAIRED = (
    *((left, right) for left in PRINTABLE for right in ("", "a", " ", "\n", ".")),
    *((left, right) for left in ("", "a", ".") for right in PRINTABLE),
)
"""Pairs for the ids that are then still without a proof that nothing brings them back: models look at single characters."""
MAX_PAIRED = 4096
LIMIT_SECONDS = 120.0
"""A hostile tokenizer may be slow on purpose; a real one of 200,000 ids takes under ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaches:
    """Class of each id asked for, and the cause of each unreachable one."""

    reach: Mapping[int, Reach]
    causes: Mapping[int, str]


def classify(tokenizer: Tokenizer, ids: Sequence[int], *, limit_seconds: float = LIMIT_SECONDS) -> Reaches:
    """Classify ids by trial, without the chat template.

    Ids without a token are NO_TOKEN, special ones SPECIAL without a trial (their literal string is turned into them, which
    says nothing about ordinary text), partial UTF-8 is undetermined. Empty input gives empty output. `CannotLook` when text
    cannot be encoded or the time is over. Cost: one encoding an id, about 80 for the few that keep failing,
    and 1,000 more for those among them whose cause is no proof.
    """
    backend = tokenizer.need_backend()
    deadline = time.monotonic() + limit_seconds
    reach: dict[int, Reach] = {}
    ordinary: list[int] = []
    for i in dict.fromkeys(ids):
        if i not in tokenizer.pieces:
            reach[i] = Reach.NO_TOKEN
        elif i in tokenizer.special:
            reach[i] = Reach.SPECIAL
        else:
            ordinary.append(i)
    texts = dict(zip(ordinary, backend.texts(ordinary), strict=True))
    whole = {i: text for i, text in texts.items() if text is not None}
    failing = {i: whole[i] for i in not_reached(backend, whole, deadline)}
    causes = _causes(backend, crowded(backend, failing, RARER, deadline), whole, deadline)
    still_open = [i for i, cause in causes.items() if cause in OPEN_CAUSES][:MAX_PAIRED]
    refuted = set(still_open) - set(crowded(backend, {i: whole[i] for i in still_open}, PAIRED, deadline))
    causes = {i: cause for i, cause in causes.items() if i not in refuted}
    for i in ordinary:
        reach[i] = Reach.PARTIAL_UTF8 if texts[i] is None else Reach.UNREACHABLE if i in causes else Reach.REACHABLE
    return Reaches(reach=reach, causes=causes)


def _causes(backend: Backend, ids: Sequence[int], texts: Mapping[int, str], deadline: float) -> dict[int, str]:
    causes = {}
    for n, i in enumerate(ids):
        if n % 256 == 0:
            _check_time(deadline)
        causes[i] = backend.cause(i, texts[i])
    return causes


def not_reached(backend: Backend, texts: Mapping[int, str], deadline: float) -> list[int]:
    """The ids that no pair of neighbours brings back, in the order given."""
    left_over = [i for i, text in texts.items()]
    for left, right in neighbours():
        if not left_over:
            break
        still: list[int] = []
        for part in _batches(left_over, texts):
            _check_time(deadline)
            encoded = backend.encode([left + texts[i] + right for i in part])
            still += [
                i for i, e in zip(part, encoded, strict=True) if not comes_back(i, e, len(left), len(left) + len(texts[i]))
            ]
        left_over = still
    return left_over


def crowded(backend: Backend, texts: Mapping[int, str], contexts: Sequence[tuple[str, str]], deadline: float) -> list[int]:
    """The ids that also many rarer neighbours do not bring back, all in one text an id.

    Greedy and merging models join a token with some letters and not with others ("a" + "##box" is split after "ab"), and
    contractions join the word before them, so the few ids left are tried beside many characters (`contexts`).
    """
    tried = [i for i, text in texts.items() if 0 < len(text) <= MAX_CROWDED_CHARS]
    left_over = [i for i, text in texts.items() if not 0 < len(text) <= MAX_CROWDED_CHARS]
    for part in _batches(tried, texts, len(contexts)):
        _check_time(deadline)
        crowds = [_crowd(texts[i], contexts) for i in part]
        for i, (_, spans), encoded in zip(part, crowds, backend.encode([t for t, _ in crowds]), strict=True):
            if i not in encoded.ids or not any(_within(span, spans) for j, span in _pairs(encoded) if j == i):
                left_over.append(i)
    return sorted(left_over)


def _batches(ids: Sequence[int], texts: Mapping[int, str], times: int = 1) -> Iterator[list[int]]:
    """Ids in order, so many that their texts, `times` over, stay below both limits (one text may be above)."""
    part: list[int] = []
    chars = 0
    for i in ids:
        part.append(i)
        chars += (len(texts[i]) + 2) * times
        if len(part) == BATCH or chars >= BATCH_CHARS:
            yield part
            part, chars = [], 0
    if part:
        yield part


def _crowd(text: str, contexts: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    parts: list[str] = []
    spans = []
    at = 0
    for left, right in contexts:
        spans.append((at + len(left), at + len(left) + len(text)))
        parts += (left, text, right, "\n")
        at += len(left) + len(text) + len(right) + 1
    return "".join(parts), spans


def _within(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    at = bisect.bisect_right(spans, (span[0], sys.maxsize)) - 1
    return at >= 0 and spans[at][0] <= span[0] and span[1] <= spans[at][1]


def _pairs(encoded: Encoded) -> Iterator[tuple[int, tuple[int, int]]]:
    return zip(encoded.ids, encoded.offsets, strict=True)


def neighbours() -> Iterator[tuple[str, str]]:
    """Alone, one on the left, one on the right, then every pair."""
    yield "", ""
    yield from ((left, "") for left in ANCHORS[1:])
    yield from (("", right) for right in ANCHORS[1:])
    yield from ((left, right) for left in ANCHORS[1:] for right in ANCHORS[1:])


def comes_back(token_id: int, encoded: Encoded, start: int, stop: int) -> bool:
    """True if the id stands inside characters [start, stop): a neighbour that happens to be the same id does not count."""
    if token_id not in encoded.ids:
        return False
    return any(i == token_id and start <= a and b <= stop for i, (a, b) in _pairs(encoded))


def can_stand_first(tokenizer: Tokenizer, ids: Sequence[int]) -> frozenset[int]:
    """Those ids that are the first of their own text encoded alone; special and partial ones are left out."""
    backend = tokenizer.need_backend()
    ordinary = [i for i in ids if i in tokenizer.pieces and i not in tokenizer.special]
    texts = {i: text for i, text in zip(ordinary, backend.texts(ordinary), strict=True) if text}
    found = set()
    for part in _batches(list(texts), texts):
        for i, encoded in zip(part, backend.encode([texts[i] for i in part]), strict=True):
            if encoded.ids and encoded.ids[0] == i:
                found.add(i)
    return frozenset(found)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise CannotLook("the tokenizer needed more time than a real one does; its tokens were not all tried")
