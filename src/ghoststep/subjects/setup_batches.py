"""The batches of a setup: mappings as they are, tuples and lists of tensors by place, a loader's first few."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ghoststep.errors import UsageError
from ghoststep.subjects.setup_values import users_file

Batch = Mapping[str, Any]
"""One batch as it is fed to the model or to `loss_fn`: names to tensors (other values pass through untouched)."""

FEW = 16
"""Batches taken of a loader or generator, or two accumulation windows where those are more. A list is taken whole."""


class PlacedBatch(dict[str, Any]):
    """A batch that the user gave as a tuple or list: its entries under "0", "1", ... (a named tuple's under their names).

    `as_given()` is what the user's own functions get: the tuple itself, or a copy of the list.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        names = getattr(given, "_fields", None) or [str(i) for i in range(len(given))]
        super().__init__(zip(names, given, strict=True))
        self._given = given

    def as_given(self) -> Any:
        """The tuple or list that stands for this batch."""
        return self._given if isinstance(self._given, tuple) else copy.copy(self._given)


def make_batches(given: Mapping[str, Any], name: str) -> tuple[Batch, ...]:
    """`batch` and `batches` of a setup; with both, `batch` comes first and is not repeated.

    `UsageError` for what is no batch, for an empty one and for one without values (on the meta device).
    """
    first, rest = given.get("batch"), given.get("batches")
    if isinstance(rest, Mapping):
        raise UsageError(f"{name}: `batches` is one mapping; expected a list of them (or call it `batch`)")
    found = [] if first is None else [_batch(first, f"{name}: `batch`")]
    if rest is not None:
        import torch

        if isinstance(rest, torch.utils.data.Dataset) and not isinstance(rest, torch.utils.data.IterableDataset):
            raise UsageError(
                f"{name}: `batches` is a dataset of examples; expected batches: DataLoader(dataset, batch_size=...)"
            )
        if not hasattr(rest, "__iter__") and not hasattr(rest, "__getitem__"):
            raise UsageError(f"{name}: `batches` is a {type(rest).__name__}; expected a list of batches")
        steps = given.get("accumulation_steps")
        most = max(FEW, 2 * steps if isinstance(steps, int) else 0)
        with _same_randomness(rest), users_file(name, "while its `batches` were read"):
            taken = list(rest if isinstance(rest, (list, tuple)) else itertools.islice(rest, most))
        if not taken and not found:
            raise UsageError(f"{name}: `batches` is empty; give at least one batch, or leave it out to look at the model alone")
        for i, one in enumerate(taken):
            if one is not first:
                made = _batch(one, f"{name}: batch {i}")
                found += [] if found and first is not None and _same(made, found[0]) else [made]
    return tuple(found)


def _batch(given: Any, what: str) -> Batch:
    import torch

    if isinstance(given, Mapping):
        batch: Batch = given
    elif isinstance(given, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in given):
        batch = PlacedBatch(given)
    else:
        advice = ""
        if isinstance(given, (torch.utils.data.DataLoader, torch.utils.data.Dataset)):
            advice = ": give what a DataLoader yields, next(iter(loader)), or the loader as `batches`"
        got = f"a {type(given).__name__}"
        raise UsageError(f"{what} is {got}; expected a mapping of names to tensors, or a tuple of tensors{advice}")
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    if not batch:
        raise UsageError(f"{what} has no entry; expected names to tensors, as they are fed to the model")
    if tensors and all(not t.numel() for t in tensors.values()):
        raise UsageError(f"{what} holds no example ({described(batch)}); expected at least one, better four")
    meta = next((k for k, t in tensors.items() if t.is_meta), None)
    if meta is not None:
        raise UsageError(f"{what}: {meta} is on the meta device and has no values; expected real tensors")
    return batch


def _same(one: Batch, other: Batch) -> bool:
    """True if two batches hold equal tensors: `batch` is often `batches[0]` made a second time."""
    import torch

    if set(one) != set(other):
        return False
    return all(
        torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) and isinstance(other[k], torch.Tensor) else False
        for k in one
    )


@contextlib.contextmanager
def _same_randomness(loader: Any) -> Iterator[None]:
    """Starting a DataLoader draws from torch's generator and shuffling from the loader's: put both and Python's back."""
    import torch

    generators = [g for g in (getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None))
                  if isinstance(g, torch.Generator)]  # fmt: skip
    kept = torch.get_rng_state(), random.getstate(), [g.get_state() for g in generators]
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        for generator, state in zip(generators, kept[2], strict=True):
            generator.set_state(state)


def described(batch: Mapping[str, Any], most: int = 8) -> str:
    """ "input_ids int64 [4, 16], texts list": names, dtypes and shapes of the first entries, for messages."""
    parts = []
    for name, value in itertools.islice(batch.items(), most):
        shape = getattr(value, "shape", None)
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        parts.append(f"{name} {kind}" + (f" {list(shape)}" if shape is not None else ""))
    return ", ".join(parts) + (f" and {len(batch) - most} more" if len(batch) > most else "")
