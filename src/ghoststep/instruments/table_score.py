"""How strongly a stored tensor speaks for being the input embedding or the output head, with the evidence in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, TensorInfo, fits_vocabulary
from ghoststep.instruments.declared import text_sizes
from ghoststep.instruments.packing import unpacked_shape, unreadable_reason
from ghoststep.instruments.tensor_names import STRONG_INPUT, STRONG_OUTPUT, WEAK_INPUT, WEAK_OUTPUT, Name, is_modality

MIN_TABLE_ROWS = 16
"""Fewer rows are a classifier's labels or token types. The smallest real vocabulary seen has 33."""
USUAL_ROWS = 1000
"""Without a declared vocabulary size, a table with fewer rows is somewhat less likely to be the text table."""
INPUT_THRESHOLD = 4
"""A tensor below this score is not taken: it needs a fitting name and shape, or an exact shape on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What table shapes are compared with. `hidden_source` says in words where the hidden size comes from."""

    vocab: int | None
    hidden: int | None
    hidden_declared: bool
    hidden_source: str
    config: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A tensor as a possible table, with its score and the evidence in words."""

    tensor: TensorInfo
    name: Name
    rows: int
    dims: int
    score: int
    words: tuple[str, ...]
    unreadable: str | None = None
    rows_measured: bool = True

    @property
    def reason(self) -> str:
        """The evidence in one line."""
        return ", ".join(self.words)

    def table(self, role: str, extra: str = "") -> Table:
        """The table this candidate is."""
        reason = ", ".join(filter(None, (self.reason, extra)))
        return Table(
            tensor=self.tensor,
            role=role,
            num_rows=self.rows,
            num_dims=self.dims,
            reason=reason,
            unreadable=self.unreadable,
            rows_measured=self.rows_measured,
        )


def known_sizes(stored: StoredTensors, declared: Declared | None) -> Sizes:
    is_declared = declared is not None and declared.hidden_size is not None
    if declared is not None and declared.hidden_size is not None:
        hidden: int | None = declared.hidden_size
        source = "hidden_size"
    else:  # norms have one weight per hidden dimension: their commonest length is a good guess at the hidden size
        norms = (t for t in stored.tensors.values() if len(t.shape) == 1 and "norm" in t.name.lower())
        lengths = Counter(t.shape[0] for t in norms if not is_modality(t.name))
        hidden = lengths.most_common(1)[0][0] if lengths else None
        source = f"the length of {lengths[hidden]} norm weights" if hidden is not None else ""
    config = text_sizes(declared) if declared is not None else {}
    vocab = declared.vocab_size if declared else None
    return Sizes(vocab=vocab, hidden=hidden, hidden_declared=is_declared, hidden_source=source, config=config)


def as_input(tensor: TensorInfo, name: Name, sizes: Sizes, stored: StoredTensors) -> Candidate:
    words: list[str] = []
    score = 0 if tensor.name.endswith((".weight", ".kernel")) else -4
    if STRONG_INPUT.match(name.own):
        score, words = 4, [f"named …{name.own}.{name.leaf}"]
    elif WEAK_INPUT.match(name.own):
        score, words = 2, [f"named …{name.own}.{name.leaf}"]
    elif STRONG_OUTPUT.match(name.own) or WEAK_OUTPUT.match(name.own):
        score, words = -4, [f"named like a head (…{name.own}.{name.leaf})"]
    shape = logical_shape(tensor, name, sizes, stored)
    unreadable, rows, dims = shape.unreadable, shape.rows, shape.dims
    row_score, row_words = _row_evidence(rows, sizes.vocab, unreadable is not None)
    dim_score, dim_words = _dim_evidence(dims, sizes, unreadable is not None)
    if rows < MIN_TABLE_ROWS:
        score, row_words = score - 8, f"only {rows} table rows"
    for flag, what in _against(name):
        if flag:
            score, words = score - 4, [*words, what]
    words = [*words, row_words, dim_words]
    total = score + row_score + dim_score
    return Candidate(
        tensor=tensor,
        name=name,
        rows=rows,
        dims=dims,
        score=total,
        words=tuple(filter(None, words)),
        unreadable=unreadable,
        rows_measured=shape.is_measured,
    )


def _against(name: Name) -> tuple[tuple[bool, str], ...]:
    return (
        (name.modality, "a name for other things than text tokens"),
        (name.position, "a position table by name"),
        (name.other_kind, "a further table by name"),
        (name.draft, "part of a draft or multi-token head"),
        (name.not_vocabulary, "a classifier or reward head by name"),
        (name.numbered, "one of several numbered tables"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The logical shape of a table, why its values cannot be read (None if they can), and whether the storage shows the shape."""

    unreadable: str | None
    rows: int
    dims: int
    is_measured: bool


