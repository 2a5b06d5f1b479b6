"""Influence: which outputs move when a token changes, in the user's own call of the model. B examples, T positions.

Two readings. *Swap*: ordinary tokens are replaced, and hidden states compared with those of the unchanged batch, run under the
same random state: a true decoder shows exactly 0. *Gradient*: one backward from a few positions to the embedding's output: no
difference is taken, so it sees weights of 1e-26; it is blind to discrete routing, which the swap sees.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Region
from ghoststep.evidence.loss import LossXray
from ghoststep.instruments.live.base_probe import BaseProbe
from ghoststep.instruments.live.batch_facts import is_sequence_to_sequence
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.influence_intent import causal_intent
from ghoststep.instruments.live.influence_layout import batch_stands_first, has_pads_inside, no_order
from ghoststep.instruments.live.influence_order import order_change
from ghoststep.instruments.live.influence_plan import Block, document_stop, positions, turned
from ghoststep.instruments.live.influence_power import lifted, switched_off
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_regions import Regions
from ghoststep.instruments.live.influence_result import influence_of, nothing_visible_at_all, power
from ghoststep.instruments.live.influence_session import Session, swap_floor
from ghoststep.instruments.live.influence_streams import facts_of, joined, texts_apart
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

CONFIRMATIONS = 3
"""Repeats with other tokens before a future that no gradient shows is taken for a choice that flipped under rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    setup: Setup
    call: LiveCall
    batch: BatchFacts | Missing
    xray: LossXray | Missing
    stream: torch.Tensor | None = None

    def probe(self, *, training: bool | None = None) -> Probe:
        """A probe of the first call, of one of its texts where one is named."""
        return Probe(self.call, training=training, stream=self.stream)


@instrument
def influence(
    setup: Setup, call: LiveCall, base: BaseProbe, batch: BatchFacts | Missing, xray: LossXray | Missing
) -> Influence:
    """Measure influence on the first batch. Cost, in passes over the batch up to the head: 7 forwards and 2 backwards (no
    gradient of parameters); one more for padding, one for dropout, two for expert routing, two for a model in eval mode that
    differs in train mode, 5 to 13 where examples see each other; with `setup.fast` 3 forwards and 1 backward; all of that and
    one more for each text where a call looks several up that do not meet. Nothing is changed; see `untouched`.

    Models whose mixing is switched off by zeros are measured with those parameters perturbed, and put back bit for bit.
    """
    given = _Given(setup=setup, call=call, batch=batch, xray=xray)
    texts = [] if is_sequence_to_sequence(call, setup.intent) else texts_apart(base.probe)
    main = _look(given, base.probe)
    if not texts:
        return main

    def look(number: int, ids: torch.Tensor) -> Influence | str:
        if ids.dim() != 2:
            return "its ids have no dimension of examples"
        try:
            facts = facts_of(batch, call, ids, number, len(texts))
            one = replace(given, stream=ids, batch=facts, xray=Missing(reason="read for each text by itself"))
            return _look(one, one.probe())
        except (CannotLook, DoesNotApply) as reason:
            return str(reason)

    return joined(main, texts, look)


def _look(given: _Given, first: Probe) -> Influence:
    setup, call, batch, xray = given.setup, given.call, given.batch, given.xray
    off = switched_off(call.core, vectors=False)
    with lifted(off) if off else nullcontext():
        sessions = _measure(given, None if off else first)
    if not power(sessions[0].swaps, sessions[0].floor)[1] and not power(sessions[0].gradients, 0.0)[1]:
        more = switched_off(call.core, vectors=True)
        if len(more) > len(off):
            off = more
            with lifted(off):
                sessions = _measure(given, None)
    plain, order = sessions[0], None
    if not setup.fast and not nothing_visible_at_all(plain):
        if off:
            plain = _session(given, first.turned() if sessions[0].probe.time_first else first)
            plain.coupled = sessions[0].coupled
        quiet = _without_random(given, plain)
        order = None if quiet is None else order_change(quiet)
    if sessions[0].probe.time_first:
        batch, xray = turned(sessions[0].at.ids, batch, xray)
    intent = causal_intent(setup, call, plain.at.ids, batch, xray)
    found = influence_of(sessions, plain, order, intent, batch, perturbed=bool(off))
    return replace(found, choice_unprobed=setup.fast and sessions[0].probe.attention.num_choices > 0)


