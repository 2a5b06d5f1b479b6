"""Facts about a checkpoint's files: what the config declares and which tensors are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ghoststep.evidence.base import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Evidence):
    """What the config files say. Every key is taken with the place it stood at (`vocab_size_key="text_config.vocab_size"`).

    `tie_word_embeddings` is None when the config does not say (transformers 5 leaves it out of the base config).
    `generation` holds bos/eos/pad ids of generation_config.json. `remote_code` lists `auto_map` classes: never executed.
    `layer_kinds` is one entry a layer where the config lists them ("attention", "mamba", "linear_attention", ...), else ().
    `table_sizes` maps further numbers of table rows that the config declares or implies, in the order of the config, to the key
    that says so ({50304: "padded_vocab_size"}; {50280: "vocab_size 50277 rounded up to pad_vocab_size_multiple 8"}).
    `decoder_start_token_ids` are those of the config itself; generation's stand under "decoder_start".
    `problems` lists values of a wrong type or an impossible size, in words ("FILE: KEY is ..."); each counts as undeclared.
    `raw` is the whole parsed config (plain JSON values) for instruments that need a rarer key.
    """

    file: str
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    vocab_size: int | None = None
    vocab_size_key: str | None = None
    table_sizes: Mapping[int, str] = field(default_factory=dict)
    hidden_size: int | None = None
    num_layers: int | None = None
    tie_word_embeddings: bool | None = None
    tie_key: str | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_ids: tuple[int, ...] = ()
    decoder_start_token_ids: tuple[int, ...] = ()
    generation: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    embedding_multiplier: float | None = None
    embedding_multiplier_key: str | None = None
    quantization: str | None = None
    remote_code: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor. `dtype` is lower case ("bf16", "f32", "q8_0", "nf4-packed"); `num_bytes` are bytes in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensors(Evidence):
    """Every tensor of the checkpoint, by name. `format` names the container ("safetensors", "gguf", ...).

    `base_model` is set for an adapter folder: the model it belongs to, as its config names it.
    """

    format: str
    tensors: Mapping[str, TensorInfo]
    base_model: str | None = None

    @property
    def num_parameters(self) -> int:
        """Elements over all stored tensors (packed quantised tensors count as stored)."""
        total = 0
        for tensor in self.tensors.values():
            count = 1
            for size in tensor.shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A vocabulary-sized table: an input embedding (`role="input"`), an output head ("output") or a further one ("other").

    Rows are tokens: shape [num_rows, num_dims]. `reason` says why this tensor was taken for it. `unreadable` says why its
    values cannot be read exactly (an unknown quantisation), else None. `rows_measured` is False where the storage does not show
    the shape (a packing that is not understood): `num_rows` then only repeats what the config declares, and proves nothing.
    """

    tensor: TensorInfo
    role: str
    num_rows: int
    num_dims: int
    reason: str
    unreadable: str | None = None
    rows_measured: bool = True

    @property
    def unmeasured(self) -> str | None:
        """Why `num_rows` may not be compared with anything, or None where it was measured."""
        if self.rows_measured:
            return None
        why = self.unreadable or "the storage is not understood"
        return f"how many rows {self.tensor.name} has does not follow from its stored shape {list(self.tensor.shape)} ({why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables(Evidence):
    """The tables found in a checkpoint. `output` is None for a tied model, an encoder, or a backbone without its head.

    `others` are further vocabulary-sized tables (per-layer embeddings, a second encoder, a multi-token head).
    """

    input: Table
    output: Table | None
    others: tuple[Table, ...] = ()
    output_reason: str = ""


def fits_vocabulary(rows: int, vocab: int) -> bool:
    """True if a table of `rows` can serve `vocab` tokens: exactly, or with a plausible number of alignment rows."""
    most = vocab + vocab // 20 + min(1024, vocab // 4)
    return vocab <= rows <= most or (vocab <= rows < vocab + 128 and rows % 64 == 0)
