"""SentencePiece `tokenizer.model` / `spiece.model` files, through the `sentencepiece` library (an optional extra)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_FILE_BYTES, Encoded, Tokenizer, check_ids, guarded
from ghoststep.instruments.tokenizers.causes import BYTE_FALLBACK, CHANGED, OTHER_SPLIT
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"
INSTALL = "pip install -U sentencepiece"


class SentencePieceBackend:
    """One `SentencePieceProcessor`."""

    def __init__(self, processor: Any, pieces: Mapping[int, str], bytes_of: Mapping[int, int]) -> None:
        self.processor = processor
        self.pieces = pieces
        self.bytes_of = bytes_of

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """See `Backend.texts`."""
        return [self._text(i) for i in ids]

    def _text(self, token_id: int) -> str | None:
        byte = self.bytes_of.get(token_id)
        if byte is not None:
            return chr(byte) if byte < 0x80 else None
        return self.pieces[token_id].replace(SPACE, " ")

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See `Backend.encode`. The bytes of one character share its offsets: the last one carries the character."""
        batch = guarded("encoding text", lambda: self.processor.encode(list(texts), return_type="offset_mapping"))
        return [Encoded(ids=t["ids"], offsets=t["offsets"]) for t in batch]

    def cause(self, token_id: int, text: str) -> str:
        """See `Backend.cause`."""
        if token_id in self.bytes_of:
            return BYTE_FALLBACK
        if self.processor.is_unused(token_id):
            return "marked unused in the SentencePiece model"
        normal = self.processor.normalize("a" + text)
        if self.pieces[token_id] not in normal:
            return f"{CHANGED} (SentencePiece rules)"
        return "the pieces around it score better" if not normal else OTHER_SPLIT["Unigram"]


def load(checkpoint: Checkpoint, named: NamedSpecials) -> Tokenizer | None:
    """None if no such file is there, or if it is a list of ranks instead (the same name is used for both)."""
    for file in FILES:
        raw = checkpoint.read_bytes(file, limit_bytes=MAX_FILE_BYTES)
        if raw is not None and not looks_like_ranks(bytes(raw[:200])):
            return _load(file, bytes(raw), named)
    return None


def looks_like_ranks(head: bytes) -> bool:
    """True for lines of base64 and a number: tiktoken's format, which some folders store as `tokenizer.model`."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", head) is not None


def _load(file: str, raw: bytes, named: NamedSpecials) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError as error:
        raise CannotLook(f"{file}: reading it needs the package sentencepiece; run `{INSTALL}`") from error
    processor = sentencepiece.SentencePieceProcessor()
    if not hasattr(processor, "EncodeAsOffsetMapping"):
        raise CannotLook(f"{file}: this sentencepiece ({sentencepiece.__version__}) gives no offsets; run `{INSTALL}`")
    guarded(file, lambda: processor.load_from_serialized_proto(raw))
    size = int(processor.get_piece_size())
    pieces = {i: processor.id_to_piece(i) for i in range(size)}
    check_ids(file, pieces)
    bytes_of = {i: int(m[1], 16) for i, p in pieces.items() if processor.is_byte(i) and (m := BYTE_PIECE.fullmatch(p))}
    id_of = {p: i for i, p in pieces.items()}
    control = {i for i in pieces if processor.is_control(i) or processor.is_unknown(i)}
    roles = {r: i for r in ("bos", "eos", "pad", "unk") if (i := int(getattr(processor, f"{r}_id")())) >= 0}
    roles |= {r: id_of[s] for r, s in named.strings.items() if s in id_of}
    added = {i: text for i, text, _ in named.added if pieces.get(i, text) == text}
    special = control | {i for i, text, flagged in named.added if flagged and added.get(i) == text}
    prefix = (roles["bos"],) if named.add_bos and "bos" in roles else ()
    return Tokenizer(
        file=file,
        kind="SentencePiece",
        pieces={**pieces, **added},
        backend=SentencePieceBackend(processor, {**pieces, **added}, bytes_of),
        special_ids=roles,
        added=added,
        special=frozenset(special | set(roles.values())),
        prefix_ids=prefix,
        # The file itself never adds one; whether it is added stands in tokenizer_config.json only.
        bos_is_added=named.add_bos,
        roles={f"{r}_token": pieces[i] for r, i in roles.items() if i in pieces},
    )
