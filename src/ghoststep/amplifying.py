"""`ghoststep.amplify`: how hard this very model amplifies the gradient of one small input row, swept over norms and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    *,
    model: Any,
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
        model, loss_fn, setup: as in `ghoststep.check` (`max_grad_norm=` sets the clip bound that a lost step is judged by).
        batch: as fed in training; it decides which places there are. Without one, a causal language model of transformers gets
            made ones: 2 examples of 16 random ordinary tokens, also packed (block-diagonal mask, restarting positions) and
            left-padded. A place that the model cannot be shown (no packed masks) is in `skipped`, with the reason.
        rows: table rows to feed as they are, and along whose direction the norms are tried; None tries one random direction.
        norms: multiples of the table's median norm, above 0; by default 1, 1e-3, 1e-6, 1e-9, 1e-12, 1e-20 and 1e-30.
        places: some of "first position", "middle", "start of a packed document", "first after left padding"; empty for all.
        seed: of the made batches.

    Raises:
        UsageError: an unknown place or norm, or no batch for a model that none can be made for. CannotLook: nothing could be
            measured.

    Cost: one forward and backward for each norm, row and place; 28 by default.
    """
    from ghoststep.subjects.setup import make_setup

    unknown = [p for p in places if p not in PLACES]
    if unknown:
        raise UsageError(f"place {unknown[0]!r} is unknown; expected some of {', '.join(PLACES)}")
    if norms is not None and (not norms or not all(n > 0 for n in norms)):
        raise UsageError(f"norms is {list(norms)!r}; expected numbers above 0, as multiples of the median row norm")
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
