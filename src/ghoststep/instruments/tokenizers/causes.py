"""Why a token cannot come out of text: each stage of a `tokenizers` pipeline is run alone and looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

from ghoststep.evidence.tokenizer import NEVER_BUILT

ANCHORS = ("", "a", "\n", ".", " x", " ", "1")
"""Neighbours on either side of a token: nothing, a letter, a line end, punctuation, a word start, a space, a digit."""
GLUING = ("a", " x", "1")
"""Left neighbours to which a word can continue."""

CUT = "cut by the pre-tokenizer"
CHANGED = "changed by the normalizer"
BYTE_FALLBACK = "a byte-fallback token of a character that has its own token"
LEFTOVER = "no neighbour that was tried brings it back, though the model alone builds it"
OTHER_SPLIT = {
    "BPE": NEVER_BUILT,
    "WordPiece": "longest match first takes other tokens",
    "Unigram": "another split has a better score",
    "WordLevel": "the model does not produce it",
}
OPEN_CAUSES = frozenset({LEFTOVER, OTHER_SPLIT["WordPiece"]})
"""Causes that a further neighbour may still refute. The others are proofs: a BPE or Unigram model that makes something else of
the token's own text does so everywhere, because a token that stands in a text has no merge and no piece across its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The parts of a pipeline, apart from each other. `prefix` and `suffix` mark pieces inside or at the end of a word."""

    normalizer: Any
    pre_tokenizer: Any
    model: Any
    normalizer_json: Mapping[str, Any]
    byte_level: bool
    marks_spaces: bool
    literal: bool
    """Pieces are the text itself but for `prefix`, `suffix` and "▁": WordPiece, or a file without a decoder."""
    prefix: str
    suffix: str

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> Stages:
        """Read them off a tokenizer."""
        decoder = _state(tokenizer.decoder)
        pre = _state(tokenizer.pre_tokenizer)
        model = tokenizer.model
        return cls(
            normalizer=tokenizer.normalizer,
            pre_tokenizer=tokenizer.pre_tokenizer,
            model=model,
            normalizer_json=_state(tokenizer.normalizer),
            byte_level=any(part.get("type") == "ByteLevel" for part in (*flat(decoder), *flat(pre))),
            marks_spaces="▁" in json.dumps([pre, _state(tokenizer.normalizer)], ensure_ascii=False),
            literal=not decoder or type(model).__name__ == "WordPiece",
            prefix=getattr(model, "continuing_subword_prefix", None) or "",
            suffix=getattr(model, "end_of_word_suffix", None) or "",
        )


def _state(component: Any) -> dict[str, Any]:
    found = json.loads(component.__getstate__()) if component is not None else {}
    return found if isinstance(found, dict) else {}


