"""Reading values of an untrusted config: the type and range are checked, what does not fit is set aside with its place.

Nothing here raises for a bad value: one wrong key must not blind every other fact. The value counts as undeclared and the
`problems` list says what was got, where, and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_VOCAB = 1 << 28
MAX_HIDDEN = 1 << 22
MAX_LAYERS = 1 << 14
VOCAB_KEYS = ("vocab_size", "n_vocab", "padded_vocab_size", "vocabulary_size", "num_embeddings")
HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "emb_dim", "n_embed", "embed_dim", "hidden_dim")
LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "n_blocks", "decoder_layers", "encoder_layers",
)  # fmt: skip
TIE_KEYS = ("tie_word_embeddings", "tied_embeddings", "tie_embeddings", "tie_embedding", "share_embeddings", "weight_tying")
_OTHER_MODALITY = re.compile(
    r"vision|visual|image|audio|speech|video|codec|talker|token2wav|code2wav|qformer|vq|speaker|depth|draft|mtp"
)
_TEXT = re.compile(r"text|llm|language|decoder|thinker|lm_|_lm|causal")
_NO_PART = re.compile(r"quantization|rope|generation|label|sampl|task_specific|auto_map|adapter")
_MULTIPLIER = re.compile(
    r"^(?:mup_)?(?:scale_emb(?:ed(?:ding)?s?)?|(?:input_)?emb(?:ed(?:ding)?s?)?_(?:multiplier|scale)(?:_scale)?)$"
)
_TABLE_SIZE = re.compile(r"vocab|^embedding_size$")
_MULTIPLE = re.compile(r"multiple|divisible")
_ON_TOP = re.compile(r"additional|extra|added")
_TENSOR_PARALLEL = ("tensor_model_parallel_size", "model_parallel_size", "tensor_parallel_size")
MAX_DEPTH, MAX_PARTS = 5, 200


@dataclass(slots=True, kw_only=True)
class Reader:
    """Takes values out of one file's mapping; `problems` collects what did not fit."""

    file: str
    problems: list[str] = field(default_factory=list)

    def complain(self, place: str, value: object, expected: str) -> None:
        """Set a value aside, in words."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        self.problems.append(
            f"{self.file}: {place} is {shown} ({type(value).__name__}), expected {expected}; taken as undeclared"
        )

    def count(self, part: Part, keys: Sequence[str], limit: int) -> tuple[int, str] | None:
        """The first of `keys` that holds an integer from 1 to `limit`, with its place. `null` is simply undeclared."""
        for key in keys:
            value = part.values.get(key)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit:
                return value, part.place(key)
            self.complain(part.place(key), value, f"an integer from 1 to {limit}")
        return None

    def flag(self, part: Part, keys: Sequence[str]) -> tuple[bool, str] | None:
        """The first of `keys` that holds true or false, with its place."""
        for key in keys:
            value = part.values.get(key)
            if isinstance(value, bool):
                return value, part.place(key)
            if value is not None:
                self.complain(part.place(key), value, "true or false")
        return None

    def text(self, part: Part, key: str) -> str | None:
        """A string of at most 200 characters, or None."""
        value = part.values.get(key)
        if value is None or (isinstance(value, str) and len(value) <= 200):
            return value
        self.complain(part.place(key), value, "a short string")
        return None

    def texts(self, part: Part, key: str) -> tuple[str, ...]:
        """A list of short strings, or ()."""
        value = part.values.get(key)
        if value is None:
            return ()
        if isinstance(value, list) and len(value) <= 100 and all(isinstance(v, str) and len(v) <= 200 for v in value):
            return tuple(value)
        self.complain(part.place(key), value, "a list of short strings")
        return ()

    def ids(self, part: Part, key: str) -> tuple[int, ...]:
        """Token ids: one integer or a list of them. -1 (also as unsigned 32-bit) is an old way to say "none"."""
        value = part.values.get(key)
        if value is None:
            return ()
        given: list[object] = value if isinstance(value, list) else [value]
        found = [v for v in given if isinstance(v, int) and not isinstance(v, bool) and -1 <= v < 1 << 32]
        if len(found) == len(given) <= 10_000:
            return tuple(dict.fromkeys(v for v in found if v not in (-1, (1 << 32) - 1)))
        self.complain(part.place(key), value, "a token id or a list of token ids")
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One mapping of a config: the root (`path` "") or a nested config ("text_config")."""

    path: str
    values: Mapping[str, object]

    def place(self, key: str) -> str:
        """Where a key stands: "text_config.vocab_size"."""
        return f"{self.path}.{key}" if self.path else key


def parts(config: Mapping[str, object]) -> tuple[Part, ...]:
    """The root and every nested mapping that may be a config, outer first; bounded in depth and number."""
    return tuple(_walk(config))


