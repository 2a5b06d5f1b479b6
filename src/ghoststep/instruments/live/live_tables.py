"""The vocabulary tables of a model in memory, as evidence that the checks on checkpoints read too.

Which module is the table is measured (`LiveCall`): the one that looks the batch's token ids up, and the one that turns hidden
states into one number a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, StoredTensors, Table, Tables, TensorInfo
from ghoststep.evidence.plan import TrainingKind, TrainingPlan
from ghoststep.evidence.rows import InputRows, OutputRows
from ghoststep.instruments.declared import from_config
from ghoststep.instruments.live.calling import LiveCall, unwrap
from ghoststep.instruments.live.table_signal import head_of
from ghoststep.instruments.live.untouched import need_made
from ghoststep.instruments.tables import measure_rows
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2",
}  # fmt: skip
CONFIG = "model.config"


class MemoryRows:
    """A `RowStore` over a parameter: rows are copied to the CPU block by block."""

    def __init__(self, info: TensorInfo, weight: torch.Tensor) -> None:
        self.info, self._weight = info, weight.detach()
        self.num_rows, self.num_dims = info.shape
        self.row_bytes = self.num_dims * weight.element_size()

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop): uint8 [stop - start, row_bytes]."""
        import torch

        block = self._weight[start:stop].cpu().contiguous()
        raw: NDArray[np.uint8] = block.view(torch.uint8).numpy().reshape(stop - start, self.row_bytes)
        return raw


def base_model(setup: Setup) -> Any:
    """The model inside compile, DDP and PEFT wrappers."""
    core, _ = unwrap(setup.model)
    inner = getattr(core, "get_base_model", None)
    return inner() if callable(inner) else core


@instrument
def live_declared(setup: Setup) -> Declared:
    """What `model.config` and `model.generation_config` say. `DoesNotApply` for a module without a config."""
    model = base_model(setup)
    config = _as_mapping(getattr(model, "config", None))
    if not config:
        raise DoesNotApply("the model carries no config: nothing is declared")
    tie = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    if "tie_word_embeddings" not in config and isinstance(tie, bool):
        config = {**config, "tie_word_embeddings": tie}  # a class default that to_dict leaves out counts in memory all the same
    if not config.get("architectures"):
        config = {**config, "architectures": [type(model).__name__]}
    return from_config(config, file=CONFIG, generation=_as_mapping(getattr(model, "generation_config", None)))


def _as_mapping(config: Any) -> dict[str, object]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return dict(config) if isinstance(config, Mapping) else {}


def tensor_info(name: str, weight: torch.Tensor, setup: Setup) -> TensorInfo:
    """A parameter described as a stored tensor would be; the setup's name stands for the file."""
    dtype = str(weight.dtype).removeprefix("torch.")
    size = weight.numel() * weight.element_size()
    return TensorInfo(name=name, shape=tuple(weight.shape), dtype=_DTYPES.get(dtype, dtype), file=setup.name, num_bytes=size)


@instrument
def live_stored_tensors(setup: Setup) -> StoredTensors:
    """Names, shapes and dtypes of the parameters and saved buffers; a shared one is listed once."""
    need_made(setup.model)
    core, _ = unwrap(setup.model)
    named: dict[str, torch.Tensor] = dict(core.named_parameters())
    kept = set(core.state_dict(keep_vars=True))
    named.update((n, b) for n, b in core.named_buffers() if n in kept)
    return StoredTensors(format="memory", tensors={n: tensor_info(n, t, setup) for n, t in named.items()})


@instrument
def live_tables(setup: Setup, call: LiveCall | Missing) -> Tables:
    """Input embedding and output head as the loss used them; a head that shares the input's storage is no second table.

    Where the loss never called an embedding or a head, the model's own `get_input_embeddings` / `get_output_embeddings` say.
    """
    (name_in, first), how = input_weight(setup, call)
    table = _table(setup, name_in, first, "input", how)
    head, how_out = output_weight(setup, call)
    if head is None:
        return Tables(input=table, output=None, output_reason=how_out)
    if shares_storage(head[1], first):
        return Tables(input=table, output=None, output_reason=f"{head[0]} is the input table itself")
    return Tables(input=table, output=_table(setup, *head, "output", how_out), output_reason=how_out)


def _table(setup: Setup, name: str, weight: torch.Tensor, role: str, reason: str) -> Table:
    info = tensor_info(name, weight, setup)
    unreadable = None
    if info.dtype not in _DTYPES.values():
        unreadable = f"held as {info.dtype} (quantised or sharded): its rows cannot be read as numbers"
    elif weight.is_meta or type(weight.data).__name__ == "DTensor":
        unreadable = "on the meta device or sharded: its rows are not here"
    return Table(tensor=info, role=role, num_rows=info.shape[0], num_dims=info.shape[1], reason=reason, unreadable=unreadable)


