"""Errors of the user's own code: told as theirs, with what they were run on, and seen before a device can assert.

Layout: B examples, T positions.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ghoststep.engine import describe
from ghoststep.errors import CannotLook, DoesNotApply, SetupCannotRun
from ghoststep.subjects.setup import Setup
from ghoststep.subjects.setup_batches import described

if TYPE_CHECKING:
    import torch

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """What the user's model or loss raises is no defect of ours: `CannotLook` with the place. For runs that we changed."""
    try:
        yield
    except (CannotLook, DoesNotApply):
        raise
    except (Exception, SystemExit) as error:
        raise CannotLook(f"the model or the loss raised {describe(error)}") from error


@contextlib.contextmanager
def as_it_is(setup: Setup, what: str = "", *, number: int = 0) -> Iterator[None]:
    """The same for a run of theirs in which nothing of ours is changed: `SetupCannotRun`, since it would raise for anyone.

    `what` names their function ("your train_step"); without it the traceback says whether the model or `loss_fn` raised.
    `number` is that of the batch. Out of memory is not laid at their door: our own hooks and copies need some too.
    """
    try:
        yield
    except (CannotLook, DoesNotApply):
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ in _OUT_OF_MEMORY:
            raise CannotLook(f"out of memory in the setup's own code: {describe(error)}") from error
        who = what or _who(setup, error)
        batch = setup.batches[number]
        hint = _key_hint(setup, batch)
        did = f"called sys.exit({error.code!r:.60})," if isinstance(error, SystemExit) else "raised"
        raise SetupCannotRun(f"{who} {did} {describe(error)}, on batch {number} ({described(batch)}){hint}") from error


def _who(setup: Setup, error: BaseException) -> str:
    in_model = any(f.name == "_call_impl" for f in traceback.extract_tb(error.__traceback__))
    if setup.loss_fn is None:
        return "your model"
    return "your model, called by loss_fn," if in_model else "your loss_fn"


def _key_hint(setup: Setup, batch: Mapping[str, Any]) -> str:
    """What forward takes, where a batch that goes to the model as it is has no key of it."""
    import inspect

    if setup.loss_fn is not None or setup.train_step is not None:
        return ""
    from ghoststep.instruments.live.calling import unwrap

    names = [p.name for p in inspect.signature(unwrap(setup.model)[0].forward).parameters.values() if p.kind in (1, 3)]
    if not names or set(names) & set(batch) or not any(p.isidentifier() for p in batch):
        return ""
    return f"; none of these is an argument of the model's forward, which takes {', '.join(names[:8])}"


@contextlib.contextmanager
def parts_alone(*modules: Iterable[str]) -> Iterator[None]:
    """A call of the whole model that the loss never makes: `CannotLook` says so, with the parts that it did call."""
    try:
        yield
    except (Exception, SystemExit) as error:
        parts = sorted({name.partition(".")[0] for names in modules for name in names})
        called = f"it calls parts of it ({', '.join(parts[:4])})" if parts else "it calls no part of it either"
        raise CannotLook(
            f"the loss never calls the model itself, where hooks see its inputs and outputs: {called}; "
            "let loss_fn call model(...), whose forward calls the parts"
        ) from error


def with_graph_if_need_be(run: Callable[[], torch.Tensor], *begin_again: Callable[[], None]) -> torch.Tensor:
    """`run()` as it is called, under `no_grad`; once more with gradients where that raises: a loss may call autograd itself."""
    import torch

    try:
        return run()
    except (CannotLook, DoesNotApply):
        raise
    except (Exception, SystemExit):
        for undo in begin_again:
            undo()
        with torch.enable_grad():
            return run()


def need_scalar(loss: Any) -> torch.Tensor:
    """The loss as a scalar tensor []; `SetupCannotRun` says what was returned instead, and what to return."""
    import torch

    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        got, advice = f"a tensor of shape {tuple(loss.shape)}", "reduce it, for example with .mean()"
    elif isinstance(loss, torch.Tensor):
        got, advice = f"a tensor of {str(loss.dtype).removeprefix('torch.')}", "return the loss itself"
    elif isinstance(loss, bool | int | float):
        got, advice = f"the number {loss:.6g} ({type(loss).__name__})", "return the tensor itself, without .item()"
    elif isinstance(loss, tuple | list):
        kinds = ", ".join(type(v).__name__ for v in loss[:4])
        got, advice = f"a {type(loss).__name__} of {len(loss)} ({kinds})", "return the loss alone"
    elif loss is None:
        got, advice = "None", "end it with `return loss`"
    elif isinstance(getattr(loss, "loss", None), torch.Tensor):
        got, advice = f"a {type(loss).__name__}", "return its .loss"
    else:
        got, advice = f"a {type(loss).__name__}", "return the loss alone"
    raise SetupCannotRun(f"your loss_fn returned {got}; expected a scalar floating-point tensor: {advice}")


class IdBeyondTable(SetupCannotRun):
    """An input id that the table has no row for, met before the look-up. `ids` int64 on the CPU, [B, T] or as it was."""

    def __init__(self, message: str, *, module: str, num_rows: int, ids: torch.Tensor) -> None:
        super().__init__(message)
        self.module, self.num_rows, self.ids = module, num_rows, ids


def guard_look_ups(model: torch.nn.Module) -> list[Any]:
    """Handles of hooks that raise `IdBeyondTable` before an `nn.Embedding` looks up an id that it has no row for.

    On a GPU the look-up itself stops the process's device for good. Classes with a forward of their own may map ids first and
    are left alone. Cost: one minimum and maximum a look-up.
    """
    import torch

    def looks_up(module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Embedding) and type(module).forward is torch.nn.Embedding.forward

    return [m.register_forward_pre_hook(_guard(name), with_kwargs=True) for name, m in model.named_modules() if looks_up(m)]


def _guard(name: str) -> Any:
    import torch

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_meta or not ids.numel():
            return
        num_rows = int(getattr(module, "num_embeddings", 0))
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < num_rows:
            return
        worst = high if high >= num_rows else low
        place = (ids == worst).nonzero()[0].tolist()
        where = f"example {place[0]}, position {place[1]}" if len(place) == 2 else f"index {place}"
        more = " (-100 marks labels that are left out of the loss, not inputs)" if worst == -100 else ""
        raise IdBeyondTable(
            f"your model looks up id {worst} ({where}) in {name}, whose table has {num_rows} rows (0 to {num_rows - 1}){more}",
            module=name, num_rows=num_rows, ids=ids.detach().cpu().long(),
        )  # fmt: skip

    return hook


def required(function: Any) -> list[str]:
    """Names of the arguments that a bound method cannot do without; none where its signature cannot be read.

    A scheduler wraps `optimizer.step` in a function that still says `self`.
    """
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return needed[1:] if needed[:1] == ["self"] else needed
