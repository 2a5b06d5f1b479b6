"""Running a model to find its gates, and to measure what one near-zero row's gradient becomes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.engine import Case
from ghoststep.errors import CannotLook, UsageError
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.amplification import sweep
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager
from ghoststep.instruments.live.live_tables import input_weight
from ghoststep.instruments.live.untouched import untouched
from ghoststep.registry import load
from ghoststep.remedies.gate_floor_find import Site, find_gates
from ghoststep.subjects.setup import Setup, make_setup

if TYPE_CHECKING:
    import torch

ROW_NORM = 1e-30
"""Norm of the row that is fed."""

LENGTHS = (16, 64, 256)
"""Tokens a sequence, tried in this order: chunked scans may want a multiple of their chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """L2 norm of the gradient of one row of norm 1e-30, without and with the floor. place: "first position" or "middle"."""

    place: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model that runs on a batch. core: without wrappers."""

    setup: Setup
    call: LiveCall
    facts: BatchFacts | Missing

    @property
    def core(self) -> torch.nn.Module:
        return self.call.core


def open_probe(model: torch.nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> Probe:
    """Run the model once, on the batch given or on random tokens. `UsageError` if it does not run on either."""
    reason = ""
    for length in LENGTHS if batch is None else (0,):
        given = _random_batch(model, length) if batch is None else batch
        setup = make_setup({"model": model, "batch": given, "loss_fn": loss_fn})
        case = Case([setup], load().instruments)
        call, facts = case.fact(LiveCall), case.fact(BatchFacts)
        if isinstance(call, LiveCall) and isinstance(facts, (BatchFacts, Missing)):
            return Probe(setup=setup, call=call, facts=facts)
        reason = reason or str(getattr(call, "reason", ""))
    what = "on random tokens (input_ids and labels)" if batch is None else "on the batch given"
    raise UsageError(f"the model does not run {what}: {reason}; give batch= and loss_fn= as for ghoststep.check")


def _random_batch(model: torch.nn.Module, length: int) -> dict[str, Any]:
    """Two sequences of ordinary tokens. Special tokens tend to have small ids: they are left out where there is room."""
    import torch

    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    own = getattr(model, "get_input_embeddings", None)
    try:
        table = own() if callable(own) else max(tables, key=lambda t: t.num_embeddings, default=None)
    except NotImplementedError:
        table = max(tables, key=lambda t: t.num_embeddings, default=None)
    weight = getattr(table, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UsageError("the model has no table of input tokens to draw from; give batch= and loss_fn= as for ghoststep.check")
    rows = int(weight.shape[0])
    ids = torch.randint(min(10, rows // 4), rows, (2, length), generator=torch.Generator().manual_seed(0)).to(weight.device)
    core = getattr(model, "module", model)
    named = inspect.signature(core.forward).parameters
    has_cache = "use_cache" in named or (hasattr(getattr(core, "config", None), "use_cache") and "kwargs" in named)
    return {"input_ids": ids, "labels": ids.clone(), **({"use_cache": False} if has_cache else {})}


def find_in(probe: Probe) -> list[Site]:
    """The model's gates, in training mode. Nothing is changed."""
    setup = probe.setup
    width = probe.call.ids[0].shape[-1] if probe.call.ids else 0
    try:
        with untouched(setup), eager():
            setup.model.train()
            return find_gates(probe.core, lambda: _run(setup), width)
    except CannotLook as error:
        raise UsageError(
            f"the model does not run in training mode: {error}; give batch= and loss_fn= as for ghoststep.check"
        ) from error


def _run(setup: Setup) -> Any:
    return compute_loss(setup, setup.batches[0])


def amplified(probe: Probe) -> dict[str, float]:
    """The gradient norm of one row of norm 1e-30, at each place. `CannotLook` where it cannot be measured. Nothing is changed."""
    import torch

    if isinstance(probe.facts, Missing):
        raise CannotLook(probe.facts.reason)
    (_, table), _ = input_weight(probe.setup, probe.call)
    median = float(table.detach().float().norm(dim=1).median())
    smallest = math.sqrt(table.shape[1]) * torch.finfo(table.dtype).tiny  # float16 holds nothing below 6e-5 exactly
    if not median > 0:
        raise CannotLook("the median row of the input table is zero")
    with untouched(probe.setup):
        probe.setup.model.train()
        norms = (max(ROW_NORM, smallest) / median,)
        try:
            found = sweep(probe.setup, probe.call, probe.facts, norms=norms, places=("first position", "middle"))
        except RuntimeError as error:  # reentrant checkpointing, a kernel without a backward
            raise CannotLook(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return {place.name: place.readings[0].gradient for place in found.places}
