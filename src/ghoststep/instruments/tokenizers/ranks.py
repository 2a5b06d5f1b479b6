"""Byte-level vocabularies given by ranks: `tekken.json` and tiktoken's lines of base64, through the `tiktoken` library."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_FILE_BYTES, MAX_ID, Encoded, Tokenizer, check_ids, guarded
from ghoststep.instruments.tokenizers.causes import CUT, LEFTOVER, OTHER_SPLIT
from ghoststep.instruments.tokenizers.sentencepiece_model import looks_like_ranks
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

TEKKEN = "tekken.json"
INSTALL = "encoding text needs the package tiktoken; run `pip install tiktoken`"
NO_PATTERN = "the file lists byte strings and ranks only, not the pattern that cuts text; add the tokenizer.json of this model"


class RanksBackend:
    """One `tiktoken.Encoding`; ids are ranks shifted by `shift` (tekken puts its special tokens first)."""

    def __init__(self, encoding: Any, bytes_of: Mapping[int, bytes], shift: int) -> None:
        self.encoding = encoding
        self.bytes_of = bytes_of
        self.shift = shift

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """See `Backend.texts`."""
        return [_decoded(self.bytes_of[i]) for i in ids]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See `Backend.encode`. Byte strings add up to the text, so their lengths give the offsets."""
        batch = guarded("encoding text", lambda: self.encoding.encode_ordinary_batch(list(texts), num_threads=2))
        return [self._with_offsets(text, [r + self.shift for r in ranks]) for text, ranks in zip(texts, batch, strict=True)]

    def _with_offsets(self, text: str, ids: list[int]) -> Encoded:
        ends = list(accumulate(len(self.bytes_of[i]) for i in ids))
        if not text.isascii():  # a token inside a character ends with it, as in the other backends
            char_of = [n for n, c in enumerate(text) for _ in c.encode("utf-8")]
            spans = [(char_of[a], char_of[b - 1] + 1) for a, b in zip([0, *ends], ends, strict=False)]
            return Encoded(ids=ids, offsets=spans)
        return Encoded(ids=ids, offsets=list(zip([0, *ends], ends, strict=False)))

    def cause(self, token_id: int, text: str) -> str:
        """See `Backend.cause`. One token alone without the pattern means that only the pattern stands in its way."""
        raw = self.bytes_of[token_id]
        ranks = guarded("searching the cause", lambda: self.encoding.encode_single_token(raw))
        whole = guarded("searching the cause", lambda: self.encoding._encode_single_piece(raw))  # no public twin takes bytes
        if whole != [ranks]:
            return OTHER_SPLIT["BPE"]
        return CUT if len(self.encoding.encode_ordinary(text)) > 1 else LEFTOVER


def load_tekken(checkpoint: Checkpoint) -> Tokenizer | None:
    """`tekken.json`: special tokens hold the first ids, then come the ranks, cut at the declared vocabulary size."""
    data = checkpoint.read_json(TEKKEN, limit_bytes=MAX_FILE_BYTES)
    if data is None:
        return None
    config = data.get("config")
    entries = data.get("vocab")
    if not isinstance(config, Mapping) or not isinstance(entries, list):
        raise CannotLook(f"{TEKKEN}: expected the keys config and vocab")
    shift = _int(config, "default_num_special_tokens")
    num_ranks = min(_int(config, "default_vocab_size") - shift, len(entries))
    try:
        ranks = {base64.b64decode(e["token_bytes"]): int(e["rank"]) for e in entries[: max(num_ranks, 0)]}
    except (KeyError, TypeError, ValueError) as error:
        raise CannotLook(f"{TEKKEN}: an entry of vocab is not a token with token_bytes and rank ({error!r})") from error
    listed = data.get("special_tokens")
    named = {int(e["rank"]): str(e["token_str"]) for e in listed if isinstance(e, Mapping)} if isinstance(listed, list) else {}
    special = {i: named.get(i, f"<SPECIAL_{i}>") for i in range(shift)}
    return from_ranks(ranks, file=TEKKEN, pattern=str(config.get("pattern")), special=special, shift=shift)


def load_lines(checkpoint: Checkpoint, files: Sequence[str], named: NamedSpecials) -> Tokenizer | None:
    """Lines of base64 and rank: sizes and byte strings, but never a backend (the pattern stands in code elsewhere)."""
    for file in files:
        raw = checkpoint.read_bytes(file, limit_bytes=MAX_FILE_BYTES)
        if raw is not None and looks_like_ranks(bytes(raw[:200])):
            special = {i: text for i, text, _ in named.added}
            return from_ranks(parse_lines(bytes(raw), file), file=file, pattern=None, special=special)
    return None


def parse_lines(raw: bytes, file: str) -> dict[bytes, int]:
    """The ranks of a tiktoken file; `CannotLook` names the first line that is not one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            if line:
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise CannotLook(f"{file}: line {number} is not base64 and a rank ({error})") from error
    return ranks


def from_ranks(
    ranks: Mapping[bytes, int], *, file: str, pattern: str | None, special: Mapping[int, str], shift: int = 0
) -> Tokenizer:
    """A tokenizer of byte strings and ranks; id = rank + `shift`. `special` maps final ids to strings."""
    bytes_of = {rank + shift: token for token, rank in ranks.items()}
    pieces = {i: token.decode("utf-8", errors="replace") for i, token in bytes_of.items()}
    check_ids(file, {**pieces, **special})
    backend: RanksBackend | None = None
    reason = f"{file}: {NO_PATTERN}"
    if pattern is not None:
        try:
            import tiktoken
        except ImportError:
            reason = f"{file}: {INSTALL}"
        else:
            encoding = guarded(
                file, lambda: tiktoken.Encoding(file, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
            )
            backend = RanksBackend(encoding, bytes_of, shift)
    roles = {r: i for i, s in special.items() for r, text in _ROLE_STRINGS.items() if s == text}
    return Tokenizer(
        file=file,
        kind="byte-level ranks",
        pieces={**pieces, **special},
        backend=backend,
        backend_reason=reason,
        special_ids=roles,
        added=dict(special),
        special=frozenset(special),
        bos_is_added=None,
        roles={f"{r}_token": special[i] for r, i in roles.items()},
    )


_ROLE_STRINGS = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _int(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ID:
        raise CannotLook(f"{TEKKEN}: config.{key} is {value!r}; expected a count up to {MAX_ID}")
    return value
