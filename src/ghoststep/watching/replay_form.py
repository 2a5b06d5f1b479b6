"""A kept batch in the form that a setup's own functions take.

What the model was called with is not the batch that a loss function takes: names of arguments differ from names of entries, and
what only the loss needs is not there. So it is measured which entries the setup hands to its model: its loss runs on its own batch
up to the first call of the model, and each argument that is an entry of that batch says where the kept argument belongs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, UsageError
from ghoststep.instruments.live.batch_facts import LABEL_NAMES
from ghoststep.instruments.live.calling import eager, unwrap
from ghoststep.instruments.live.kept_batches import fresh
from ghoststep.instruments.live.untouched import untouched
from ghoststep.subjects.setup_batches import Batch, PlacedBatch, described
from ghoststep.watching.run_facts import argument_names

if TYPE_CHECKING:
    import torch

    from ghoststep.subjects.setup import Setup

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBatch:
    """One micro-batch as it was kept: a mapping, or a tuple (by place). missing: path → why it was not kept; a place that was not kept
    holds None. micro_batch, by_loop: see `BatchKeeper.keep`."""

    value: Any
    missing: Mapping[str, str]
    micro_batch: int | None = None
    by_loop: bool = False


class _DoesNotFitError(Exception):
    """Why a kept batch cannot take the place of the setup's own."""


class _Called(BaseException):
    """Ends the setup's loss at the first call of the model; no `except Exception` of the user's is to stop it."""


def fitted(setup: Setup, kept: Sequence[KeptBatch]) -> tuple[Batch, ...]:
    """The micro-batches of a step, each as the setup's loss takes it. `UsageError` says what was kept and what the setup expects.

    What the loop handed over comes first, unless it is only a part of the step and what the model was fed can be used.
    """
    by_loop, fed = [k for k in kept if k.by_loop], [k for k in kept if not k.by_loop]
    num_micro_batches = len({k.micro_batch for k in fed})
    order = [(by_loop, _of_loop), (fed, _of_model)]
    if len(by_loop) < num_micro_batches:
        order.reverse()
    refused = []
    for group, form in order:
        try:
            if group:
                return form(setup, group)
        except _DoesNotFitError as why:
            refused.append((group[0], str(why)))
    raise UsageError(_refusal(setup, *(refused[0] if refused else (None, "nothing was kept of it"))))


def _refusal(setup: Setup, kept: KeptBatch | None, why: str) -> str:
    said = why
    if kept is not None:
        whose = "the loop handed over" if kept.by_loop else "the model was called with"
        said += f". Kept is what {whose}: {_shown(kept)}"
    if setup.batches:
        own = setup.batches[0]
        said += f"; the setup's own batch is {'a tuple' if isinstance(own, PlacedBatch) else 'a mapping'}: {described(own)}"
    return (
        f"{said}. Hand the whole batch to the watch in the training loop, w.step(loss, batch), once after each backward and in the "
        "form of the setup's batch"
        + (
            ""
            if setup.loss_fn is None and setup.train_step is None
            else ", or leave `loss_fn` out if the model returns its loss"
        )
    )


def _shown(kept: KeptBatch) -> str:
    value = kept.value
    entries = value if isinstance(value, Mapping) else {str(i): v for i, v in enumerate(value) if str(i) not in kept.missing}
    missing = f"; not kept: {', '.join(f'{path} ({why})' for path, why in kept.missing.items())}" if kept.missing else ""
    return (described(entries) or "no entry") + missing


# What the loop handed over


def _of_loop(setup: Setup, group: Sequence[KeptBatch]) -> tuple[Batch, ...]:
    return tuple(_whole(setup, k) for k in group)


