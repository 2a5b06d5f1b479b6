"""A watch that is made and never started watches nothing, in silence: it is told when it is closed, forgotten, or left at the end."""

from __future__ import annotations

import os
import weakref

from ghoststep.watching.users_line import Line, users_line

NEVER_STARTED = (
    "nothing was watched: this watch was never started. Use it as `with ghoststep.watch(...) as w:`, or call `w.start()` before the "
    "training and `w.close()` after it"
)


class Unstarted:
    """Stands beside a watch from its making to its start. Told once, at the line where the watch was made."""

    def __init__(self, watch: object) -> None:
        self._line = users_line()
        # A finalizer runs when the watch is collected, or else at the end of the interpreter, while modules are still alive.
        self._at_end = weakref.finalize(watch, _tell_at_end, self._line, os.getpid())

    def is_over(self) -> None:
        """The watch starts, or its start is refused by an error that the user sees: there is nothing to tell."""
        self._at_end.detach()

    def tell(self) -> None:
        """The watch is closed. Raises where the user turned warnings into errors, as any warning does."""
        if self._at_end.detach() is not None:
            self._line.warn(NEVER_STARTED)


def _tell_at_end(line: Line, pid: int) -> None:
    """A finalizer must not raise: Python would print a traceback. A forked child (a loader's worker) leaves it to its parent."""
    if os.getpid() == pid:
        line.warn_or_log(NEVER_STARTED)
