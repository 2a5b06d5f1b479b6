"""Whether input embedding and output head are one table: the flag, the stored tensors and their equality together.

What loading does with each case was read in transformers 5.24 (`PreTrainedModel.tie_weights`): a class ties when the flag of its
own config is true; with both tables stored it ties only if they are equal, else it warns and keeps both (older releases
overwrite the head by the input table without a word); a class that names no tied parameters ignores the flag (seen for four of
its recurrent classes, and in six other default configs: the flag is saved as true beside two tables);
a head that is neither tied nor stored starts from random values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, Tables
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments.packing import FLOATS
from ghoststep.instruments.row_blocks import RowDecoder
from ghoststep.instruments.tensor_names import STRONG_INPUT, STRONG_OUTPUT, parse
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ghoststep.subjects.base import RowStore

_HEADED_TASK = re.compile(
    r"(?:CausalLM|LMHeadModel|LMHead|ForConditionalGeneration|DoubleHeadsModel|MaskedLM|ToText\d?|Text2Text|MTModel"
    r"|EncoderDecoderModel|GenerationDecoder)$"
)
_BARE_FIRST = re.compile(
    r"^(?:embeddings?|embed_tokens|wte|word_embeddings|shared|tok_embeddings|token_embd|embed_in|encoder|decoder|0|auto_model)$"
)
_OTHER_HEAD = re.compile(r"\b(?:score|classifier|classification_head|v_head|value_head|reward\w*|qa_outputs)\b")
MODULES_FILE = "modules.json"
_FIRST_BLOCK_BYTES, _BLOCK_BYTES = 1 << 16, 1 << 24
"""The first block is small: two tables that differ usually differ at once, and over a network that is all that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two stored tables differ. `num_rows` is None when counting stopped at the first difference."""

    num_rows: int | None
    first_row: int | None

    @property
    def is_equal(self) -> bool:
        """True if every table row has the same values."""
        return self.first_row is None


@instrument
def tie_state(checkpoint: Checkpoint, stored: StoredTensors, tables: Tables, declared: Declared | Missing) -> TieState:
    """Judge flag × tensors × equality; see `Tie` for the answers. No flag in the config: the tensors decide.

    Where the flag is true and two tables are stored, both are read whole and differing table rows counted; otherwise reading
    stops at the first difference (`num_different_rows` is then None). NaN equals NaN of the same bits. Tables of other dims
    differ in every row. Raises `CannotLook` when the flag is true and the tables cannot be compared (packed, or block types that
    differ). A head that the flag promises is not missed where modules.json pools the backbone's output (sentence-transformers).
    """
    facts = declared if isinstance(declared, Declared) else None
    flag = facts.tie_word_embeddings if facts is not None else None
    place = _flag_words(facts)
    if tables.output is None:
        tie, reason = _without_head(checkpoint, stored, tables, facts, flag, place)
        return TieState(tie=tie, reason=reason, declared=flag)
    if STRONG_INPUT.match(parse(tables.output.tensor.name).own):
        return _with_decoder_table(checkpoint, stored, tables, facts, flag, place)
    return _with_head(checkpoint, tables.input, tables.output, flag, place)


def _flag_words(facts: Declared | None) -> str:
    if facts is None:
        return "no config declares a tie"
    if facts.tie_word_embeddings is None:
        return f"the flags contradict each other ({facts.tie_key})" if facts.tie_key else f"{facts.file} does not declare a tie"
    return f"{facts.file} says {facts.tie_key}={str(facts.tie_word_embeddings).lower()}"


def _without_head(
    checkpoint: Checkpoint, stored: StoredTensors, tables: Tables, facts: Declared | None, flag: bool | None, place: str
) -> tuple[Tie, str]:
    one = f"one table is stored ({tables.input.tensor.name})"
    heads = [t.tensor.name for t in tables.others if _is_head(t)]
    if heads:
        names = ", ".join(heads[:3])
        return Tie.UNTIED, f"{place}; no single output head was singled out, but head tables are stored apart ({names})"
    if stored.base_model is not None:
        return Tie.NO_HEAD, f"{one}; an adapter stores only what it trained, the head is the base model's"
    if stored.format == "gguf":
        return Tie.TIED, f"{one}; without output.weight a GGUF loader uses {tables.input.tensor.name} as the head"
    has_head, why = _wants_head(stored, tables, facts)
    if not has_head:
        return Tie.NO_HEAD, f"{one}; {why}"
    if _pools_its_backbone(checkpoint):
        return (
            Tie.NO_HEAD,
            f"{one}; {MODULES_FILE} pools the backbone's output into embeddings: no head is used, whatever {why}",
        )
    if flag is False:
        return Tie.BROKEN_HEAD_MISSING, f"{place}, but {one}; {why}: loading starts the head from random values"
    if flag is True:
        return Tie.TIED, f"{place} and {one}"
    return (
        Tie.TIED,
        f"undeclared, decided by the tensors: {place} and {one}; {why}; loading ties unless its class defaults to false",
    )


def _pools_its_backbone(checkpoint: Checkpoint) -> bool:
    """True if the file that lists a sentence-transformers pipeline has its pooling step, which takes hidden states.

    A sparse encoder's own pooling takes the logits of a masked-LM head and has another name. Anything unexpected is no proof.
    """
    try:
        modules = json.loads(checkpoint.read_bytes(MODULES_FILE, limit_bytes=1 << 20) or b"[]")
    except (CannotLook, ValueError, RecursionError):
        return False
    kinds = [m.get("type") for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
    return any(isinstance(kind, str) and kind.rpartition(".")[2] == "Pooling" for kind in kinds)


def _is_head(table: Table) -> bool:
    name = parse(table.tensor.name)
    return STRONG_OUTPUT.match(name.own) is not None and not (name.modality or name.draft or name.in_layer)


def _wants_head(stored: StoredTensors, tables: Tables, facts: Declared | None) -> tuple[bool, str]:
    """Whether the model that these names belong to has a head over the vocabulary, by its task or the names' prefix."""
    first = parse(tables.input.tensor.name).module.split(".")[0]
    bias = _head_bias(stored, tables.input.num_rows)
    if bias is not None:
        return True, f"{bias} is the bias of a head over the vocabulary"
    if facts is not None and facts.architectures:
        task = facts.architectures[0]
        if not _HEADED_TASK.search(task):
            return False, f"architectures names {task}, a model without an output head over the vocabulary"
        if _BARE_FIRST.match(first.lower()) and first not in ("shared", "decoder", "encoder"):
            return False, f"the names have no prefix ({tables.input.tensor.name}): a backbone saved without its head"
        return True, f"architectures names {task}"
    if _OTHER_HEAD.search(tables.output_reason):
        return False, f"another head is stored ({tables.output_reason})"
    if _BARE_FIRST.match(first.lower()):
        return False, f"the names have no prefix ({tables.input.tensor.name}): a backbone without its head"
    return True, f"the names carry the prefix {first!r} that a model with a head gives its backbone"


