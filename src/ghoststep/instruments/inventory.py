"""Which stored tensors are the vocabulary tables: the input embedding, the output head, and further ones.

There is no list of model names. Each two-dimensional tensor is scored by four kinds of evidence: the words in its name, its
table rows against the declared vocabulary size, its dimensions against the declared hidden size (or, without a config, the
size of the norm weights), and words that speak against it (positions, patches, codecs, layers, classifiers).
The winner's reason repeats its evidence in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, Tables, TensorInfo, fits_vocabulary
from ghoststep.instruments.table_score import (
    INPUT_THRESHOLD,
    MIN_TABLE_ROWS,
    Candidate,
    Sizes,
    as_input,
    as_output,
    known_sizes,
)
from ghoststep.instruments.tensor_names import STRONG_INPUT, STRONG_OUTPUT, WEAK_OUTPUT, Name, layer_of, parse
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint

_TABLE_WORD = re.compile(r"emb|head|output|trainable_tokens", re.IGNORECASE)


@instrument
def stored_tensors(checkpoint: Checkpoint) -> StoredTensors:
    """Names, shapes and dtypes of all stored tensors. Cost: the headers are read once; no values."""
    return checkpoint.stored()


@instrument
def tables(stored: StoredTensors, declared: Declared | Missing) -> Tables:
    """Find the input embedding, the output head and further vocabulary-sized tables.

    Works without a config. Raises `CannotLook` with the nearest candidates when no tensor is convincing. A quantised table is
    named and marked `unreadable`, never decoded by guess. Cost: linear in the number of tensors; no values are read.
    """
    sizes = known_sizes(stored, declared if isinstance(declared, Declared) else None)
    parsed = [(tensor, parse(tensor.name)) for tensor in stored.tensors.values() if _worth_a_look(tensor)]
    inputs = sorted((as_input(t, n, sizes, stored) for t, n in parsed if _may_be_table(t, n)), key=_preference)
    chosen = _chosen(inputs)
    if chosen is None:
        raise CannotLook(_nothing_found(stored, inputs, sizes))
    heads = [as_output(t, n, chosen, sizes, stored) for t, n in parsed if t.name != chosen.tensor.name and _may_be_head(t, n)]
    heads = sorted((h for h in heads if h.score > 0), key=_preference)
    head = next((h for h in heads if h.name.is_plain), None) or _decoder_table(inputs, chosen)
    taken = {chosen.tensor.name, head.tensor.name if head else ""}
    others = _others(inputs, heads, parsed, chosen, taken)
    return Tables(
        input=chosen.table("input"),
        output=head.table("output") if head else None,
        others=others,
        output_reason=head.reason if head else _no_head(parsed, chosen),
    )


def _chosen(inputs: list[Candidate]) -> Candidate | None:
    """The best plain candidate; else one that only a word such as "visual" in the model's own prefix speaks against."""
    plain = next((c for c in inputs if c.score >= INPUT_THRESHOLD and c.name.is_plain), None)
    if plain is not None:
        return plain
    named = (c for c in inputs if c.name.is_plain_apart_from_modality and STRONG_INPUT.match(c.name.own))
    return next((c for c in named if c.score >= INPUT_THRESHOLD - 1), None)


def _decoder_table(inputs: list[Candidate], chosen: Candidate) -> Candidate | None:
    """In an encoder-decoder with a table on each side and no head of its own, the head is the decoder's table."""
    if "encoder" not in chosen.name.module.lower():
        return None
    for c in inputs:
        is_token_table = STRONG_INPUT.match(c.name.own) is not None and c.name.is_plain and c.score >= INPUT_THRESHOLD
        if c is not chosen and is_token_table and re.search(r"(?:^|[._])decoder", c.name.module.lower()):
            return replace(c, words=(*c.words, "the decoder's own input table, which its head is tied to"))
    return None


def _worth_a_look(tensor: TensorInfo) -> bool:
    """Two dimensions, no low-rank update, and outside the numbered layers unless its name speaks of an embedding or a head."""
    if len(tensor.shape) != 2 or "lora_" in tensor.name:
        return False
    return _TABLE_WORD.search(tensor.name) is not None or layer_of(tensor.name) is None


def _may_be_table(tensor: TensorInfo, name: Name) -> bool:
    if len(tensor.shape) != 2 or min(tensor.shape) < 1:
        return False
    return name.leaf in ("weight", "qweight", "weight_packed", "embedding", "kernel") and not name.in_layer


