"""The `tokenizers` library as a backend, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ghoststep.evidence.tokenizer import ADDED_NOT_MATCHED
from ghoststep.instruments.tokenizers.base import Encoded, Tokenizer, check_ids, guarded
from ghoststep.instruments.tokenizers.causes import Stages, find_cause, surface_of
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"
ANCHOR_TEXTS = ("a", "x", "1", ".")
"""Tried in turn for a left neighbour, so that a decoder that strips or joins at the start does not touch the token itself."""


class HfBackend:
    """One `tokenizers.Tokenizer`, padding, truncation and post-processing switched off."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, pieces: Mapping[int, str], added: Mapping[int, str]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Without its post-processor the offsets are those of the pieces: a byte-level one trims leading spaces off.
        tokenizer.post_processor = None
        self.tokenizer = tokenizer
        self.pieces = pieces
        self.added = added
        self.stages = Stages.of(tokenizer)

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """See `Backend.texts`. A byte-level piece is its bytes; any other is what it adds to a decoded neighbour."""
        if not self.stages.byte_level:
            return self._literal(ids) if self.stages.literal else self._decoded(ids)
        table = byte_of_char()
        return [self.added[i] if i in self.added else _from_bytes(self.pieces[i], table) for i in ids]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See `Backend.encode`."""
        batch = guarded("encoding text", lambda: self.tokenizer.encode_batch(list(texts), add_special_tokens=False))
        return [Encoded(ids=e.ids, offsets=e.offsets) for e in batch]

    def cause(self, token_id: int, text: str) -> str:
        """See `Backend.cause`."""
        if token_id in self.added:
            return ADDED_NOT_MATCHED
        return guarded("searching the cause", lambda: find_cause(self.stages, token_id, self.pieces[token_id], text))

    def _literal(self, ids: Sequence[int]) -> list[str | None]:
        space = "▁" if self.stages.marks_spaces else " "
        return [surface_of(self.stages, self.pieces[i])[0].replace(space, " ") for i in ids]

    def _decoded(self, ids: Sequence[int]) -> list[str | None]:
        anchor = self._anchor()
        left = self._decode([[anchor]])[0] if anchor is not None else ""
        beside = [[anchor, i] if anchor is not None else [i] for i in ids]
        found: list[str | None] = []
        for token_id, text in zip(ids, self._decode(beside), strict=True):
            own = text[len(left) :] if text.startswith(left) else text
            genuine = REPLACEMENT in self.pieces[token_id]
            found.append(None if REPLACEMENT in own and not genuine else own)
        return found

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        return guarded("decoding", lambda: self.tokenizer.decode_batch(sequences, skip_special_tokens=False))

    def _anchor(self) -> int | None:
        for text in ANCHOR_TEXTS:
            ids = self.encode([text])[0].ids
            if ids and self._decode([[ids[-1]]])[0].strip() == text:
                return int(ids[-1])
        return None


@lru_cache(maxsize=1)
def byte_of_char() -> Mapping[str, int]:
    """The byte-level alphabet: 256 printable characters, one a byte (visible Latin-1 stands for itself)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in visible}
    hidden = (b for b in range(256) if b not in set(visible))
    return {**table, **{chr(256 + n): b for n, b in enumerate(hidden)}}


def _from_bytes(piece: str, table: Mapping[str, int]) -> str | None:
    try:
        raw = bytes(table[c] for c in piece)
    except KeyError:
        return piece  # not in the alphabet: no byte-level text can build it; let the trial show that
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def wrap(tokenizer: tokenizers.Tokenizer, *, file: str, named: NamedSpecials, kind: str | None = None) -> Tokenizer:
    """A loaded `tokenizers.Tokenizer` as a `Tokenizer`, with the tokens that the config files add as transformers would.

    Tokens of `added_tokens_decoder` that the file does not know are added if they land on the id they claim; the strings of
    roles count as special when they are in the vocabulary. Cost: one pass over the vocabulary.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    guarded(file, lambda: _add_missing(tokenizer, named))
    decoder = guarded(file, tokenizer.get_added_tokens_decoder)
    added = {i: t.content for i, t in decoder.items()}
    pieces = {i: s for s, i in guarded(file, lambda: tokenizer.get_vocab(with_added_tokens=True)).items()}
    pieces |= added
    check_ids(file, pieces)
    id_of = {s: i for i, s in pieces.items()}
    special = {i for i, t in decoder.items() if t.special}
    special |= {i for i, text, flagged in named.added if flagged and pieces.get(i) == text}
    special |= {id_of[s] for s in (*named.strings.values(), *named.extra) if s in id_of}
    special_ids = {role: id_of[s] for role, s in named.strings.items() if s in id_of}
    prefix = default_prefix(tokenizer, named, special_ids)
    return Tokenizer(
        file=file,
        kind=kind or type(tokenizer.model).__name__,
        pieces=pieces,
        backend=HfBackend(tokenizer, pieces, added),
        special_ids=special_ids,
        added=added,
        special=frozenset(special),
        prefix_ids=prefix,
        bos_is_added=bool(prefix),
        roles={f"{role}_token": s for role, s in named.strings.items()},
    )


def _add_missing(tokenizer: tokenizers.Tokenizer, named: NamedSpecials) -> None:
    from tokenizers import AddedToken

    known = tokenizer.get_added_tokens_decoder()
    used = set(tokenizer.get_vocab(with_added_tokens=True).values())
    for token_id, text, special in named.added:
        if token_id in known or not text:
            continue
        own = tokenizer.token_to_id(text)
        if token_id == own or (own is None and token_id == len(used) == max(used, default=-1) + 1):
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
            used.add(token_id)


def default_prefix(tokenizer: tokenizers.Tokenizer, named: NamedSpecials, special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Ids that stand in front of an encoded text: what the flag says if it counts, else what the post-processor does."""
    if named.add_bos is not None:
        return (special_ids["bos"],) if named.add_bos and "bos" in special_ids else ()
    encoding = guarded("encoding text", lambda: tokenizer.encode("a", add_special_tokens=True))
    ids, mask = encoding.ids, encoding.special_tokens_mask
    first = next((n for n, is_special in enumerate(mask) if not is_special), 0)
    return tuple(int(i) for i in ids[:first])
