"""`tokenizer.json`: the whole pipeline in one file, always preferred when it is there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_FILE_BYTES, Tokenizer, guarded
from ghoststep.instruments.tokenizers.hf_backend import wrap
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

FILE = "tokenizer.json"


def load(checkpoint: Checkpoint, named: NamedSpecials) -> Tokenizer | None:
    """None if the file is absent; `CannotLook` if the library refuses it. Cost: about a second for 150,000 tokens.

    The file's own post-processor decides what stands in front of a text: transformers 5 drops `add_bos_token` and
    `add_eos_token` of tokenizer_config.json when a tokenizer.json is there (transformers 4 let some classes follow them).
    """
    from tokenizers import Tokenizer as HfTokenizer

    raw = checkpoint.read_bytes(FILE, limit_bytes=MAX_FILE_BYTES)
    if raw is None:
        return None
    try:
        text = bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CannotLook(f"{FILE}: not UTF-8 text at byte {error.start}; expected the JSON of a tokenizer") from error
    return wrap(guarded(FILE, lambda: HfTokenizer.from_str(text)), file=FILE, named=replace(named, add_bos=None))