def _head_bias(stored: StoredTensors, num_rows: int) -> str | None:
    """A vocabulary-sized bias outside the layers: only an output head has one, whatever the class is called."""
    for tensor in stored.tensors.values():
        flat = tensor.shape in ((num_rows,), (1, num_rows))
        if flat and tensor.name.endswith("bias") and not parse(tensor.name).in_layer:
            return tensor.name
    return None


def _with_decoder_table(
    checkpoint: Checkpoint, stored: StoredTensors, tables: Tables, facts: Declared | None, flag: bool | None, place: str
) -> TieState:
    """An encoder-decoder with a table on each side and no head: the head is the decoder's table, unless the flag is false."""
    assert tables.output is not None
    tie, reason = _without_head(checkpoint, stored, tables, facts, flag, place)
    if tie is not Tie.TIED:
        return TieState(tie=tie, reason=reason, declared=flag)
    first, second = tables.input.tensor.name, tables.output.tensor.name
    words = f"{place}; no head is stored: it is the decoder's own table ({second})"
    if _obstacle(tables.input, tables.output) is None and tables.input.num_dims == tables.output.num_dims:
        difference = compare(checkpoint.rows(first), checkpoint.rows(second), count_all=False)
        if difference.is_equal:
            reason = f"{words}, which holds the same values as {first}: one table stored twice"
            return TieState(tie=Tie.TIED, reason=reason, declared=flag, num_different_rows=0)
    return TieState(tie=Tie.UNTIED, reason=f"{words}, which is not the encoder's ({first})", declared=flag)


def _with_head(checkpoint: Checkpoint, first: Table, head: Table, flag: bool | None, place: str) -> TieState:
    two = f"two tables are stored ({first.tensor.name}, {head.tensor.name})"
    obstacle = _obstacle(first, head)
    if obstacle is None and flag is True and first.num_dims != head.num_dims:
        how = f"they cannot be one table, with {first.num_dims} and {head.num_dims} dims"
        different = max(first.num_rows, head.num_rows)
        return TieState(
            tie=Tie.BROKEN_FLAG_TRUE,
            reason=f"{place}; {two}; {how}",
            declared=flag,
            num_different_rows=different,
            first_different_row=0,
        )
    if obstacle is None and first.num_dims != head.num_dims:
        obstacle = f"{first.num_dims} and {head.num_dims} dims"
    if obstacle is None and flag is not True and first.num_rows != head.num_rows:
        obstacle = f"{first.num_rows} and {head.num_rows} table rows"
    if obstacle is not None:
        if flag is True:
            raise CannotLook(f"{place} and {two}, but they cannot be compared: {obstacle}")
        return TieState(tie=Tie.UNTIED, reason=f"{place}; {two}; not compared: {obstacle}", declared=flag)
    difference = compare(checkpoint.rows(first.tensor.name), checkpoint.rows(head.tensor.name), count_all=flag is True)
    tie, how = _judged(flag, difference, first, head)
    undeclared = "undeclared, decided by the tensors: " if flag is None else ""
    return TieState(
        tie=tie,
        reason=f"{undeclared}{place}; {two}; {how}",
        declared=flag,
        num_different_rows=difference.num_rows,
        first_different_row=difference.first_row,
    )


