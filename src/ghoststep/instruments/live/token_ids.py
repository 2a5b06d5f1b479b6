"""The special ids of a setup: its own word first, then its tokenizer's, then the model's configs'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ghoststep.subjects.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """See the fields of the same names in `BatchFacts`."""

    pad_id: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    adds_bos: bool | None


def special_token_ids(setup: Setup) -> SpecialIds:
    """Read attributes only, and tokenize one letter to see whether BOS is added. A tokenizer that fails is as good as none."""
    tokenizer = setup.tokenizer
    configs = [_config(setup.model, "generation_config"), _config(setup.model, "config")]
    sources = [tokenizer, *configs]
    pad = setup.pad_token_id if setup.pad_token_id is not None else _first(sources, "pad_token_id")
    bos = _first(sources, "bos_token_id")
    eos: list[int] = []
    for source in sources:
        eos += [i for i in _ids(getattr(source, "eos_token_id", None)) if i not in eos]
    return SpecialIds(
        pad_id=pad, bos_id=bos, eos_ids=tuple(eos), special_ids=_special(tokenizer), adds_bos=_adds(tokenizer, bos)
    )


def _config(model: Any, name: str) -> Any:
    for owner in (model, getattr(model, "_orig_mod", None), getattr(model, "module", None)):
        found = getattr(owner, name, None) if owner is not None else None
        if found is not None:
            return found
    return None


def _ids(value: Any) -> list[int]:
    values: Iterable[Any] = value if isinstance(value, (list, tuple)) else [value]
    return [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _first(sources: list[Any], name: str) -> int | None:
    for source in sources:
        found = _ids(getattr(source, name, None))
        if found:
            return found[0]
    return None


def _special(tokenizer: Any) -> frozenset[int]:
    found = set(_ids(list(getattr(tokenizer, "all_special_ids", None) or ())))
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if isinstance(decoder, dict):
        found |= {int(i) for i in decoder}
    return frozenset(found)


def _adds(tokenizer: Any, bos: int | None) -> bool | None:
    if tokenizer is None or bos is None:
        return None
    try:
        ids = tokenizer("a")["input_ids"]
        return bool(len(ids) and int(ids[0]) == bos)
    except Exception:  # a stranger's tokenizer may raise anything; then nothing is known
        return None
