"""Faults planted into a finished model from outside: into its layers by a hook, or into its attention.

Which layer is found by running the model once, not by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.zoo_live.setups import LENGTHS, TARGET_LENGTHS, own_loss

if TYPE_CHECKING:
    import torch

STRENGTH = 0.02
MOST_TRIED = 24
"""Modules that a plant is tried in before it has no place."""


class NoPlaceError(Exception):
    """The plant does not go into this class; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """`codes`: what it must be found as, an error. `put(setup)` is entered around the check."""

    name: str
    codes: tuple[str, ...]
    put: Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]]


def plants_of(kind: str) -> tuple[Plant, ...]:
    """The plants that are faults for models of this kind."""
    shown = Plant(name="open", codes=("GS101",), put=open_attention)
    if kind == "masked":
        hidden = Plant(name="open", codes=("GS102", "GS106"), put=open_attention)
        return Plant(name="examples", codes=("GS105",), put=examples), hidden
    return Plant(name="future", codes=("GS101",), put=future), shown


def outputs(setup: dict[str, Any]) -> Any:
    """Logits of the first batch in eval mode, with dropout off."""
    import torch

    model, kept = setup["model"], {}
    mode = model.training

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        kept["logits"] = output.logits if hasattr(output, "logits") else output[0]

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        model.eval()
        with torch.no_grad():
            own_loss(model, setup["batches"][0])
    finally:
        handle.remove()
        model.train(mode)
    return kept["logits"].detach().clone()


def _length(setup: dict[str, Any]) -> int:
    encoder_decoder = getattr(setup["model"].config, "is_encoder_decoder", False)
    return max(TARGET_LENGTHS if encoder_decoder else LENGTHS)


Place = tuple[int | str, int]
"""(which argument, dimension of the positions)."""


def hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Place | None:
    """Where the first hidden states with this many positions stand, or with several streams of as many."""
    import torch

    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 3 or value.shape[-1] == 1:
            continue
        for dim in (1, 0, 2):
            if dim < value.dim() - 1 and value.shape[dim] == length:
                return place, dim
        if value.dim() == 3 and value.shape[1] % length == 0 and value.shape[1] > 0:
            return place, 1
        if value.dim() == 3 and value.shape[2] == length:
            return place, 2  # channels before positions
    return None


def layers(setup: dict[str, Any]) -> list[Any]:
    """Modules that are handed the hidden states of every position: the last of the outermost lists of modules first, then every
    other module with parameters, the deepest in the model first."""
    import torch
    from torch import nn

    model, length = setup["model"], _length(setup)
    called: list[Any] = []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        # Inside an autograd function, which goes backward by itself, a hook would be seen by the forward only.
        if torch.is_grad_enabled() and hidden_in(args, kwargs, length) is not None and module not in called:
            called.append(module)

    handles = [
        m.register_forward_pre_hook(watch, with_kwargs=True) for m in model.modules() if any(True for _ in m.parameters())
    ]
    try:
        own_loss(model, setup["batches"][0])
    finally:
        for handle in handles:
            handle.remove()
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)]
    last = [(n, list(m.values() if isinstance(m, nn.ModuleDict) else m)[-1]) for n, m in lists]
    last = sorted(((n, m) for n, m in reversed(last) if m in called), key=lambda pair: pair[0].count("."))
    first = [m for _, m in last]
    return first + [m for m in reversed(called) if m not in first]


@contextlib.contextmanager
def _mixed(setup: dict[str, Any], mix: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Iterator[None]:
    before, length = outputs(setup), _length(setup)

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        found = hidden_in(args, kwargs, length)
        if found is None:
            return args, kwargs
        place, dim = found
        if isinstance(place, int):
            return (*args[:place], mix(args[place], dim, length), *args[place + 1 :]), kwargs
        return args, {**kwargs, place: mix(kwargs[place], dim, length)}

    reason = NoPlaceError("no module is handed hidden states of every position")
    for module in layers(setup)[:MOST_TRIED]:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            _must_move(setup, before)
            yield
            return
        except NoPlaceError as here:
            reason = here
        finally:
            handle.remove()
    raise reason


def _must_move(setup: dict[str, Any], before: Any) -> None:
    after = outputs(setup)
    moved = float((after - before).norm() / before.norm())
    if not moved > 1e-4:
        raise NoPlaceError(f"the plant moves the logits by {moved:.1e} of their norm")


def future(setup: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Before the last layer, every position gets a little of the next one."""

    def mix(hidden: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        shape = hidden.shape
        streams = hidden.reshape((*shape[:dim], shape[dim] // length, length, *shape[dim + 1 :]))
        return hidden + STRENGTH * streams.roll(-1, dim + 1).reshape(shape)

    return _mixed(setup, mix)


def examples(setup: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Before the last layer, every example gets a little of the one before it."""
    return _mixed(setup, lambda hidden, dim, length: hidden + STRENGTH * hidden.roll(1, 1 if dim == 0 else 0))


@contextlib.contextmanager
def open_attention(setup: dict[str, Any]) -> Iterator[None]:
    """Every query sees every key: scaled_dot_product_attention loses its mask."""
    import torch

    functional = torch.nn.functional
    closed, before = functional.scaled_dot_product_attention, outputs(setup)

    def opened(*args: Any, **more: Any) -> Any:
        return closed(*args[:3], **{k: v for k, v in more.items() if k not in ("attn_mask", "is_causal")})

    functional.scaled_dot_product_attention = opened
    try:
        _must_move(setup, before)
        yield
    finally:
        functional.scaled_dot_product_attention = closed