def _walk(config: Mapping[str, object]) -> Iterator[Part]:
    queue = [(Part(path="", values=config), 0)]
    seen = 0
    while queue and seen < MAX_PARTS:
        part, depth = queue.pop(0)
        seen += 1
        yield part
        if depth < MAX_DEPTH:
            inner = [(k, v) for k, v in part.values.items() if isinstance(v, dict) and not _NO_PART.search(k)]
            queue += [(Part(path=part.place(k), values=v), depth + 1) for k, v in inner[:MAX_PARTS]]


def text_part(config: Mapping[str, object]) -> Part:
    """The part that describes the text model: the one with a vocabulary size, not another modality's, the outermost.

    The root wins when it also has a hidden size; without any vocabulary size it is the nested part that speaks of text
    and has a hidden size, else the root.
    """
    found = parts(config)
    root = found[0]
    if any(key in root.values for key in VOCAB_KEYS) and any(key in root.values for key in HIDDEN_KEYS):
        return root
    with_vocab = [p for p in found if any(p.values.get(key) is not None for key in VOCAB_KEYS) and p is not root]
    if with_vocab:
        return min(with_vocab, key=_text_preference)
    if any(key in root.values for key in HIDDEN_KEYS):
        return root
    named = [p for p in found if _TEXT.search(p.path) and not _OTHER_MODALITY.search(p.path)]
    sized = [p for p in named if any(key in p.values for key in HIDDEN_KEYS)]
    return min(sized, key=_text_preference) if sized else root


def _text_preference(part: Part) -> tuple[bool, bool, bool, int, int]:
    sizes = [v for key in VOCAB_KEYS if isinstance(v := part.values.get(key), int)]
    has_hidden = any(key in part.values for key in HIDDEN_KEYS)
    other = _OTHER_MODALITY.search(part.path) is not None
    return other, not has_hidden, _TEXT.search(part.path) is None, part.path.count("."), -max(sizes, default=0)


def table_sizes(config: Mapping[str, object], vocab: tuple[int, str] | None) -> dict[int, str]:
    """Numbers of table rows that a config declares beside its vocabulary size, with the key that says so.

    Three ways of writing them: a size of its own ("padded_vocab_size", the vocab_size of an inner text config), rows on top
    ("additional_vocab_size"), and a multiple that the vocabulary size is rounded up to ("pad_vocab_size_multiple",
    "make_vocab_size_divisible_by", the latter times the tensor-parallel size where that is given).
    """
    found: dict[int, str] = {}
    for part in parts(config):
        if _OTHER_MODALITY.search(part.path):
            continue
        for key, value in part.values.items():
            if not isinstance(key, str) or not _TABLE_SIZE.search(key) or (vocab is not None and part.place(key) == vocab[1]):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_VOCAB:
                continue
            place = part.place(key)
            if _MULTIPLE.search(key):
                if vocab is not None:
                    for size, words in _rounded(part, key, value, vocab):
                        found.setdefault(size, words)
                continue
            found.setdefault(value, place)
            if vocab is not None and _ON_TOP.search(key):
                found.setdefault(vocab[0] + value, f"{vocab[1]} {vocab[0]} + {place} {value}")
    return found


def _rounded(part: Part, key: str, multiple: int, vocab: tuple[int, str]) -> Iterator[tuple[int, str]]:
    for tensor_parallel in (None, *_TENSOR_PARALLEL):
        ranks = 1 if tensor_parallel is None else part.values.get(tensor_parallel)
        if isinstance(ranks, int) and not isinstance(ranks, bool) and 1 <= ranks <= 1 << 12:
            step = multiple * ranks
            times = "" if tensor_parallel is None else f" x {tensor_parallel} {ranks}"
            yield -(-vocab[0] // step) * step, f"{vocab[1]} {vocab[0]} rounded up to {part.place(key)} {multiple}{times}"


def multiplier(reader: Reader, part: Part, hidden: int | None) -> tuple[float, str] | None:
    """The factor after the embedding lookup that a key declares: a number, or a flag that means sqrt(hidden size)."""
    for key, value in part.values.items():
        if not _MULTIPLIER.match(key) or value is None:
            continue
        if isinstance(value, bool):
            if not value:
                return 1.0, part.place(key)
            if hidden is not None:
                return float(hidden) ** 0.5, f"{part.place(key)} (true: sqrt of hidden size {hidden})"
            reader.complain(part.place(key), value, "a hidden size beside it")
        elif isinstance(value, (int, float)) and 0 < value < 1e9:
            return float(value), part.place(key)
        else:
            reader.complain(part.place(key), value, "a positive number, true or false")
    return None