def logical_shape(tensor: TensorInfo, name: Name, sizes: Sizes, stored: StoredTensors) -> Shape:
    """[table rows, dims] behind a stored matrix: its own shape, or what a packed one holds.

    Where the packing is not understood, the declared vocabulary size stands in, so that a table by name is still found; the
    shape then counts as not measured, and nothing may be concluded from it.
    """
    rows, dims = tensor.shape
    unreadable = unreadable_reason(tensor, name, stored)
    if unreadable is None:
        return Shape(unreadable=None, rows=rows, dims=dims, is_measured=True)
    hiddens = tuple(dict.fromkeys((*((sizes.hidden,) if sizes.hidden else ()), *sizes.config)))
    measured = unpacked_shape(tensor, name, stored, hiddens=hiddens, vocab=sizes.vocab)
    if measured is not None:
        return Shape(unreadable=unreadable, rows=measured[0], dims=measured[1], is_measured=True)
    named = STRONG_INPUT.match(name.own) or STRONG_OUTPUT.match(name.own)
    assumed = sizes.vocab if named and sizes.vocab is not None else rows
    return Shape(unreadable=unreadable, rows=assumed, dims=sizes.hidden or dims, is_measured=False)


def _row_evidence(rows: int, vocab: int | None, packed: bool) -> tuple[int, str]:
    if packed:
        return 1, f"{rows} table rows (packed)"
    if vocab is None:
        return 2 if rows >= USUAL_ROWS else 1, f"{rows} table rows (no vocabulary size declared)"
    if rows == vocab:
        return 4, f"{rows} table rows = vocab_size"
    if fits_vocabulary(rows, vocab):
        return 3, f"{rows} table rows = vocab_size {vocab} + {rows - vocab}"
    cut_short = fits_vocabulary(vocab, rows)  # still the table, and to be told it has to be found
    return 1 if cut_short else -2, f"{rows} table rows where vocab_size is {vocab}"


def _dim_evidence(dims: int, sizes: Sizes, packed: bool) -> tuple[int, str]:
    if packed:
        return 1, f"{dims} dims (packed)"
    if dims == sizes.hidden:
        return 2 if sizes.hidden_declared else 1, f"{dims} dims = {sizes.hidden_source}"
    if dims in sizes.config:
        return 1, f"{dims} dims = {sizes.config[dims]}"
    if not sizes.hidden_declared:
        return 0, f"{dims} dims (no hidden size declared)"
    return -2, f"{dims} dims where the hidden size is {sizes.hidden}"


def as_output(tensor: TensorInfo, name: Name, chosen: Candidate, sizes: Sizes, stored: StoredTensors) -> Candidate:
    """Score > 0 means: an output head for the same vocabulary as `chosen`."""
    shape = logical_shape(tensor, name, sizes, stored)
    unreadable, rows, dims = shape.unreadable, shape.rows, shape.dims
    strong, weak = STRONG_OUTPUT.match(name.own), WEAK_OUTPUT.match(name.own)
    parents = name.module.lower().split(".")[:-1]
    headed = any(STRONG_OUTPUT.match(p) or p in ("cls", "generator", "mlm", "vocab") for p in parents)
    if rows == dims:
        weak = None  # a square "dense" is a transform before the head; in a tiny model its rows may fit the vocabulary
    words = [f"named …{name.own}.{name.leaf}" if strong or weak else "a table of vocabulary size without a head's name"]
    turned = rows == chosen.dims and rows != chosen.rows and dims in (chosen.rows, sizes.vocab)
    transposed = unreadable is None and turned and (strong is not None or weak is not None)
    if transposed:
        rows, dims = dims, rows
        unreadable = f"stored transposed, [{tensor.shape[0]} dims, {tensor.shape[1]} table rows]"
    same_rows = rows in (chosen.rows, sizes.vocab)
    near_rows = any(fits_vocabulary(max(rows, n), min(rows, n)) for n in (chosen.rows, sizes.vocab) if n)
    same_dims = dims in (chosen.dims, sizes.hidden) or dims in sizes.config
    score = -2
    if rows < MIN_TABLE_ROWS or (WEAK_INPUT.match(name.own) and not name.is_plain):
        score = -10
    elif unreadable is not None and not transposed:
        score = 5 if strong else -2
    elif same_rows and same_dims:
        unnamed = 2 if tensor.name.endswith((".weight", ".kernel")) and rows != dims else -2
        score = 8 if strong else 5 if weak and headed else 4 if weak else unnamed
    elif near_rows and same_dims and (strong or (weak and headed)):
        score = 4
    elif strong and name.own == "lm_head" and same_dims and rows * 100 >= chosen.rows and rows >= 64:
        score = 2  # a reduced or separate output vocabulary
        words.append(f"its own vocabulary beside the input's {chosen.rows} table rows")
    elif same_rows and (strong or (weak and headed)):
        score = 3
    words.append(f"{rows} table rows" + (" as the input table" if rows == chosen.rows else ""))
    words.append(f"{dims} dims" + (" as the input table" if dims == chosen.dims else ""))
    return Candidate(
        tensor=tensor,
        name=name,
        rows=rows,
        dims=dims,
        score=score,
        words=tuple(words),
        unreadable=unreadable,
        rows_measured=shape.is_measured,
    )