def _session(given: _Given, probe: Probe) -> Session:
    import torch

    mode = "train" if probe.training else "eval"
    floor = swap_floor(probe.readout.dtype)
    special: frozenset[int] = frozenset()
    if isinstance(given.batch, BatchFacts):
        known = (*given.batch.eos_ids, given.batch.bos_id, given.batch.pad_id)
        special = given.batch.special_ids | {i for i in known if i is not None}
    at = positions(probe.ids_BT.numpy(), given.batch, given.xray, is_decoder=probe.num_streams > 1)
    session = Session(
        probe=probe, at=at, special=special, swaps=Regions("swap", mode), gradients=Regions("gradient", mode), floor=floor,
    )  # fmt: skip
    finite_BT = torch.isfinite(probe.base).all(dim=-1).numpy()
    if not (finite_BT & at.real).any() and not nothing_visible_at_all(session):
        raise CannotLook("the model's hidden states on this batch are not finite at any real position")
    return session


def _without_random(given: _Given, session: Session) -> Session | None:
    """The session, or one in eval mode where random numbers are drawn: dropout falls by position, so it tells places apart in a
    model that cannot. None if eval mode draws them too. One forward where it is needed."""
    if not session.probe.stochastic:
        return session
    try:
        probe = given.probe(training=False)
        other = _session(given, probe.turned() if session.probe.time_first else probe)
    except CannotLook as reason:
        session.reasons.append(f"the order of tokens in eval mode: {reason}")
        return None
    session.probe.num_forward += probe.num_forward + (1 if len(session.examples) > 1 and not session.coupled else 2)
    if probe.stochastic:
        session.reasons.append("random numbers are drawn in eval mode too: whether order matters cannot be told from them")
        return None
    other.coupled = session.coupled
    return other


def _measure(given: _Given, probe: Probe | None) -> list[Session]:
    """All passes in the user's mode and, where it is eval and differs, a few in train mode."""
    fast = given.setup.fast
    session = _session(given, probe or given.probe())
    examples = session.examples
    if not examples:
        raise DoesNotApply("every example has a single real position: there is nothing to see")
    if nothing_visible_at_all(session):
        session.reasons.append("no hidden state is finite: who sees whom could not be looked at")
        return [session]
    _first_swaps(session, examples, fast=fast)
    if session.coupled:
        session = _time_first(given, session) or session
        examples = session.examples
    if session.coupled:
        _one_by_one(session, examples, fast=fast)
    elif not fast:
        session.swap(session.blocks(examples, 2, suggested=True), across=False)
        session.swap(session.blocks(examples, 5), across=False)
        for i in (3, 4) if session.probe.attention.num_choices else ():
            session.swap(session.tails(examples, i, alike=i == 4), across=False)
    if not fast:
        session.pads()
        session.encoder_pads(given.batch.pad_id if isinstance(given.batch, BatchFacts) else None)
    if session.coupled != "continuous":
        session.gradient(*(session.targets(examples, i) for i in range(1 if fast else 2)))
    _confirm(session)
    if fast or session.probe.training or session.coupled:
        return [session]
    probe = given.probe(training=True)
    other = _session(given, probe.turned() if session.probe.time_first else probe)
    if not _differ(session, other):
        return [session]
    _first_swaps(other, examples, fast=True)
    if other.coupled:
        _one_by_one(other, examples, fast=True)
    _confirm(other)
    return [session, other]


def _time_first(given: _Given, session: Session) -> Session | None:
    """A session with batch and time exchanged if that is how the model runs: what looked like other examples are earlier
    tokens, and the examples do not see each other."""
    alone = replace(session, swaps=Regions("swap", session.swaps.mode), swap_rows=[])
    alone.swap(alone.blocks(session.examples[:1], 0), across=True)
    if power(alone.swaps, session.floor)[1]:
        return None
    if batch_stands_first(given.call, session.probe):
        return None
    turned = _session(given, session.probe.turned())
    if not turned.examples or has_pads_inside(turned):
        return None
    _first_swaps(turned, turned.examples, fast=given.setup.fast)
    session.probe.num_forward, session.probe.num_backward = turned.probe.num_forward, turned.probe.num_backward
    if turned.coupled or not power(turned.swaps, turned.floor)[1] or no_order(turned):
        return None
    turned.reasons.append("the model takes time before batch: examples are the second dimension of its ids")
    return turned