def _may_be_head(tensor: TensorInfo, name: Name) -> bool:
    return _may_be_table(tensor, name) and not STRONG_INPUT.match(name.own)


def _preference(candidate: Candidate) -> tuple[int, int, int, int, str]:
    """Best first: score, then the shared table before those of a decoder, the shallower, the larger, the name."""
    path = candidate.name.module.lower()
    side = 2 if "decoder." in path else 1 if "encoder." in path else 0
    return -candidate.score, side, candidate.name.depth, -candidate.rows, candidate.tensor.name


def _others(
    inputs: Iterable[Candidate],
    heads: Iterable[Candidate],
    parsed: Iterable[tuple[TensorInfo, Name]],
    chosen: Candidate,
    taken: set[str],
) -> tuple[Table, ...]:
    """Further tables: vocabulary-sized or named as embeddings of tokens, and the trained tokens of an adapter."""
    found: dict[str, Table] = {}
    for c in (*heads, *inputs):
        same_rows = fits_vocabulary(max(c.rows, chosen.rows), min(c.rows, chosen.rows))
        named = "emb" in c.name.own or STRONG_OUTPUT.match(c.name.own) or WEAK_OUTPUT.match(c.name.own)
        weight = c.tensor.name.endswith((".weight", ".qweight", ".weight_packed", ".embedding"))
        same_rows = same_rows and weight and bool(named)
        token_table = STRONG_INPUT.match(c.name.own) and not c.name.position and c.rows >= MIN_TABLE_ROWS
        if c.tensor.name in taken or c.tensor.name in found or c.name.position or not (same_rows or token_table):
            continue
        copy = c.rows == chosen.rows and c.dims == chosen.dims and STRONG_INPUT.match(c.name.own) is not None
        found[c.tensor.name] = c.table("other", "same shape as the input table: a stored copy or a second one" if copy else "")
    for tensor, name in parsed:
        deep = (
            name.in_layer
            and ("emb" in name.own or STRONG_OUTPUT.match(name.own))
            and name.leaf == "weight"
            and len(tensor.shape) == 2
        )
        per_layer_table = deep and tensor.shape[0] == chosen.rows and tensor.shape[0] >= 256
        if tensor.name.endswith("trainable_tokens_delta"):
            why = f"{tensor.shape[0]} trained tokens of an adapter, not the whole vocabulary"
        elif per_layer_table:
            why = "vocabulary-sized table inside a numbered layer"
        else:
            continue
        found[tensor.name] = Table(tensor=tensor, role="other", num_rows=tensor.shape[0], num_dims=tensor.shape[1], reason=why)
    return tuple(found.values())


def _no_head(parsed: Iterable[tuple[TensorInfo, Name]], chosen: Candidate) -> str:
    named = [
        f"{t.name} {list(t.shape)}"
        for t, n in parsed
        if len(t.shape) == 2 and not n.in_layer and (n.not_vocabulary or STRONG_OUTPUT.match(n.own)) and not n.modality
    ]
    seen = f"; not vocabulary-sized: {', '.join(named[:3])}" if named else ""
    return f"no stored tensor is an output head for {chosen.rows} table rows{seen}"


def _nothing_found(stored: StoredTensors, inputs: list[Candidate], sizes: Sizes) -> str:
    deltas = [n for n in stored.tensors if n.endswith("trainable_tokens_delta")]
    if stored.base_model is not None:
        held = f" (only {deltas[0]}, the trained tokens)" if deltas else ""
        return (
            f"this adapter for {stored.base_model or 'an unnamed base model'} stores no embedding table{held}: "
            "check the base model, or merge the adapter into it first"
        )
    near = "; ".join(f"{c.tensor.name} {list(c.tensor.shape)} ({c.reason})" for c in inputs[:3])
    if stored.format == "memory":
        return (
            f"names and shapes of {len(stored.tensors)} parameters do not tell which one is the input embedding"
            + (f" (nearest: {near})" if near else "")
            + ": a batch that the loss runs through the model shows where ids are looked up"
        )
    vocab = f"{sizes.vocab} table rows" if sizes.vocab is not None else "an embedding's name or a declared vocabulary size"
    return (
        f"none of {len(stored.tensors)} stored tensors is an input embedding; expected two dimensions and {vocab}. "
        + (f"Nearest: {near}" if near else "No tensor outside the layers has two dimensions.")
        + " Is this a whole language model's checkpoint?"
    )
