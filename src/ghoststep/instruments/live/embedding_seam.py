"""Where the embeddings of whole examples enter the user's loss, found by measurement, and the loss fed with others there.

B examples, T positions, D dimensions.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.instruments.live.calling import LiveCall, compute_loss, eager
from ghoststep.instruments.live.equivalence_pooling import _kind
from ghoststep.instruments.live.untouched import _random_state, _restore_random, untouched
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor that a module gave out in its `call`-th call; key: where in its output, None: the output itself."""

    module: torch.nn.Module
    name: str
    call: int
    key: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """The places whose tensors the loss depends on directly, in order of the calls, with their values.

    values: float, [B, D] or [B, T, D] where the loss pools. stubs: modules whose forward need not run any more, with what each
    call of theirs returned. num_forward: passes that were run to find it.
    """

    places: tuple[Place, ...]
    values: tuple[torch.Tensor, ...]
    stubs: tuple[tuple[torch.nn.Module, tuple[Any, ...]], ...]
    num_forward: int


def find_seam(setup: Setup, call: LiveCall, skipped: Collection[torch.nn.Module] = ()) -> Seam:
    """Cut the graph at every module's output: the loss's gradient reaches only the last ones, which are the seam.

    Modules in `skipped` are not cut (a module that compares embeddings gives out similarities, not embeddings).
    `DoesNotApply` where what the loss reads is not one vector an example, `CannotLook` where its graph is cut.
    Cost: two forwards without activations.
    """
    cut = _cut(setup, call, skipped)
    if not cut:
        raise DoesNotApply("no contrastive loss: it is not computed from [examples, dimensions] outputs of modules")
    for place, value, gradient in cut:
        if value.dim() == 3 and any(_kind(g) == "" for g in gradient.float().cpu()):
            raise DoesNotApply(f"no contrastive loss: it reads the output of {place.name} position by position")
        if min(value.shape[0], value.shape[-1]) < 2:
            raise DoesNotApply(f"no contrastive loss: it reads {tuple(value.shape)} from {place.name}, no embeddings")
    places = [p for p, _, _ in cut]
    stubs = _record(setup, call.core, places)
    return Seam(places=tuple(places), values=tuple(v for _, v, _ in cut), stubs=stubs, num_forward=2)


def _record(
    setup: Setup, root: torch.nn.Module, places: Sequence[Place]
) -> tuple[tuple[torch.nn.Module, tuple[Any, ...]], ...]:
    """What each call of the modules up to the seam returns. Modules behind it (their outputs depend on it) have to run."""
    import torch

    seam = {p.module for p in places}
    outputs: dict[int, list[Any]] = {}
    behind: set[int] = set()

    def hook(module: torch.nn.Module, _: Any, output: Any) -> Any:
        kept = outputs.setdefault(id(module), [])
        kept.append(_detached(output))
        if module not in seam:
            if any(isinstance(v, torch.Tensor) and v.requires_grad for _, v in _items(output)):
                behind.add(id(module))
            return None
        for place in places:
            if place.module is module and place.call == len(kept) - 1:
                value = next(v for k, v in _items(output) if k == place.key)
                output = replaced(output, place.key, value.detach().requires_grad_())
        return output

    with untouched(setup), eager(), torch.enable_grad():
        for p in setup.model.parameters():
            p.requires_grad_(False)
        modules = _stubs(root, seam)
        handles = [m.register_forward_hook(hook) for m in modules]
        try:
            compute_loss(setup, setup.batches[0])
        finally:
            for handle in handles:
                handle.remove()
    return tuple((m, tuple(outputs.get(id(m), ()))) for m in modules if id(m) not in behind)


