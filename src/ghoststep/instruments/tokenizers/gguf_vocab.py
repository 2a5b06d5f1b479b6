"""The vocabulary inside a GGUF file's key-values (`tokenizer.ggml.*`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_ID, Tokenizer, check_ids, guarded
from ghoststep.instruments.tokenizers.hf_backend import wrap
from ghoststep.instruments.tokenizers.pretokenizer_patterns import BY_GGUF_NAME
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

PREFIX = "tokenizer.ggml."
MAX_SCORED_CHARS = 16_000_000
"""Every split of every token is looked up; the largest real vocabularies have about two million characters."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "padding_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # spelt like this in the format
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}


def load(checkpoint: Checkpoint) -> Tokenizer | None:
    """None where the metadata holds no vocabulary. The backend is missing, with the reason, for formats that are not known."""
    meta = checkpoint.metadata()
    if PREFIX + "tokens" not in meta:
        return None
    tokens = _strings(meta, "tokens")
    types = [int(t) if isinstance(t, SupportsIndex) else 0 for t in _list(meta, "token_type")] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CannotLook(f"GGUF: {len(types)} token types for {len(tokens)} tokens; expected one each")
    roles = {r: i for r, key in ROLE_KEYS.items() if 0 <= (i := _int(meta, key)) < len(tokens)}
    named = NamedSpecials(
        strings={r: tokens[i] for r, i in roles.items()}, add_bos=_flag(meta, "add_bos_token", _text(meta, "model") == "llama")
    )
    reason = _unsupported(meta)
    if reason is not None:
        return _without_backend(tokens, types, roles, named, reason)
    build = _byte_level if _text(meta, "model") == "gpt2" else _by_score
    tokenizer = guarded("GGUF vocabulary", lambda: build(meta, tokens, types))
    loaded = wrap(tokenizer, file="GGUF metadata", named=named, kind=f"GGUF {_text(meta, 'model')}")
    # Two ids may hold one string: only ids say which of them the file means, and the list keeps them all.
    pieces = dict(enumerate(tokens))
    special = loaded.special | {i for i, t in enumerate(types) if t in (UNKNOWN, CONTROL)} | set(roles.values())
    backend: Any = loaded.backend
    backend.pieces = pieces
    prefix = (roles["bos"],) if named.add_bos and "bos" in roles else ()
    return Tokenizer(
        file=loaded.file,
        kind=loaded.kind,
        pieces=pieces,
        backend=backend,
        special_ids=roles,
        added=loaded.added,
        special=frozenset(special),
        prefix_ids=prefix,
        bos_is_added=bool(prefix),
        roles=loaded.roles,
    )


def _unsupported(meta: Mapping[str, object]) -> str | None:
    model, pre = _text(meta, "model"), _text(meta, "pre")
    if model == "llama" and PREFIX + "scores" in meta:
        return None
    if model != "gpt2":
        return f"GGUF: tokenizer.ggml.model is {model!r}; text can be encoded for 'gpt2' and 'llama' only"
    if pre not in BY_GGUF_NAME:
        return f"GGUF: tokenizer.ggml.pre is {pre!r}; how it cuts text is known only for {', '.join(sorted(BY_GGUF_NAME))}"
    return None if PREFIX + "merges" in meta else "GGUF: no tokenizer.ggml.merges, so that no text can be encoded"


def _without_backend(
    tokens: Sequence[str], types: Sequence[int], roles: Mapping[str, int], named: NamedSpecials, reason: str
) -> Tokenizer:
    pieces = dict(enumerate(tokens))
    check_ids("GGUF metadata", pieces)
    added = {i: tokens[i] for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)}
    return Tokenizer(
        file="GGUF metadata",
        kind="GGUF",
        pieces=pieces,
        backend=None,
        backend_reason=reason,
        special_ids=dict(roles),
        added=added,
        special=frozenset({i for i, t in enumerate(types) if t == CONTROL} | set(roles.values())),
        roles={f"{r}_token": s for r, s in named.strings.items()},
    )


def _byte_level(meta: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> Any:
    import tokenizers as hf
    from tokenizers import models, pre_tokenizers

    known = BY_GGUF_NAME[_text(meta, "pre")]
    vocab = {s: i for i, s in reversed(list(enumerate(tokens)))}
    merges = [(pair[0], pair[1]) for line in _strings(meta, "merges") if len(pair := line.split(" ")) == 2]
    tokenizer = hf.Tokenizer(models.BPE(vocab, merges, ignore_merges=known.ignore_merges))
    cuts: list[Any] = [pre_tokenizers.Split(hf.Regex(p), "isolated") for p in known.patterns]
    space = _flag(meta, "add_space_prefix", False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
    )
    tokenizer.decoder = hf.decoders.ByteLevel()
    _add(tokenizer, tokens, types)
    return tokenizer


def _by_score(meta: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> Any:
    """SentencePiece BPE: a pair merges if its joined piece exists, higher score first."""
    import tokenizers as hf
    from tokenizers import models, normalizers

    scores = [float(s) if isinstance(s, SupportsFloat) else 0.0 for s in _list(meta, "scores")]
    if len(scores) != len(tokens):
        raise CannotLook(f"GGUF: {len(scores)} scores for {len(tokens)} tokens; expected one each")
    if sum(map(len, tokens)) > MAX_SCORED_CHARS:
        raise CannotLook(f"GGUF: the tokens have more than {MAX_SCORED_CHARS} characters together; the file is not believed")
    vocab = {s: i for i, s in reversed(list(enumerate(tokens)))}
    unknown = next((tokens[i] for i, t in enumerate(types) if t == UNKNOWN), None)
    merges = list(merges_of(vocab, scores))
    tokenizer = hf.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Prepend("▁")] if _flag(meta, "add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    decoders = hf.decoders
    strip = [decoders.Strip(" ", left=1)] if spaces else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add(tokenizer, tokens, types)
    return tokenizer


def merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every split of a piece into two pieces, best score of the joined piece first. Cost: the sum of squared lengths, capped."""
    order = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    for piece, _ in order:
        if 1 < len(piece) <= 256:
            splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
            known = [(a, b) for a, b in splits if a in vocab and b in vocab]
            yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _add(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    control = [AddedToken(tokens[i], normalized=False, special=True) for i, t in enumerate(types) if t in (UNKNOWN, CONTROL)]
    plain = [AddedToken(tokens[i], normalized=False, special=False) for i, t in enumerate(types) if t == USER_DEFINED]
    tokenizer.add_special_tokens([t for t in control if t.content])
    tokenizer.add_tokens([t for t in plain if t.content])


def _list(meta: Mapping[str, object], key: str) -> list[object]:
    value = meta.get(PREFIX + key)
    values = value.tolist() if hasattr(value, "tolist") else value
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or len(values) > MAX_ID:
        raise CannotLook(f"GGUF: {PREFIX}{key} is not a list of at most {MAX_ID} entries")
    return list(values)


def _strings(meta: Mapping[str, object], key: str) -> list[str]:
    return [v.decode("utf-8", errors="replace") if isinstance(v, bytes) else str(v) for v in _list(meta, key)]


def _text(meta: Mapping[str, object], key: str) -> str:
    return str(meta.get(PREFIX + key, ""))


def _int(meta: Mapping[str, object], key: str) -> int:
    value = meta.get(PREFIX + key)
    return int(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else -1


def _flag(meta: Mapping[str, object], key: str, default: bool) -> bool:
    value = meta.get(PREFIX + key)
    return default if value is None else bool(value)
