"""Which of a checkpoint's files is its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers import gguf_vocab, legacy_files, ranks, sentencepiece_model, tokenizer_json
from ghoststep.instruments.tokenizers.base import MAX_CONFIG_BYTES, Tokenizer
from ghoststep.instruments.tokenizers.special_ids import read_specials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

CONFIG = "tokenizer_config.json"
RANK_FILES = ("tokenizer.model", "tokenizer.tiktoken", "qwen.tiktoken")
EXPECTED = "tokenizer.json, tokenizer.model, tekken.json, vocab.json + merges.txt, vocab.txt or a GGUF vocabulary"


def locate(checkpoint: Checkpoint) -> Tokenizer:
    """Load the checkpoint's tokenizer; tokenizer.json is preferred, then a GGUF vocabulary, then the older files.

    `CannotLook` if there is none, if it is broken, or if only code that the checkpoint brings could read it (never run).
    """
    config: Mapping[str, object] = checkpoint.read_json(CONFIG, limit_bytes=MAX_CONFIG_BYTES) or {}
    named = read_specials(config, checkpoint.read_json("special_tokens_map.json", limit_bytes=MAX_CONFIG_BYTES))
    found = tokenizer_json.load(checkpoint, named) or gguf_vocab.load(checkpoint)
    if found is None:
        _refuse_remote_code(config)
        found = (
            ranks.load_tekken(checkpoint)
            or sentencepiece_model.load(checkpoint, named)
            or ranks.load_lines(checkpoint, RANK_FILES, named)
            or legacy_files.load_gpt2(checkpoint, named, config)
            or legacy_files.load_wordpiece(checkpoint, named, config)
        )
    if found is None:
        raise CannotLook(f"{checkpoint.name}: no tokenizer file; expected {EXPECTED} beside the weights")
    return found


def _refuse_remote_code(config: Mapping[str, object]) -> None:
    auto_map = config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else None
    if named:
        raise CannotLook(
            f"{CONFIG} asks for code of the checkpoint ({named}) to load its tokenizer; it is never run here. "
            "Save the tokenizer in an environment you trust so that it has a tokenizer.json, and put that file beside the weights"
        )