def flat(stage: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A stage's parts in order, nested sequences opened."""
    inner = next((stage[k] for k in ("normalizers", "pretokenizers", "decoders", "processors") if k in stage), None)
    if isinstance(inner, list):
        for part in inner:
            yield from flat(part)
    elif stage:
        yield stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """What must survive: `surface` as the model sees it, and whether it must stay glued to what stands before it."""

    text: str
    surface: str
    glued: bool

    def contexts(self) -> Iterator[tuple[str, int, int]]:
        """Texts holding the token, each with the span [start, stop) that no boundary may cross."""
        at = max(self.text.find(self.surface), 0)
        length = len(self.surface) if self.surface in self.text else len(self.text)
        for left in GLUING if self.glued else ANCHORS:
            for right in ANCHORS if self.glued is False and left == "" else ("", "a"):
                start = len(left) + at
                yield left + self.text + right, start - (1 if self.glued else 0), start + length


def surface_of(stages: Stages, piece: str) -> tuple[str, bool]:
    """A piece as it stands in text that the model sees, and whether it continues a word."""
    glued = bool(stages.prefix) and piece.startswith(stages.prefix)
    surface = piece[len(stages.prefix) :] if glued else piece
    if stages.suffix and surface.endswith(stages.suffix):
        surface = surface[: -len(stages.suffix)]
    return surface, glued


def find_cause(stages: Stages, token_id: int, piece: str, text: str) -> str:
    """The first of: not a text of its own, changed, cut, both, else what the model does with the surface alone."""
    if piece.startswith("<0x") and len(piece) == 6 and piece.endswith(">") and not stages.byte_level and piece != text:
        return BYTE_FALLBACK
    if not text:
        return "it stands for no text"
    core = _core(stages, piece, text)
    changed = _changed_by(stages, core)
    cut = _cut(stages, core, changed=bool(changed))
    if changed and cut:
        return f"{CHANGED} ({changed}) and {CUT}"
    if changed:
        return f"{CHANGED} ({changed})"
    if cut:
        return CUT
    return _model_cause(stages, token_id, piece)


def _core(stages: Stages, piece: str, text: str) -> _Core:
    if stages.byte_level:
        return _Core(text=text, surface=text, glued=False)
    surface, glued = surface_of(stages, piece)
    return _Core(text=text, surface=surface or text, glued=glued)


def _cut(stages: Stages, core: _Core, *, changed: bool) -> bool:
    """True if the pre-tokenizer puts a boundary inside the token in every context, or inside what normalizing made of it."""
    if stages.pre_tokenizer is None:
        return False
    split = stages.pre_tokenizer.pre_tokenize_str
    if changed:
        return not core.glued and len(split(stages.normalizer.normalize_str(core.text))) > 1
    return all(_crosses(split(context), start, stop) for context, start, stop in core.contexts())


def _crosses(pieces: list[tuple[str, tuple[int, int]]], start: int, stop: int) -> bool:
    return any(start < edge < stop for _, span in pieces for edge in span)


def _changed_by(stages: Stages, core: _Core) -> str:
    """Names of the normalizer parts that alone change the token in every context; "" if it survives somewhere."""
    if stages.normalizer is None or _survives(stages.normalizer, core):
        return ""
    parts = _parts(json.dumps(stages.normalizer_json, sort_keys=True))
    names = [name for name, part in parts if not _survives(part, core)]
    return ", ".join(names) if names else ", ".join(dict.fromkeys(name for name, _ in parts))


def _survives(normalizer: Any, core: _Core) -> bool:
    for context, start, stop in core.contexts():
        wanted = context[start:stop]
        normal = normalizer.normalize_str(context)
        glue = context[start] if core.glued else ""
        if wanted in normal or glue + core.surface in normal:
            return True
    return False


@lru_cache(maxsize=8)
def _parts(normalizer_json: str) -> tuple[tuple[str, Any], ...]:
    """Each part of a normalizer as one of its own, named by its type; BERT's four switches apart."""
    found = []
    for part in flat(json.loads(normalizer_json)):
        for name, single in _switches(part):
            found.append((name, _build(single)))
    return tuple(found)


def _switches(part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if part.get("type") != "BertNormalizer":
        yield str(part.get("type")), part
        return
    accents = part.get("strip_accents")
    state = {**part, "strip_accents": part.get("lowercase") if accents is None else accents}
    switches = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    for on in switches:
        if state.get(on):
            yield on, {"type": "BertNormalizer", **{s: s == on for s in switches}}


def _build(part: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    whole = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": part,
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    }
    return Tokenizer.from_str(json.dumps(whole)).normalizer


def _model_cause(stages: Stages, token_id: int, piece: str) -> str:
    kind = type(stages.model).__name__
    other = OTHER_SPLIT.get(kind, "the model does not produce it")
    if stages.prefix and piece.startswith(stages.prefix):
        built = [t.id for t in stages.model.tokenize("a" + piece[len(stages.prefix) :])]
        return LEFTOVER if token_id in built else other
    built = [t.id for t in stages.model.tokenize(piece)]
    return LEFTOVER if built == [token_id] else other