def _differ(one: Session, other: Session) -> bool:
    """Train and eval mode compute different hidden states: a leak may live in one of them only."""
    import torch

    return not torch.equal(one.probe.base.nan_to_num(0.0), other.probe.base.nan_to_num(0.0))


def _first_swaps(session: Session, examples: list[int], *, fast: bool) -> None:
    """Replace a block in every second example, then in the others: the untouched ones show whether examples see each other."""
    session.swap(session.blocks(examples[0::2], 0), across=True)
    if not fast or len(examples) == 1:
        session.swap(session.blocks(examples[1::2] or examples, 1), across=True)
    other = session.swaps.tallies.get(Region.OTHER_EXAMPLE)
    session.coupled = ""
    if other is None or other.absolute <= session.floor * session.swaps.reference():
        return
    noise = _noise(session)
    if noise > 0.1 * other.absolute:
        session.reasons.append(
            f"two runs of the same batch differ by {noise:.2g} of a hidden state: weaker influence is not seen"
        )
        session.floor = max(session.floor, 10 * noise / session.swaps.reference())
        return
    kept = session.gradients
    session.gradients = Regions("gradient", kept.mode)
    for chosen in dict.fromkeys((examples[0], examples[-1])):  # a leak may flow one way through the batch only
        session.gradient(session.targets([chosen], 0))
    across = session.gradients.tallies.get(Region.OTHER_EXAMPLE)
    session.coupled = "continuous" if across is not None and across.absolute > 0 else "discrete"
    if session.coupled == "discrete":
        session.gradients, session.gradient_rows = kept, []


def _raise_floor(session: Session, seen: float) -> bool:
    """Run the unchanged batch again: True if what was seen is no more than two equal runs differ by."""
    noise = _noise(session)
    if noise <= 0.1 * seen:
        return False
    session.reasons.append(f"two runs of the same batch differ by {noise:.2g} of a hidden state: weaker influence is not seen")
    session.floor = max(session.floor, 10 * noise / session.swaps.reference())
    return True


def _noise(session: Session) -> float:
    import numpy as np

    from ghoststep.instruments.live.influence_regions import changes

    change_BT = changes(session.probe.hidden(), session.probe.base)[session.at.real]
    return float(np.max(change_BT)) if change_BT.size else 0.0


def _one_by_one(session: Session, examples: list[int], *, fast: bool) -> None:
    """Examples see each other: only one of them may change at a time, and which one matters (routing has an order)."""
    session.swaps = Regions("swap", session.swaps.mode)
    chosen = examples if len(examples) <= 4 else [*examples[:2], *examples[-2:]]
    for i, b in enumerate(chosen):
        session.swap(session.blocks([b], i), across=True)
        if session.coupled == "discrete" and not fast:
            session.swap(session.tails([b], i + 1, alike=False), across=True)
            session.swap(session.tails([b], i + 2, alike=False), across=True)


def _confirm(session: Session) -> None:
    """A future seen by swap alone may be a top-k choice that flipped under rounding: other replacements must show it again."""
    if session.coupled == "discrete":
        session.swaps.adopt_out_of_order(session.floor)
    tally = session.swaps.tallies.get(Region.FUTURE)
    gradient = session.gradients.tallies.get(Region.FUTURE)
    reference = session.swaps.reference()
    if tally is None or tally.absolute <= session.floor * reference:
        return
    if gradient is not None and gradient.absolute > 0:
        return
    if _raise_floor(session, tally.absolute):
        return
    example, start = tally.source
    stop = document_stop(session.at, example, start)
    half = Block(example=example, start=start, stop=start + max(1, (stop - start) // 2))
    kept = session.swaps
    for i in range(CONFIRMATIONS):
        session.swaps = again = Regions("swap", kept.mode)
        session.swap([half if i == 0 or session.coupled else replace(half, stop=stop, alike=True)], across=True)
        seen = again.tallies.get(Region.FUTURE)
        if seen is not None and seen.absolute > session.floor * reference:
            session.swaps = kept
            return
    session.swaps = kept
    session.reasons.append("a future seen once was not seen again with other tokens: a routing choice that flipped")
    for future in (tally, kept.trained_future):
        future.absolute = 0.0
        future.values = [0.0] * len(future.values)