def _whole(setup: Setup, kept: KeptBatch) -> Batch:
    """A batch of the loop's own, which is to look as the setup's does."""
    own = setup.batches[0] if setup.batches else None
    value = kept.value
    if isinstance(value, Mapping):
        if isinstance(own, PlacedBatch):
            raise _DoesNotFitError("entries with names were kept, and the setup's batch has none")
        made: Batch = value
    elif own is None or isinstance(own, PlacedBatch):
        made = _placed(value, own)
    elif len(own) == len(value) == 1:
        made = {next(iter(own)): value[0]}  # one tensor is one tensor, whatever it is called
    else:
        raise _DoesNotFitError("entries without names were kept, and the setup's batch has names")
    _refuse_lacking(setup, made, kept)
    return made


def _placed(value: Sequence[Any], own: Batch | None) -> PlacedBatch:
    """By place; as a named tuple or a list where the setup's own batch is one."""
    given: Any = own.as_given() if isinstance(own, PlacedBatch) else ()
    if hasattr(given, "_fields") and len(given) == len(value):
        return PlacedBatch(type(given)(*value))
    return PlacedBatch(list(value) if isinstance(given, list) else tuple(value))


def _refuse_lacking(setup: Setup, made: Batch, kept: KeptBatch) -> None:
    """A loss function may need every entry; the model's own loss needs the labels."""
    gone = {path.partition("/")[0] for path in kept.missing}
    own = map(str, setup.batches[0] if setup.batches else ())
    needs = own if _has_functions(setup) else (k for k in own if k in LABEL_NAMES)
    lacks = [k for k in needs if k not in made or k in gone]
    if lacks:
        raise _DoesNotFitError(f"{', '.join(lacks)} of the setup's own batch, which its loss may need, was not kept")


def _has_functions(setup: Setup) -> bool:
    return setup.loss_fn is not None or setup.train_step is not None


# What the model was called with


def _of_model(setup: Setup, group: Sequence[KeptBatch]) -> tuple[Batch, ...]:
    counts = [k.micro_batch for k in group if k.micro_batch is not None]
    if len(set(counts)) < len(counts):
        raise _DoesNotFitError(
            "the model was called more than once for one backward, and how its loss joins the calls was not seen"
        )
    if not _has_functions(setup):
        return tuple(_as_arguments(setup, k) for k in group)
    if not setup.batches:
        return tuple(k.value if isinstance(k.value, Mapping) else _placed(k.value, None) for k in group)
    call = _first_call(setup)
    if call is None:  # it never calls the model as a whole, or raised before that
        return tuple(_whole(setup, k) for k in group)
    places = _places(setup.batches[0], call)
    return tuple(_through(setup, k, places) for k in group)