def _cut(setup: Setup, call: LiveCall, skipped: Collection[torch.nn.Module]) -> list[tuple[Place, torch.Tensor, torch.Tensor]]:
    """The places that the loss depends on, with value and gradient there."""
    import torch

    names = {id(m): n or "the model" for n, m in call.core.named_modules()}
    found: list[tuple[Place, torch.Tensor]] = []
    counts: dict[int, int] = {}

    def hook(module: torch.nn.Module, _: Any, output: Any) -> Any:
        number = counts[id(module)] = counts.get(id(module), -1) + 1
        for key, value in list(_items(output)):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() not in (2, 3):
                continue
            leaf = value.detach().requires_grad_()
            found.append((Place(module=module, name=names[id(module)], call=number, key=key), leaf))
            output = replaced(output, key, leaf.clone())
        return output

    with untouched(setup), eager(), torch.enable_grad():
        for p in setup.model.parameters():
            p.requires_grad_(False)
        handles = [m.register_forward_hook(hook) for m in call.core.modules() if m not in skipped]
        try:
            loss = compute_loss(setup, setup.batches[0])
            if not loss.requires_grad or not found:
                return []
            gradients = torch.autograd.grad(loss, [v for _, v in found], allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
    if all(g is None for g in gradients):
        raise CannotLook(
            "the loss asks for a gradient, but not through the model's outputs (a gradient cache takes it up again later)"
        )
    given = [(p, v.detach(), g) for (p, v), g in zip(found, gradients, strict=True)]
    used = {(id(p.module), p.key): (v.dim(), v.shape[-1]) for p, v, g in given if g is not None and bool((g != 0).any())}
    # Other calls of the same encoder count too: keys are often made without gradient, or detached.
    return [
        (p, v, torch.zeros_like(v) if g is None else g)
        for p, v, g in given
        if used.get((id(p.module), p.key)) == (v.dim(), v.shape[-1])
    ]


def _stubs(root: torch.nn.Module, seam: set[torch.nn.Module]) -> list[torch.nn.Module]:
    """The largest modules whose inside need not run: seam modules, and those without a seam module in them."""
    found: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        if module in found:
            return
        if module in seam or not any(m in seam for m in module.modules()):
            found.append(module)
            return
        for child in module.children():
            visit(child)

    visit(root)
    return found


class FedLoss:
    """`loss(leaves)` of the user's own loss, with these tensors at the seam's places and all else as it was measured."""

    def __init__(self, setup: Setup, seam: Seam) -> None:
        self._setup, self._seam = setup, seam
        self._leaves: Sequence[torch.Tensor] = ()
        self._counts: dict[int, int] = {}
        self._randomness = _random_state()

    @contextlib.contextmanager
    def open(self) -> Iterator[FedLoss]:
        """Replace forwards meanwhile; everything is put back."""
        kept = [(m, "forward" in vars(m), vars(m).get("forward")) for m, _ in self._seam.stubs]
        with untouched(self._setup), eager():
            try:
                for module, outputs in self._seam.stubs:
                    vars(module)["forward"] = self._forward(module, outputs)
                yield self
            finally:
                for module, had, original in kept:
                    if had:
                        vars(module)["forward"] = original
                    else:
                        vars(module).pop("forward", None)

    def _forward(self, module: torch.nn.Module, outputs: Sequence[Any]) -> Any:
        def forward(*_: Any, **__: Any) -> Any:
            number = self._counts[id(module)] = self._counts.get(id(module), -1) + 1
            if number >= len(outputs):
                raise CannotLook("the loss calls the model more often than it did before")
            output = outputs[number]
            for place, leaf in zip(self._seam.places, self._leaves, strict=True):
                if place.module is module and place.call == number:
                    output = replaced(output, place.key, leaf)
            return output

        return forward

    def __call__(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The scalar loss, with a graph to the leaves."""
        import torch

        self._leaves, self._counts = leaves, {}
        _restore_random(self._randomness)  # dropout behind the seam is the same each time
        with torch.enable_grad():
            return compute_loss(self._setup, self._setup.batches[0])


def floats(output: Any) -> list[torch.Tensor]:
    """The floating tensors among a module's outputs."""
    import torch

    return [v for _, v in _items(output) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _items(output: Any) -> Iterator[tuple[str | int | None, Any]]:
    import torch

    if isinstance(output, torch.Tensor):
        yield None, output
    elif isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (tuple, list)):
        yield from enumerate(output)
    elif hasattr(output, "__dict__"):
        yield from vars(output).items()


def _detached(output: Any) -> Any:
    import torch

    for key, value in list(_items(output)):
        if isinstance(value, torch.Tensor):
            output = replaced(output, key, value.detach())
    return output


def replaced(output: Any, key: str | int | None, value: torch.Tensor) -> Any:
    """A shallow copy of a module's output with another tensor at one place."""
    if key is None:
        return value
    if isinstance(output, tuple):
        items = [value if i == key else v for i, v in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    changed = copy.copy(output)
    if isinstance(changed, (dict, list)) or hasattr(changed, "__setitem__"):
        changed[key] = value
    else:
        setattr(changed, str(key), value)
    return changed
