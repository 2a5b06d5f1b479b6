"""`tokenizer.json`: the whole pipeline in one file, always preferred when it is there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_FILE_BYTES, Tokenizer, guarded
from ghoststep.instruments.tokenizers.hf_backend import wrap
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

FILE = "tokenizer.json"
MAX_GROWTH = 1000


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
    refuse_growth(text)
    return wrap(guarded(FILE, lambda: HfTokenizer.from_str(text)), file=FILE, named=replace(named, add_bos=None))


def refuse_growth(text: str) -> None:
    """`CannotLook` for a chain of replacements that multiplies text: six times "a" → 100 "a" would allocate until it is killed.

    Real normalizers replace a character by one to three others; the product over a chain of the largest growth is bounded.
    Broken JSON is left to the library, which names the place.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return
    growth = 1.0
    for stage in ("normalizer", "pre_tokenizer", "decoder"):
        growth *= _growth(parsed.get(stage) if isinstance(parsed, dict) else None)
    if growth > MAX_GROWTH:
        raise CannotLook(
            f"{FILE}: its replacements make a text up to {growth:.0e} times longer; no tokenizer needs more than {MAX_GROWTH}. "
            "Not run: look at the Replace entries of its normalizer."
        )


def _growth(stage: object, depth: int = 0) -> float:
    if depth > 50 or not isinstance(stage, dict):
        return 1.0
    product = 1.0
    for key in ("normalizers", "pretokenizers", "decoders"):
        for inner in stage.get(key) or []:
            product *= _growth(inner, depth + 1)
    content = stage.get("content")
    if stage.get("type") == "Replace" and isinstance(content, str):
        pattern = stage.get("pattern")
        # A regular expression may match the empty string between any two characters: count its content whole.
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        product *= max(1.0, len(content) / max(1, len(literal) if isinstance(literal, str) else 1))
    return min(product, 1e300)
