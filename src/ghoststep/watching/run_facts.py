"""What a run is, beside its steps: versions, model, tables, optimizers, and what cannot be seen in it and why."""

from __future__ import annotations

import hashlib
import inspect
import os
import time
import uuid
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import ghoststep
from ghoststep.evidence.steps import OWN_GRADIENTS, RunFacts, TableFacts
from ghoststep.evidence.training import OptimizerGroup
from ghoststep.remedies.clip_gradients import is_sharded
from ghoststep.watching.seams import Table

if TYPE_CHECKING:
    import torch

_VERSIONED = ("torch", "transformers", "accelerate", "trl", "lightning", "peft")


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks, without starting anything."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def run_facts(
    model: torch.nn.Module, names: Sequence[str], tables: Sequence[Table], *, num_sampled: int, detail: str, tokenizer: Any,
    scheduler: Any,
) -> RunFacts:  # fmt: skip
    """Facts that are known when watching starts; optimizers come later (`with_optimizer`)."""
    rank, world = rank_and_world()
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return RunFacts(
        run_id=uuid.uuid4().hex, rank=rank, world_size=world, started_at=time.time(), versions=_versions(),
        model=type(model).__qualname__, num_parameters=sum(p.numel() for p in model.parameters()), num_sampled=num_sampled,
        trainable=tuple(names),
        tables=tuple(
            TableFacts(
                name=t.name, num_rows=t.module.weight.shape[0], num_dims=t.module.weight.shape[1],
                is_trainable=t.module.weight.requires_grad, is_tied=holders.get(id(t.module.weight), 1) > 1,
            )
            for t in tables
        ),
        schedule="" if scheduler is None else type(scheduler).__qualname__,
        parallelism=_parallelism(model), tokenizer=_fingerprint(tokenizer), detail=detail, unseen=_unseen(model, names, tables),
    )  # fmt: skip


def optimizer_groups(optimizers: Sequence[Any]) -> tuple[OptimizerGroup, ...]:
    """The parameter groups of all optimizers, in order."""
    groups = [(o, g) for o in optimizers for g in o.param_groups]
    return tuple(
        OptimizerGroup(
            index=i, optimizer=type(o).__qualname__, lr=float(g.get("lr") or 0.0),
            initial_lr=None if g.get("initial_lr") is None else float(g["initial_lr"]),
            weight_decay=float(g.get("weight_decay") or 0.0), num_tensors=len(g["params"]),
            num_frozen=sum(not p.requires_grad for p in g["params"]),
        )
        for i, (o, g) in enumerate(groups)
    )  # fmt: skip


def argument_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of the model's forward, below wrappers such as DDP or a compiled one."""
    inner: Any = model
    while (below := getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)) is not None:
        inner = below
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in inspect.signature(inner.forward).parameters.values() if p.kind in kinds)
    except (TypeError, ValueError):
        return ()


def _versions() -> dict[str, str]:
    found = {"ghoststep": ghoststep.__version__}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _parallelism(model: torch.nn.Module) -> str:
    kinds = {c.__name__ for m in model.modules() for c in type(m).__mro__}
    if "FullyShardedDataParallel" in kinds:
        return "FSDP1"
    if "FSDPModule" in kinds:
        return "FSDP2"
    if "DistributedDataParallel" in kinds:
        return "DDP"
    return "DTensor" if any(is_sharded(p) for p in model.parameters()) else ""


def _unseen(model: torch.nn.Module, names: Sequence[str], tables: Sequence[Table]) -> dict[str, str]:
    """Quantity → why it cannot be seen in this model, as far as the model itself shows it."""
    import torch

    said: dict[str, str] = {}
    if not tables:
        said["rows"] = "the model has no embedding table that looks up ids"
    elif not any(t.name in set(names) for t in tables):
        said["rows"] = "no embedding table trains"
    if any(isinstance(m, torch.nn.EmbeddingBag) for m in model.modules()):
        said["rows of bags"] = "nn.EmbeddingBag joins its rows before a gradient can be seen"
        if not tables:
            said["tables_norm"] = said["rows of bags"]
    if _parallelism(model) == "FSDP1":
        said["norms"] = "FSDP1 flattens parameters: norms are those of flat shards and their names say little"
    if why := _own_gradients(model):
        said[OWN_GRADIENTS] = why
    compiled = hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules())
    if compiled and tables:
        said["rows"] = "torch.compile: hooks inside a compiled graph do not run, so places in the batch are not seen"
    return said


def _own_gradients(model: torch.nn.Module) -> str:
    """Why ranks under DDP may rightly step with gradients of their own; "" where they may not."""
    for module in model.modules():
        hooks = getattr(module, "_comm_hooks", None)
        if hooks:
            name = getattr(hooks[0][0], "__name__", type(hooks[0][0]).__name__)
            return f"DDP has the communication hook {name}, which may leave each rank gradients of its own"
        if hooks is not None and getattr(module, "parameters_to_ignore", None):
            return "DDP was told to leave parameters out, so that each rank has gradients of its own there"
    return ""


def _fingerprint(tokenizer: Any) -> str:
    """A digest of the vocabulary, or "" where there is none to read."""
    getter = getattr(tokenizer, "get_vocab", None)
    if not callable(getter):
        return ""
    try:
        pairs = sorted(getter().items(), key=lambda p: (p[1], p[0]))
    except Exception:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for token, number in pairs:
        digest.update(f"{number}\0{token}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
