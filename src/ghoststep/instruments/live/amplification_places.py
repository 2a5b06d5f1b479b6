"""Where in the batch a row is fed, so that its gradient tells something. B examples, T positions, D dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, PACKED
from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.outputs import vectors, with_vectors
from ghoststep.instruments.live.xray_run import frozen, loss_graph
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


def places_of(batch: BatchFacts, depended_BT: NDArray[np.bool_]) -> list[tuple[str, int, int]]:
    """(name, example, position) of each kind of place that the batch has, where the loss depends on it if it does anywhere.

    The middle is that of the span from the first real position to the last one whose label counts. depended_BT: `depended_on`.
    """
    import numpy as np

    num_examples, width = batch.ids_BT.shape
    padding_BT = np.zeros((num_examples, width), dtype=bool) if batch.padding_BT is None else batch.padding_BT
    found: list[tuple[str, int, int]] = []
    lengths = (~padding_BT).sum(axis=1)
    if not lengths.any():
        raise CannotLook("every position of the batch is padding")
    by_length = sorted((b for b in range(num_examples) if lengths[b]), key=lambda b: -int(lengths[b]))
    begins = {b: int((~padding_BT[b]).nonzero()[0][0]) for b in by_length}
    starts = _document_starts(batch, padding_BT)

    def add(name: str, seats: list[tuple[int, int]]) -> None:
        if seats:
            found.append((name, *next((s for s in seats if depended_BT[s]), seats[0])))

    add(FIRST, [(b, 0) for b in by_length if begins[b] == 0])
    at_start = {(b, begins[b]) for b in by_length} | set(starts)
    add(MIDDLE, [(b, _middle(~padding_BT[b], depended_BT[b], {t for c, t in at_start if c == b})) for b in by_length])
    add(LEFT, [(b, begins[b]) for b in by_length if begins[b] > 0])
    add(PACKED, starts)
    return found


def _middle(real_T: NDArray[np.bool_], depended_T: NDArray[np.bool_], at_start: set[int]) -> int:
    """The position nearest to the middle of what is trained that the loss depends on and no text begins at."""
    real = real_T.nonzero()[0].tolist()
    trained = (real_T & depended_T).nonzero()[0].tolist()
    last = trained[-1] + 1 if trained else real[-1]  # a position's gradient comes from labels behind it
    span = [t for t in real if t <= last]
    middle = int(span[len(span) // 2])
    usable = [t for t in trained if t not in at_start]
    return int(min(usable, key=lambda t: (abs(t - middle), t))) if usable else middle


def _document_starts(batch: BatchFacts, padding_BT: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(example, position) of each packed document that follows another one."""
    document_BT = batch.document_BT
    if document_BT is None:
        return []
    return [
        (b, t)
        for b in range(document_BT.shape[0])
        for t in range(1, document_BT.shape[1])
        if document_BT[b, t] != document_BT[b, t - 1] and not padding_BT[b, t] and not padding_BT[b, t - 1]
    ]


def depended_on(setup: Setup, call: LiveCall, batch: BatchFacts) -> NDArray[np.bool_]:
    """bool [B, T]: a gradient comes back to the embedding's output at this position of the first batch.

    Cost: one forward and one backward without parameter gradients. Nothing is changed.
    """
    import numpy as np
    import torch

    if call.embedding is None:
        raise CannotLook("no module looks token ids up, so no row can be fed")
    fed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def feed(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(given, torch.Tensor) or any(torch.equal(given, ids) for ids, _ in fed):
            return output
        leaf = vectors(output).detach().requires_grad_()
        fed.append((given.detach(), leaf))
        return with_vectors(output, leaf * 1)  # a leaf must not be written to in place

    with frozen(setup):
        handle = call.embedding.register_forward_hook(feed, with_kwargs=True)
        try:
            loss = loss_graph(setup, setup.batches[0])
            if not fed:
                raise CannotLook("the embedding was not called with token ids again")
            gradients = torch.autograd.grad(loss, [leaf for _, leaf in fed], allow_unused=True)
        finally:
            handle.remove()
    num_examples, width = batch.ids_BT.shape
    depended_BT = np.zeros((num_examples, width), dtype=bool)
    for b in range(num_examples):
        try:
            seat = seat_of(call, batch, b, 0)
        except CannotLook:
            continue
        for (ids, _), gradient in zip(fed, gradients, strict=True):
            if gradient is not None and torch.equal(ids, seat.ids):
                depended_T = (gradient != 0).any(dim=-1).reshape(-1, ids.shape[-1])[seat.example].cpu().numpy()
                depended_BT[b, : len(depended_T)] = depended_T[:width]
    return depended_BT


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a row is fed: the ids of the look-up that it goes into, and the example and position within it."""

    ids: torch.Tensor
    example: int
    position: int

    def is_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the embedding was called with these ids."""
        import torch

        given = args[0] if args else next(iter(kwargs.values()), None)
        return isinstance(given, torch.Tensor) and torch.equal(given, self.ids)

    def put(self, output: Any, row: torch.Tensor) -> Any:
        """The embedding's output with this row instead of the one that stands there."""
        given = vectors(output)
        changed = given.reshape(-1, given.shape[-1]).clone()
        changed[self.example * self.ids.shape[-1] + self.position] = row
        return with_vectors(output, changed.reshape(given.shape))


def seat_of(call: LiveCall, batch: BatchFacts, example: int, position: int) -> Seat:
    """The look-up that holds this example of the batch."""
    wanted = batch.ids_BT[example]
    for ids in call.ids:
        rows = ids.reshape(-1, ids.shape[-1]).tolist() if ids.dim() in (1, 2) else []
        for b, row in enumerate(rows):
            if row == wanted[: len(row)].tolist() and all(i < 0 for i in wanted[len(row) :].tolist()):
                return Seat(ids=ids, example=b, position=position)
    raise CannotLook("no look-up of the embedding holds the example, so no row can be fed there")
