"""Small tokenizers trained in the test, folders that hold them, and a slow twin of the reachability instrument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ghoststep.instruments.reachability import PAIRED, RARER, neighbours
from ghoststep.instruments.tokenizers import base
from ghoststep.instruments.tokenizers.hf_backend import wrap
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again; it's what foxes do.",
    "In 2024 there were 1,234 foxes and 99 dogs.\n\nNobody counted the cats (or did they?)",
    "def main():\n    return [x for x in range(10) if x % 2 == 0]\n",
    "Größe, naïve café, übermäßig; русский текст, 中文文本, 日本語のテキスト. 🙂🙃",
] * 4
SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def byte_level(*, size: int = 420, specials: Sequence[str] = SPECIALS, texts: Sequence[str] = TEXT) -> Tokenizer:
    """A byte-level BPE as GPT-2's, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_piece(*, lowercase: bool = True) -> Tokenizer:
    """An uncased WordPiece as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    return tokenizer


def unigram() -> Tokenizer:
    """A Unigram model with "▁" for spaces, as T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def edited(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    """A copy with parts of its JSON replaced; `vocab={token: id}` and `merges=[[a, b]]` are added to the model's."""
    data = json.loads(tokenizer.to_str())
    data["model"]["vocab"] |= changes.pop("vocab", {})
    data["model"]["merges"] = data["model"].get("merges", []) + changes.pop("merges", [])
    if not data["model"]["merges"]:
        del data["model"]["merges"]
    return Tokenizer.from_str(json.dumps(data | changes))


def size_of(tokenizer: Tokenizer) -> int:
    """Ids 0 … size - 1."""
    return tokenizer.get_vocab_size(with_added_tokens=True)


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece that must be there."""
    found = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return int(found)


def wrapped(tokenizer: Tokenizer, **named: Any) -> base.Tokenizer:
    """As the instruments see it. The argument is copied, since a backend switches parts off."""
    return wrap(Tokenizer.from_str(tokenizer.to_str()), file="tokenizer.json", named=NamedSpecials(**named))


def add_special(tokenizer: Tokenizer, *texts: str) -> None:
    """Add special tokens that keep their string as it is."""
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in texts])


def folder(path: Path, tokenizer: Tokenizer | None = None, files: Mapping[str, object] | None = None) -> Checkpoint:
    """A checkpoint folder with a config, a tokenizer.json and further files (objects as JSON, strings and bytes as they are)."""
    path.mkdir(parents=True, exist_ok=True)
    everything: dict[str, object] = {"config.json": {"model_type": "made-here", "vocab_size": 10}, **(files or {})}
    for name, content in everything.items():
        raw = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
        (path / name).write_bytes(raw)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return open_checkpoint(str(path))


class MetadataOnly(Checkpoint):
    """A checkpoint without files, only with GGUF key-values."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.name = "metadata only"
        self._key_values = metadata

    def metadata(self) -> Mapping[str, object]:
        """The key-values given."""
        return self._key_values

    def read_bytes(self, file: str, *, limit_bytes: int = 0) -> bytes | None:
        """No file is there."""
        return None


def slowly_reached(tokenizer: Tokenizer, token_id: int, text: str) -> bool:
    """The definition, one text at a time: some neighbours bring the id back on characters that are the token's own."""
    for left, right in (*neighbours(), *RARER, *PAIRED):
        encoding = tokenizer.encode(left + text + right, add_special_tokens=False)
        for found, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if found == token_id and len(left) <= start and stop <= len(left) + len(text):
                return True
    return False
