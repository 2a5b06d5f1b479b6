"""`ghoststep.amplify`: how hard this very model amplifies the gradient of one small input row, swept over norms and places."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, UsageError
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, PACKED, Amplification

if TYPE_CHECKING:
    from ghoststep.subjects.setup import Setup

PLACES = (FIRST, MIDDLE, PACKED, LEFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(Amplification):
    """The measured evidence, with its pictures. skipped: (place, reason) where one could not be measured."""

    skipped: tuple[tuple[str, str], ...] = ()

    def to_text(self, width: int = 80, color: bool = False) -> str:
        """The plot for a terminal, every reading, and the norms at which a step is lost; ends with a line feed."""
        from ghoststep.pictures.amplification import amplification_text

        left_out = "".join(f"{name}: not measured ({reason})\n" for name, reason in self.skipped)
        return amplification_text(self, width=width, color=color) + left_out

    def to_svg(self) -> str:
        """The plot as a self-contained SVG."""
        from ghoststep.pictures.amplification import amplification_svg

        return amplification_svg(self)

    def place(self, name: str) -> Any:
        """The `Place` of this name; `KeyError` names those that were measured."""
        for p in self.places:
            if p.name == name:
                return p
        raise KeyError(f"no place {name!r} was measured; there are {[p.name for p in self.places]}")


def amplify(
    model: Any = None,
    *,
    batch: Any = None,
    loss_fn: Any = None,
    rows: Sequence[int] | None = None,
    norms: Sequence[float] | None = None,
    places: Sequence[str] = (),
    seed: int = 0,
    **setup: Any,
) -> Sweep:
    """Feed one input row of each norm at each place and measure its gradient, and the norm of all gradients beside it.

    The row is fed through a hook, so nothing is written; the model, its dtype, its mode, the batch and the loss are your own. The
    gradient holds for one occurrence in a batch of this size: a mean over N loss tokens divides it by N.

    Args:
        model, loss_fn, setup: as in `ghoststep.check` (`max_grad_norm=` sets the clip bound that a lost step is judged by; 1 if it
            is not given or inf).
        batch: as fed in training; it decides which places there are. Within an example and among examples, a position is chosen
            that the loss depends on; a place without one is told as "not measured", its gradients being exactly 0. Without a
            batch, a causal language model of transformers gets
            made ones: 2 examples of 16 random ordinary tokens, also packed (block-diagonal mask, restarting positions) and
            left-padded. A place that the model cannot be shown (no packed masks) is in `skipped`, with the reason.
        rows: table rows to feed as they are, and along whose direction the norms are tried; None tries one random direction.
        norms: multiples of the table's median norm, above 0; by default 1, 1e-3, 1e-6, 1e-9, 1e-12, 1e-20 and 1e-30.
        places: some of "first position", "middle", "start of a packed document", "first after left padding"; empty for all.
        seed: of the made batches.

    Raises:
        UsageError: an unknown place or norm, rows that are no integers, a clip bound that is not above 0, or no batch for a model
            that none can be made for. CannotLook: nothing could be measured.

    Cost: one forward and backward for each norm, row and place, 28 by default, and one for each batch that places are chosen in.
    """
    from ghoststep.subjects.setup import make_setup

    places = _places(places)
    rows, norms = _rows(rows), _norms(norms)
    bound = setup.get("max_grad_norm")
    if bound is not None and not (_is_number(bound) and bound > 0):
        raise UsageError(f"max_grad_norm is {bound!r}; expected a number above 0, or None")
    given: Mapping[str, Any] = {**setup, "model": model, "loss_fn": loss_fn}
    if batch is not None or "batches" in setup:
        one = make_setup({**given, "batch": batch}, name="amplify")
        return _sweep(one, rows=rows, norms=norms, places=places)
    from ghoststep.instruments.live.amplification_batches import made_batches

    parts, skipped = [], []
    for names, make in made_batches(make_setup(given, name="amplify").model, seed):
        wanted = [n for n in names if not places or n in places]
        if wanted:
            try:
                parts.append(
                    _sweep(make_setup({**given, "batch": make()}, name="amplify"), rows=rows, norms=norms, places=wanted)
                )
            except CannotLook as reason:
                skipped += [(n, str(reason)) for n in wanted]
    if not parts:
        raise CannotLook("; ".join(f"{name}: {reason}" for name, reason in skipped))
    order = sorted((p for part in parts for p in part.places), key=lambda p: PLACES.index(p.name))
    passes = sum(p.num_passes for p in parts)
    return replace(parts[0], places=tuple(order), num_passes=passes, skipped=tuple(skipped))


def _places(places: Any) -> list[str]:
    expected = f"expected a list with some of {', '.join(PLACES)}"
    if isinstance(places, str) or not isinstance(places, Iterable):
        raise UsageError(f"places is {places!r}; {expected}")
    given = list(places)
    for place in given:
        if place not in PLACES:
            raise UsageError(f"place {place!r} is unknown; {expected}")
    return given


def _rows(rows: Any) -> list[int] | None:
    if rows is None:
        return None
    try:
        given = [operator.index(i) for i in rows] if not isinstance(rows, str) else []
    except TypeError:
        given = []
    if not given:
        raise UsageError(f"rows is {rows!r}; expected a list of table rows, such as [17]")
    return given


def _norms(norms: Any) -> list[float] | None:
    if norms is None:
        return None
    given = list(norms) if isinstance(norms, Iterable) and not isinstance(norms, str) else []
    if not given or not all(_is_number(n) and 0 < n < math.inf for n in given):
        raise UsageError(
            f"norms is {given or norms!r}; expected a list of numbers above 0, as multiples of the median row norm"
        )
    return [float(n) for n in given]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _sweep(setup: Setup, *, rows: Sequence[int] | None, norms: Sequence[float] | None, places: Sequence[str]) -> Sweep:
    from ghoststep.instruments.live.amplification import NORMS, sweep
    from ghoststep.instruments.live.batch_facts import batch_facts
    from ghoststep.instruments.live.calling import live_call
    from ghoststep.instruments.live.untouched import kept_whole

    with kept_whole([setup]):
        call = live_call(setup)
        batch = batch_facts(setup, call)
        found = sweep(setup, call, batch, norms=NORMS if norms is None else norms, places=places, rows=rows)
    return Sweep(**{f.name: getattr(found, f.name) for f in fields(found)})