def _by_name(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that forward gives them; by number where it has no name for a place."""
    names = argument_names(model)
    return {**{names[i] if i < len(names) else str(i): a for i, a in enumerate(args)}, **kwargs}


def _named(setup: Setup, kept: KeptBatch) -> tuple[dict[str, Any], set[str]]:
    """The kept arguments by name, and the names of those that were not kept or in part."""
    if isinstance(kept.value, Mapping):
        return dict(kept.value), {path.partition("/")[0] for path in kept.missing}
    names = list(_by_name(setup.model, kept.value, {}))
    places = {int(p) for path in kept.missing if (p := path.partition("/")[0]).isdecimal()}
    gone = {names[i] for i in places if i < len(names)}
    return {n: v for n, v in zip(names, kept.value, strict=True) if n not in gone or v is not None}, gone


def _as_arguments(setup: Setup, kept: KeptBatch) -> Batch:
    """For `model(**batch)`, or `model(*batch)` where forward gives its arguments no names."""
    named, gone = _named(setup, kept)
    signature = inspect.signature(unwrap(setup.model)[0].forward)
    own = setup.batches[0] if setup.batches else None
    kinds = {n: p.kind for n, p in signature.parameters.items()}
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds.values()
    by_place = [n for n in named if kinds.get(n) is inspect.Parameter.POSITIONAL_ONLY or (n.isdecimal() and n not in kinds)]
    is_placed = isinstance(kept.value, tuple) and (bool(by_place) or isinstance(own, PlacedBatch))
    if by_place and not is_placed:
        raise _DoesNotFitError(
            "it was called with arguments by place and by name, and forward has no names for some of the places"
        )
    lacks = [] if isinstance(own, PlacedBatch) else [n for n in own or () if n in LABEL_NAMES and (n not in named or n in gone)]
    if lacks:
        raise _DoesNotFitError(f"the model's own loss needs {', '.join(lacks)}")
    made: Batch = _placed(kept.value, own) if is_placed else {n: v for n, v in named.items() if takes_more or n in kinds}
    try:
        if is_placed:
            signature.bind(*kept.value)
        else:
            signature.bind(**made)
    except TypeError as error:
        raise _DoesNotFitError(f"the setup's model cannot be called with it: {error}") from None
    return made


def _first_call(setup: Setup) -> dict[str, Any] | None:
    """Arguments of the first call of the model in the setup's own loss, by name; None if there is none. No forward runs."""
    seen: list[dict[str, Any]] = []

    def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_by_name(setup.model, args, kwargs))
        raise _Called

    try:
        with untouched(setup), eager():
            handle = unwrap(setup.model)[0].register_forward_pre_hook(called, with_kwargs=True)
            try:
                batch = fresh(setup.batches[0])
                if setup.loss_fn is not None:
                    setup.loss_fn(setup.model, batch)
                elif setup.train_step is not None:
                    setup.train_step(setup.model, setup.optimizer, batch)
            except (_Called, Exception, SystemExit):
                pass
            finally:
                handle.remove()
    except CannotLook:
        return None
    return seen[0] if seen else None


def _leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Entries of nested mappings; everything else is a leaf."""
    if isinstance(value, Mapping) and len(path) < 5:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    else:
        yield path, value


def _places(own: Batch, call: Mapping[str, Any]) -> dict[_Path, _Path | None]:
    """Each entry of the setup's batch → the argument that it becomes, as it is; None if it becomes none."""
    arguments = list(_leaves(call))
    return {path: _argument(path, value, arguments) for path, value in _leaves(own)}


def _argument(path: _Path, value: Any, arguments: Sequence[tuple[_Path, Any]]) -> _Path | None:
    import torch

    if not isinstance(value, torch.Tensor):  # True is True wherever it stands: only under its own name
        named = [(p, a) for p, a in arguments if p[-1] == path[-1] and type(a) is type(value)]
        return next((p for p, a in named if a is value or (isinstance(a, (bool, int, float, str)) and a == value)), None)
    found = [p for p, a in arguments if a is value] or [p for p, a in arguments if _is_copy(a, value)]
    return next((p for p in found if p[-1] == path[-1]), found[0] if found else None)


def _is_copy(argument: Any, value: torch.Tensor) -> bool:
    """An entry that was moved to another device on its way to the model."""
    import torch

    if not isinstance(argument, torch.Tensor) or (argument.shape, argument.dtype) != (value.shape, value.dtype):
        return False
    return torch.equal(argument.detach().cpu(), value.detach().cpu())


def _through(setup: Setup, kept: KeptBatch, places: Mapping[_Path, _Path | None]) -> Batch:
    """The kept arguments, each where the setup's batch has what becomes that argument."""
    own = setup.batches[0]
    given = dict(_leaves(_named(setup, kept)[0]))
    lacks = ["/".join(path) for path, argument in places.items() if argument is None or argument not in given]
    if lacks:
        raise _DoesNotFitError(
            f"{', '.join(lacks)} of the setup's own batch does not reach the model as it is, so it cannot be filled in"
        )
    made: dict[str, Any] = {}
    for path, argument in places.items():
        assert argument is not None
        inside = made
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = given[argument]
    return _placed(list(made.values()), own) if isinstance(own, PlacedBatch) else made