def input_weight(setup: Setup, call: LiveCall | Missing) -> tuple[tuple[str, torch.Tensor], str]:
    """Name and weight of the input table, and how it was found; `CannotLook` if nothing looks tokens up."""
    module = None if isinstance(call, Missing) else call.embedding
    found = _named_weight(setup, module)
    if found is not None:
        return found, "it looks the batch's token ids up"
    found = _named_weight(setup, _ask(base_model(setup), "get_input_embeddings"))
    if found is None:
        why = call.reason if isinstance(call, Missing) else "no module looks token ids up in a table"
        raise CannotLook(f"no input embedding found: {why}")
    return found, "get_input_embeddings() names it"


def output_weight(setup: Setup, call: LiveCall | Missing) -> tuple[tuple[str, torch.Tensor] | None, str]:
    """Name and weight of the head [V, D], or None, and why."""
    found = None if isinstance(call, Missing) else _named_weight(setup, head_of(call))
    if found is not None:
        return found, "the loss calls it as its last projection to the classes"
    found = _named_weight(setup, _ask(base_model(setup), "get_output_embeddings"))
    if found is not None:
        return found, "get_output_embeddings() names it"
    return None, "the loss calls no projection to the vocabulary"


def _ask(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)() if hasattr(model, method) else None
    except (NotImplementedError, AttributeError):
        return None


def _named_weight(setup: Setup, module: Any) -> tuple[str, torch.Tensor] | None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    core, _ = unwrap(setup.model)
    modules = {id(m): n for n, m in core.named_modules()}
    if id(module) in modules:
        return f"{modules[id(module)]}.weight".lstrip("."), weight
    name = next((n for n, p in core.named_parameters(remove_duplicate=False) if p is weight), None)
    return None if name is None else (name, weight)


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both begin at the same place of one storage: writing to one writes to the other."""
    if one is other:
        return True
    if one.is_meta or other.is_meta:
        return False
    return one.data_ptr() == other.data_ptr() != 0 and one.device == other.device


def _by_name(setup: Setup, name: str) -> torch.Tensor:
    core, _ = unwrap(setup.model)
    named: dict[str, torch.Tensor] = {**dict(core.named_buffers()), **dict(core.named_parameters(remove_duplicate=False))}
    found = named.get(name)
    if found is None:
        raise CannotLook(f"the model has no parameter {name}")
    return found


@instrument
def live_input_rows(setup: Setup, tables: Tables, declared: Declared | Missing) -> InputRows:
    """Rows of the input table as they are in memory; see `measure_rows`. Copies a block at a time."""
    rows = measure_rows(MemoryRows(tables.input.tensor, _by_name(setup, tables.input.tensor.name)), tables.input)
    multiplier = None if isinstance(declared, Missing) else declared.embedding_multiplier
    return InputRows(rows=rows, multiplier=1.0 if multiplier is None else multiplier)


@instrument
def live_output_rows(setup: Setup, call: LiveCall | Missing, tables: Tables, input_rows: InputRows | Missing) -> OutputRows:
    """Rows of the head, or the input rows where it is the same table; `DoesNotApply` without a head."""
    if tables.output is not None:
        store = MemoryRows(tables.output.tensor, _by_name(setup, tables.output.tensor.name))
        return OutputRows(rows=measure_rows(store, tables.output), tied=False)
    head, reason = output_weight(setup, call)
    if head is None:
        raise DoesNotApply(reason)
    if isinstance(input_rows, Missing):
        raise CannotLook(f"the output head is the input table, and that could not be measured: {input_rows.reason}")
    return OutputRows(rows=input_rows.rows, tied=True)


@instrument
def live_plan(setup: Setup, tables: Tables) -> TrainingPlan:
    """Which training this setup is: RL by its intent, frozen embeddings where nothing of the input table is trained.

    Parameters inside the embedding's own module count (PEFT's trained tokens and embedding adapters).
    """
    core, _ = unwrap(setup.model)
    module = tables.input.tensor.name.rpartition(".")[0].replace(".base_layer", "").replace(".original_module", "")
    trained = any(p.requires_grad for n, p in core.named_parameters(remove_duplicate=False) if n.startswith(f"{module}."))
    if not trained:
        return TrainingPlan(training=TrainingKind.FROZEN_EMBEDDINGS)
    return TrainingPlan(training=TrainingKind.RL if setup.intent == "rl" else TrainingKind.FULL)
