"""Values of a setup that would only be met later, or never: refused where it is opened, with what was got and expected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ghoststep.errors import GhoststepError, SubjectError, UsageError

if TYPE_CHECKING:
    import torch

_METHODS = {"optimizer": "step", "scheduler": "step", "scaler": "scale"}


def a(value: Any) -> str:
    """ "a str ('adam')": what was got, for messages."""
    return f"a {type(value).__name__}" + (f" ({value!r:.60})" if isinstance(value, (str, int, float)) else "")


@contextlib.contextmanager
def users_file(what: str, when: str) -> Iterator[None]:
    """Run code of the user's before any check: what it raises is a `SubjectError`, `sys.exit()` too. `when`: "in setup()"."""
    try:
        yield
    except GhoststepError:
        raise
    except SystemExit as error:
        raise SubjectError(
            f"{what} called sys.exit({'' if error.code is None else repr(error.code)[:60]}) {when}: "
            "put the script's own run under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise SubjectError(f"{what} raised {type(error).__name__} {when}: {error}") from error


def check_objects(given: Mapping[str, Any], name: str) -> None:
    """`UsageError` for an optimizer, scheduler or scaler that is none, and for numbers of a wrong kind.

    Wrappers and classes of the user's own count as what they can do; lists of them are welcome.
    """
    for key, method in _METHODS.items():
        for one in given[key] if isinstance(given.get(key), (list, tuple)) else (given.get(key),):
            if isinstance(one, type):
                raise UsageError(f"{name}: `{key}` is the class {one.__name__}; expected an instance of it")
            inner = any(getattr(one, part, None) is not None for part in (key, f"{key}s"))
            if one is not None and not inner and not callable(getattr(one, method, None)):
                raise UsageError(f"{name}: `{key}` is {a(one)}; expected the {key} itself, an object with {method}()")
    for key, what in (("accumulation_steps", "micro-batches"), ("total_steps", "optimizer steps")):
        number = given.get(key)
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise UsageError(f"{name}: {key} is {number!r}; expected a whole number of {what}, 1 or more")
    for key in ("max_grad_norm", "pad_token_id"):
        if isinstance(given.get(key), (str, bool, list, tuple, Mapping)):
            raise UsageError(f"{name}: {key} is {a(given[key])}; expected a number")
    corpus = given.get("corpus")
    if isinstance(corpus, (str, bytes)):
        raise UsageError(f"{name}: `corpus` is one {type(corpus).__name__}; expected an iterable of strings: [text, ...]")
    if corpus is not None and not isinstance(corpus, Iterable) and not hasattr(corpus, "__getitem__"):
        raise UsageError(f"{name}: `corpus` is {a(corpus)}; expected an iterable of strings")


def check_roles(roles: Any, batches: Sequence[Mapping[str, Any]], name: str) -> None:
    """`UsageError` for `token_roles` that cannot belong to the first batch.

    A loss may join or pad what the batch holds, so one length that fits is enough here; the ids that the model really looks up
    decide about the rest.
    """
    if roles is None or not batches:
        return
    import torch

    what = "expected an int tensor [batch, time] (0 prompt, 1 answer, 2 template), or the name of a batch entry that holds it"
    if isinstance(roles, str):
        if roles not in batches[0]:
            has = ", ".join(map(str, batches[0]))
            raise UsageError(f"{name}: token_roles names {roles!r}, which is no entry of the first batch; it has {has}")
        what, roles = f"entry {roles!r} of the batch; {what}", batches[0][roles]
    try:
        value = torch.as_tensor(roles)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{name}: token_roles is {a(roles)}; {what}") from None
    if value.dim() != 2 or value.is_floating_point() or value.is_complex():
        kind = str(value.dtype).removeprefix("torch.")
        raise UsageError(f"{name}: token_roles is {kind} of shape {list(value.shape)}; {what}")
    if value.numel() and int(value.max()) > 2:
        raise UsageError(f"{name}: token_roles holds {int(value.max())}; {what}")
    shapes = {
        k: list(v.shape) for k, v in batches[0].items() if isinstance(v, torch.Tensor) and v.dim() >= 2 and v is not roles
    }
    if shapes and not set(value.shape) & {size for shape in shapes.values() for size in shape[:2]}:
        has = ", ".join(f"{k} {shape}" for k, shape in list(shapes.items())[:4])
        raise UsageError(
            f"{name}: token_roles has shape {list(value.shape)}; expected that of the ids of the first batch, of {has}"
        )


def check_pad_id(pad: Any, model: torch.nn.Module, batches: Sequence[Mapping[str, Any]], name: str) -> None:
    """`UsageError` for a padding id that no table of the model can hold and no batch contains.

    The largest size of any parameter bounds every table; tables that are not there as they are (lazy, sharded away) tell nothing.
    """
    import torch

    if not isinstance(pad, int):
        return
    parameters = list(model.parameters())
    if not parameters or any(torch.nn.parameter.is_lazy(p) or not p.numel() for p in parameters):
        return
    most = max(size for p in parameters for size in (*p.shape, 1))
    most = max([most, *(n for m in model.modules() if isinstance(n := getattr(m, "num_embeddings", None), int))])
    if pad < most or _holds(batches, pad):
        return
    tables = [(n, m.num_embeddings) for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding)]
    has = (
        f"its tables have {', '.join(f'{rows} rows ({n})' for n, rows in tables[:3])}" if tables else f"no size exceeds {most}"
    )
    raise UsageError(
        f"{name}: pad_token_id is {pad}, beyond every table of the model ({has}); expected the id that batches pad with"
    )


def _holds(batches: Sequence[Mapping[str, Any]], wanted: int) -> bool:
    import torch

    tensors = (v for b in batches for v in b.values() if isinstance(v, torch.Tensor) and not v.is_floating_point())
    return any(bool((t == wanted).any()) for t in tensors)