def _judged(flag: bool | None, difference: Difference, first: Table, head: Table) -> tuple[Tie, str]:
    dtypes = "" if first.tensor.dtype == head.tensor.dtype else f" as {first.tensor.dtype} and {head.tensor.dtype}"
    if difference.is_equal:
        if flag is False:
            return Tie.UNTIED, f"both hold equal values{dtypes}: a head that was copied from the input and not trained since"
        return Tie.TIED, f"both hold equal values{dtypes}: one table stored twice"
    if flag is not True:
        return Tie.UNTIED, f"they differ from table row {difference.first_row} on{dtypes}"
    size = "" if first.num_rows == head.num_rows else f" ({first.num_rows} and {head.num_rows} table rows)"
    return Tie.BROKEN_FLAG_TRUE, f"{difference.num_rows} table rows differ{size}{dtypes}, the first is {difference.first_row}"


def _obstacle(first: Table, head: Table) -> str | None:
    for table in (first, head):
        if table.unreadable is not None:
            return f"{table.tensor.name}: {table.unreadable}"
    dtypes = {first.tensor.dtype, head.tensor.dtype}
    if len(dtypes) > 1 and not dtypes <= FLOATS:
        return f"stored as {first.tensor.dtype} and {head.tensor.dtype}, each rounded in its own way"
    return None


def compare(first: RowStore, head: RowStore, *, count_all: bool) -> Difference:
    """Compare two tables [R, D] row by row. Rows that only one of them has count as different.

    One storage type: bytes against bytes. Two float types: both rounded to the one with fewer mantissa bits, so that a copy
    saved in another precision is still a copy. Raises `CannotLook` for two types of which one is a GGUF block type. Cost: both
    tables read once, in blocks of 16 MB; without `count_all` only up to the first difference.
    """
    same_type = first.info.dtype == head.info.dtype and first.row_bytes == head.row_bytes
    decoders = None if same_type else _decoders(first, head)
    common, at, found, first_row = min(first.num_rows, head.num_rows), 0, 0, None
    widest = max(first.row_bytes, head.row_bytes, 1)
    while at < common:
        stop = min(common, at + max(1, (_FIRST_BLOCK_BYTES if at == 0 else _BLOCK_BYTES) // widest))
        different_R = _different(first.raw_rows(at, stop), head.raw_rows(at, stop), decoders)
        if different_R.any():
            first_row = at + int(different_R.argmax()) if first_row is None else first_row
            found += int(different_R.sum())
            if not count_all:
                return Difference(num_rows=None, first_row=first_row)
        at = stop
    extra = max(first.num_rows, head.num_rows) - common
    if extra and first_row is None:
        first_row = common
    return Difference(num_rows=found + extra, first_row=first_row)


def _decoders(first: RowStore, head: RowStore) -> tuple[RowDecoder, RowDecoder]:
    pair = RowDecoder(first), RowDecoder(head)
    if any(decoder.format is None for decoder in pair):
        raise CannotLook(
            f"{first.info.name} is stored as {first.info.dtype} and {head.info.name} as {head.info.dtype}: rounded differently, "
            "they cannot be compared"
        )
    return pair


def _different(
    first_RB: NDArray[np.uint8], head_RB: NDArray[np.uint8], decoders: tuple[RowDecoder, RowDecoder] | None
) -> NDArray[np.bool_]:
    """bool [R]: the table rows that differ."""
    if decoders is None:
        bytes_R: NDArray[np.bool_] = (first_RB != head_RB).any(axis=1)
        return bytes_R
    import torch

    one, two = decoders
    assert one.format is not None
    assert two.format is not None
    narrow = min((one.format, two.format), key=lambda form: form.mantissa_bits)
    dtype = getattr(torch, narrow.torch_name)
    left = one.widen(first_RB, one.buffer() if len(first_RB) <= one.rows_per_block else None).to(dtype)
    right = two.widen(head_RB, two.buffer() if len(head_RB) <= two.rows_per_block else None).to(dtype)
    values_R: NDArray[np.bool_] = ((left.float() != right.float()) & ~(left.isnan() & right.isnan())).any(dim=1).numpy()
    return values_R
