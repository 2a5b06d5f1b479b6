"""A fault of ours never reaches the user's training: it is kept, told at the end, and the hook that had it stays quiet."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any

from ghoststep.text import error_text, visible

logger = logging.getLogger("ghoststep.watch")


class Faults:
    """What failed in ghoststep itself while watching: hook → what it raised, in the order of their first failure."""

    def __init__(self) -> None:
        self.by_hook: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self.by_hook)

    def keep(self, hook: str, error: BaseException) -> None:
        """Remember a hook's first failure and log it once."""
        if hook not in self.by_hook:
            self.by_hook[hook] = error_text(error)
            logger.warning(
                "the hook %r of ghoststep failed and is off from here on; training goes on\n%s", hook, traceback_text(error)
            )

    def lines(self) -> tuple[str, ...]:
        """One line a hook, for `RunRecord.broken`."""
        return tuple(f"{hook}: {said}" for hook, said in self.by_hook.items())

    def guarded(self, hook: str, function: Callable[..., Any]) -> Callable[..., None]:
        """The function as a hook that never raises and always returns None; after its first failure it does nothing."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if hook in self.by_hook:
                return
            try:
                function(*args, **kwargs)
            except Exception as error:
                self.keep(hook, error)

        return call


def traceback_text(error: BaseException) -> str:
    """The traceback for a log, where `exc_info` would print the texts of a stranger's exceptions as they are: escaped and indented, so
    that none of their lines looks like one of the log's own."""
    try:
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip("\n").split("\n")
    except Exception:
        lines = [error_text(error)]
    return "\n".join(f"  {visible(line)}" for line in lines)
