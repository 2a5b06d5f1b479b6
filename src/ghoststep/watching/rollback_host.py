"""What the guard of a rollback asks of the watch that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ghoststep.watching.judge import Alarm


class Host(Protocol):
    """What the guard asks of the watch. All calls come from the training thread, between two batches."""

    def steps_done(self) -> int:
        """Optimizer steps that are over, taken or skipped."""
        ...

    def flush(self) -> None:
        """Bring all steps to the host and judge them now."""
        ...

    def judged_until(self) -> int:
        """The last step that was judged."""
        ...

    def new_errors(self) -> Sequence[int]:
        """Steps at which errors began, since the last call."""
        ...

    def take_rollback(self) -> Alarm | None:
        """The alarm that asks for a rollback, once."""
        ...

    def losses(self, first: int, last: int) -> Sequence[float | None]:
        """Losses of these steps, after a flush."""
        ...

    def begin_comparison(self) -> None:
        """The next steps are no part of the run: not counted, not recorded, not judged. Their numbers go on, for `losses`."""
        ...

    def end_comparison(self) -> None:
        """The next step has the number that it would have had without the comparison."""
        ...

    def restarted(self) -> None:
        """The weights are another state: history and the step that was being put together are void."""
        ...

    def stop(self, reason: str) -> None:
        """Ask the loop to end."""
        ...

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Record what was done."""
        ...
