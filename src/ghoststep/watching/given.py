"""The arguments of `watch`, by what they can do: other libraries' optimizers, schedulers and tokenizers are as good as torch's. What
cannot be used is refused with what was got, what is expected, and what to do."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ghoststep.errors import UsageError
from ghoststep.sinks import Sink
from ghoststep.text import printable, visible

BUILD_IT = "torch.optim.AdamW(model.parameters())"


def got(value: object) -> str:
    """What was given, in a few words."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f"the text {printable(value)}"
    if isinstance(value, int | float):
        try:
            return f"the number {value!r:.40}"
        except ValueError:  # an int of thousands of digits
            return "a huge number"
    if isinstance(value, type):
        return f"the class {visible(value.__name__)}"
    name = visible(type(value).__name__)
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


def model(value: Any) -> Any:
    """A module of torch."""
    import torch

    if isinstance(value, torch.nn.Module):
        return value
    hint = "give the module that the loop calls: ghoststep.watch(model, optimizer)"
    if isinstance(getattr(value, "model", None), torch.nn.Module):  # a Trainer
        hint = "use a trainer's callback (ghoststep.integrations), or " + hint
    raise UsageError(f"model is {got(value)}; expected a torch.nn.Module: {hint}")


def optimizers(value: Any) -> list[Any]:
    """One, several in a list, or None; each once."""
    if value is None:
        return []
    found: list[Any] = []
    for number, one in enumerate(value) if isinstance(value, list | tuple) else [("", value)]:
        if not is_optimizer(one):
            where = "optimizer" if number == "" else f"optimizer[{number}]"
            raise UsageError(
                f"{where} is {got(one)}; expected an optimizer (an object with param_groups, such as {BUILD_IT}), several in a list, "
                "or None, for it to be found at its first step"
            )
        inner = _stepping(one)
        if not any(o is inner for o in found):
            found.append(inner)
    return found


def _stepping(optimizer: Any) -> Any:
    """The optimizer whose step torch tells of: Accelerate's and Lightning's have torch's own one inside and tell of nothing."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", ()):
        inner = getattr(optimizer, "optimizer", None)
        if inner is optimizer or not is_optimizer(inner):
            break
        optimizer = inner
    return optimizer


def is_optimizer(value: Any) -> bool:
    """True for what has parameter groups that can be read, and can be remembered without being kept alive."""
    if isinstance(value, type):
        return False
    try:
        sum(len(g["params"]) for g in value.param_groups)
        hash(value)
        weakref.ref(value)
    except Exception:  # a stranger's property may raise what it likes
        return False
    return True


def is_tokenizer(value: Any) -> bool:
    """True for what names tokens (`decode`) or shows its vocabulary (`get_vocab`); a processor of images does neither."""
    return not isinstance(value, str | bytes | type) and _can(value, ("decode", "get_vocab"))


def is_scheduler(value: Any) -> bool:
    """True for what steps, tells its learning rate, or has a state."""
    return not isinstance(value, type) and not is_optimizer(value) and _can(value, ("step", "get_last_lr", "state_dict"))


def is_scaler(value: Any) -> bool:
    """True for what scales a loss, or has a state."""
    return not isinstance(value, type) and _can(value, ("scale", "get_scale", "update_scale", "state_dict"))


def is_saver(value: Any) -> bool:
    """True for what saves and loads."""
    return not isinstance(value, type) and _can(value, ("save",)) and _can(value, ("load",))


HELPERS = {
    "tokenizer": (is_tokenizer, "a loaded tokenizer, with decode(ids): AutoTokenizer.from_pretrained(...)"),
    "scheduler": (is_scheduler, "one learning-rate scheduler, with get_last_lr() and state_dict()"),
    "scaler": (is_scaler, "a torch.amp.GradScaler, or another with state_dict()"),
    "saver": (is_saver, "an object with save(path) and load(path)"),
}
"""Argument that may be None → what is taken, and what to expect."""


def helper(name: str, value: Any) -> Any:
    """One of `HELPERS`, or None."""
    is_one, expected = HELPERS[name]
    if value is None or is_one(value):
        return value
    raise UsageError(f"{name} is {got(value)}; expected {expected}, or None")


def folder(value: Any) -> Path | None:
    """A path, or None."""
    if value is None:
        return None
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path:
        return Path(path)
    raise UsageError(f'run_dir is {got(value)}; expected the path of a folder for the record, such as "runs/1", or None')


def sinks(value: Any) -> tuple[Any, ...]:
    """One spec, or several specs and objects; each is opened, and looked at, when the watch starts."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, Sink):
        raise UsageError(f"sinks is {got(value)}; expected a list: sinks=[{type(value).__name__}(...)]")
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f'sinks is {got(value)}; expected a spec such as "jsonl:steps.jsonl", or a list of specs and objects')
    return tuple(value)


def policy(value: Any, actions: Sequence[str]) -> Any:
    """A word, or a mapping; `policy.parse` looks into it when the watch starts."""
    if value is None or isinstance(value, str | Mapping):
        return value
    raise UsageError(f'policy is {got(value)}; expected one of {", ".join(actions)}, or a mapping such as {{"GS401": "stop"}}')


def yes_or_no(name: str, value: Any) -> bool:
    """True or False; texts are all true to Python, "no" too."""
    if isinstance(value, bool):
        return value
    raise UsageError(f"{name} is {got(value)}; expected True or False")


def whole(name: str, value: Any, *, least: int) -> int:
    """A whole number; 64e6 is one too."""
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError):
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"{name} is {got(value)}; expected a whole number, {least} or more")
    return number


def seconds(name: str, value: Any) -> float:
    """Above 0; infinite is never."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise UsageError(f"{name} is {got(value)}; expected seconds, more than 0")
    return number


def _can(value: Any, methods: Sequence[str]) -> bool:
    try:
        return any(callable(getattr(value, m, None)) for m in methods)
    except Exception:  # a stranger's property may raise what it likes
        return False
