"""One step being put together, from its first backward to the optimizer's step; everything stays on the device."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.watching.before import Before
from ghoststep.watching.kept import Kept
from ghoststep.watching.measure import NUM_PLACES, TensorNorms, WeightSample, row_norms, wide
from ghoststep.watching.ring import PLACE_COLUMNS, WIDTH, HostFacts, Ring
from ghoststep.watching.seams import Lookup, Table

if TYPE_CHECKING:
    import torch

MAX_LOOKUPS = 32
"""Lookups without a backward that are kept: forwards whose loss is never used are forgotten."""

MAX_AFTER = 512
"""Tensors whose gradients are measured after clipping; of larger models a part, and the factor found there is carried over."""

MAX_NODES = 20_000
"""Nodes of an autograd graph that are counted at most."""


class StepBuilder:
    """Collects what the seams see. One instance a watch; methods are called in the order in which training runs."""

    def __init__(
        self, norms: TensorNorms, sample: WeightSample, tables: list[Table], ring: Ring, *, first_number: int = 1,
    ) -> None:  # fmt: skip
        self.norms, self.sample, self.tables, self.ring = norms, sample, tables, ring
        self.number = first_number
        self.lookups: list[Lookup] = []
        self.index_of = {id(p): i for i, p in enumerate(norms.parameters)}
        places = [i for t in tables if (i := self.index_of.get(id(t.module.weight))) is not None]
        norms.sampled = _spread(len(norms.parameters), places)
        self._chosen: tuple[list[int], list[int]] = ([], [])
        self.early, self.kept = Before(norms), Kept(norms)
        self._ended_at: float | None = None
        self._num_nodes: int | None = None
        self._num_dropped = 0
        self._is_shared = False  # another model's optimizer has stepped since our last backward
        self._reset()

    def _reset(self) -> None:
        self.early.reset()
        self.before: torch.Tensor | None = None
        self.after: torch.Tensor | None = None
        self.places: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self.moved: torch.Tensor | None = None
        self.has_kept: torch.Tensor | None = None
        self.has_stepped = False
        self.stepped_by: list[Any] = []
        self.host = HostFacts(number=self.number, ended_at=0.0, seconds=None)

    @property
    def is_open(self) -> bool:
        """True between the first backward of a step and its end."""
        return self.host.num_micro_batches > 0

    def lookup(self, lookup: Lookup) -> None:
        """An embedding looked ids up in a forward that records a graph."""
        self.lookups.append(lookup)
        del self.lookups[:-MAX_LOOKUPS]

    def abandon(self) -> None:
        """Forget the step that is being put together: it belongs to a state that is no more."""
        self.lookups.clear()
        self.kept.forget()
        if self.sample.stuck is not None:
            self.sample.stuck.restart()
        self._num_dropped = 0
        self._reset()

    def begin_backward(self, tensors: Any) -> HostFacts | None:
        """Before a backward, perhaps another model's: a finished step of ours ends here at the latest, and is returned."""
        ended = self.close() if self.has_stepped else None
        if not self.early.begin_backward():
            # Gradients that nothing used and that are gone: what was seen of them is no part of the next step.
            self._num_dropped += 0 if self._is_shared else self.host.num_micro_batches
            self._reset()
        self.kept.began(self.early.seen)
        self._num_nodes = _count_nodes(_tensors(tensors)) if self.number <= 5 or self.number % 50 == 0 else None
        return ended

    def stepped_elsewhere(self) -> None:
        """An optimizer of other parameters has stepped: what our last backward left here may have been for that one (a generator's
        through the discriminator)."""
        self._is_shared = True

    def end_backward(self, tensors: Any) -> bool:
        """After a backward; False if it was not one of this model."""
        mine = [x for x in self.lookups if x.places is not None]
        is_ours = self.early.end_backward()
        self.kept.ended(self.early.seen)
        if not is_ours and not mine:
            return False
        self._is_shared = False
        if not self.is_open:
            self.sample.keep()
        micro = self.host.num_micro_batches
        self.host.num_micro_batches += 1
        self.lookups.clear()
        for one in mine:
            self.host.num_tokens += one.ids.numel()
            self._merge(one, micro)
        if self._num_nodes is not None:
            self.host.num_graph_nodes = max(self.host.num_graph_nodes or 0, self._num_nodes)
        for t in _tensors(tensors):
            if t.numel() == 1 and not t.is_complex():
                value = t.detach().reshape(()).to(self.ring.device, wide(self.ring.device))
                self.loss = value if self.loss is None else self.loss + value
                self.host.num_losses += 1
        return True

    def _merge(self, lookup: Lookup, micro: int) -> None:
        """Keep the largest places of everything seen in this step: [K, columns] in the order of `PLACE_COLUMNS`."""
        import torch

        assert lookup.places is not None
        found = lookup.places.to(self.ring.device)
        # Filled on the device: a tensor of a list is a copy from the host, which waits for the device.
        more = [found.new_full((len(found), 1), value) for value in (-1.0, micro, lookup.table, lookup.width)]
        placed = torch.cat([found, *more], dim=1)
        if self.places is not None:
            placed = torch.cat([self.places, placed])
            if len(placed) > NUM_PLACES:
                placed = placed.index_select(0, placed[:, 0].topk(NUM_PLACES).indices)
        self.places = placed

    def optimizer_stepped(self, optimizer: Any, indices: list[int]) -> HostFacts | None:
        """After an optimizer's step; several optimizers that follow one backward belong to one step. Returns the step before if it
        ended here."""
        import torch

        # The same one again, without a backward in between, ends a step.
        ended = self.close() if any(o is optimizer for o in self.stepped_by) else None
        self.stepped_by.append(optimizer)
        self.has_stepped = True
        is_whole = len(self.norms.sampled) == len(self.norms.parameters)
        if self._chosen[0] is not indices:
            self._chosen = indices, indices if is_whole else sorted({*indices} & {*self.norms.sampled})
        after, versions = self.norms.of(self._chosen[1]), self.norms.versions()
        if len(self.stepped_by) == 1:
            self.before = self.early.at_step(
                after if is_whole and len(indices) == len(self.norms.parameters) else None, versions
            )
        self._look_at_kept(optimizer, after, versions)
        if not is_whole:
            self.host.carried += tuple(indices)
        if after is not None and self.after is not None:
            after = torch.where((after >= 0) | after.isnan(), after, self.after)
        self.after = after if after is not None else self.after
        # LBFGS moves before the backward that is its last, and ends by itself where it no longer would: not what a still step is.
        moved = None if isinstance(optimizer, torch.optim.LBFGS) else self.sample.moved()
        if moved is not None:
            self.moved = moved if self.moved is None else torch.hypot(moved, self.moved)
            if self.sample.stuck is not None:
                self.sample.stuck.stepped(optimizer, {id(self.norms.parameters[i]) for i in indices})
        self.host.lrs += tuple(_number(g.get("lr")) for g in optimizer.param_groups)
        self._read_rows()
        self._end_time()
        return ended

    def _look_at_kept(self, optimizer: Any, after: torch.Tensor | None, versions: list[tuple[int, int]]) -> None:
        """Whether this optimizer's gradients were cleared since its last step."""
        import torch

        chosen = self._chosen[1]
        is_whole = len(self.norms.sampled) == len(self.norms.parameters)
        places = chosen if is_whole else [bisect_left(self.norms.sampled, i) for i in chosen]
        found = self.kept.stepped(optimizer, places, after, versions)
        if isinstance(found, torch.Tensor):
            self.has_kept = found if self.has_kept is None else found | self.has_kept
        elif found is False:
            self.host.has_cleared = True

    def _read_rows(self) -> None:
        """Norms of the kept places' table rows as they are now."""
        import torch

        if self.places is None:
            return
        norm, table = self.places[:, 0], self.places[:, 6]
        found = torch.full_like(norm, -1.0)
        for index, one in enumerate(self.tables):
            weight = one.readable()
            if weight is not None:
                ids = self.places[:, 1].long()
                found = torch.where(table == index, row_norms(weight, ids, norm.dtype, like=norm), found)
        self.places = torch.cat([self.places[:, :4], found[:, None], self.places[:, 5:]], dim=1)

    def clip_engaged(self, action: str, bound: float) -> None:
        """ghoststep's clip did something; in another model's step if none of ours is open."""
        if self.is_open and not self.has_stepped:
            self.host.clip_action, self.host.clip_bound = action, bound

    def scaled(self, scale: torch.Tensor | None) -> None:
        """A scaler is about to step: gradients carry this scale until it, or the loop, takes it off."""
        self.scale = scale
        if scale is not None:  # a scaler that is switched off has none
            self.early.keeps_measuring()

    def clipped(self, parameters: Any, max_norm: float) -> None:
        """torch clips these parameters; a clip of others is none of ours."""
        if not parameters or any(id(p) in self.index_of for p in parameters):
            self.host.clip_bound = max_norm

    def skipped(self, *, by_policy: bool = False) -> None:
        """The scaler, or a policy of ours, did not let the optimizer step."""
        self.host.was_skipped, self.host.by_policy = True, by_policy
        self.before = self.early.now()
        self.after = self.norms.of() if by_policy else None  # the optimizer was kept from these
        self.kept.skipped(self.norms.versions())
        self.has_stepped = True
        self._read_rows()
        self._end_time()

    def _end_time(self) -> None:
        now = time.time()
        self.host.ended_at = now
        self.host.seconds = None if self._ended_at is None else now - self._ended_at

    def close(self) -> HostFacts | None:
        """Put the finished step into the ring; None if there is none (a backward without a step stays open)."""
        import torch

        if not self.has_stepped:
            return None
        kind = wide(self.ring.device)
        counted = self.sample.stuck
        stuck = None if counted is None else counted.end_step(is_taken=bool(self.stepped_by))
        scalars = [self.loss, self.scale, self.found_inf, self.moved, self.has_kept, stuck]
        empty = torch.full((), math.nan, dtype=kind, device=self.ring.device)
        parts = [torch.stack([empty if s is None else s.to(empty.device, kind).reshape(()) for s in scalars])]
        if self.places is not None:
            parts.append(self.places.reshape(-1))
        missing = WIDTH - sum(len(p) for p in parts)
        if missing:
            parts.append(torch.full((missing,), -1.0, dtype=kind, device=self.ring.device))
        if self.ring.is_full:
            raise RuntimeError("the ring is full: it was not flushed")
        facts = self.host
        facts.num_dropped, self._num_dropped = self._num_dropped, 0
        self.ring.put(facts, self.before, self.after, torch.cat(parts))
        self._ended_at = facts.ended_at
        self.number += 1
        self._reset()
        return facts


def _spread(count: int, always: Sequence[int]) -> Sequence[int]:
    """Which tensors are measured after clipping: all of a few hundred, else as many spread over the model, and the tables."""
    if count <= MAX_AFTER:
        return range(count)
    return sorted({*range(0, count, -(-count // MAX_AFTER)), *always})


assert len(PLACE_COLUMNS) == 8  # `_merge` and `_read_rows` know the columns by number


def _tensors(given: Any) -> list[torch.Tensor]:
    import torch

    return [t for t in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(t, torch.Tensor)]


def _number(value: Any) -> float:
    """A learning rate without waiting for a device: NaN for a tensor on one."""
    import torch

    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else math.nan
    return float(value) if value is not None else math.nan


def _count_nodes(tensors: list[torch.Tensor]) -> int:
    """Nodes of the autograd graph behind these tensors, at most `MAX_NODES`."""
    seen: set[Any] = set()
    left = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while left and len(seen) < MAX_NODES:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left.extend(n for n, _ in node.next_functions if n is not None and n not in seen)
    return len(seen)
