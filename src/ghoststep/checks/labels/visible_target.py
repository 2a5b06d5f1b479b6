"""GS203."""

import math
from dataclasses import dataclass

from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence
from ghoststep.evidence.loss import LossXray
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.label_shift import at, counted, no_answer
from ghoststep.registry import Answer, NotApplicable, Unknown, answer, check


@check(code="GS203", severity=Severity.ERROR, basis=Basis.MEASURED)
def visible_target(
    xray: LossXray,
    batch: BatchFacts,
    influence: Influence,
    *,
    error_above: float = 1e-3,
    tolerated_share: float = 0.3,
) -> Answer:
    """A position's output depends on the very token that it is trained to predict.

    ## What it finds
    For positions t that carry loss with target ids[t + s], s = -1, 0 or 1: the influence [S, T] of position t + s on t is not 0. The
    target comes from the gradient of the user's own loss, the influence from changing tokens: neither is guessed.

    ## Why it matters
    The answer is in the input. The loss falls far below what language allows and the model is useless where the answer is absent.

    ## When it is not a problem
    Masked language models keep a tenth of the chosen tokens as they are; a prefix language model sees its whole prefix but is
    trained on what follows; text diffusion replaces what it predicts; the encoder of an encoder-decoder may see everything.

    ## How to confirm by hand
    Change one input token and look whether the logits move at the position whose label it is.

    ## How to fix
    Where s = 1, restore the causal mask. Where s = 0: shift the labels of a causal model; for a masked model never shift, but put the
    mask token into the input where a label stands, set the labels of tokens that are not masked to -100, and take the labels from the
    ids before they are masked. Where s = -1, the labels are shifted the wrong way.

    ## Options
    `error_above`: influence relative to the own past from which it is an error (1e-3); from a hundredth of it a warning.
    `tolerated_share`: share of the trained positions that may see their own token (0.3): kept tokens are 0.1 in BERT's recipe.

    ## References
    None.
    """
    refused = no_answer(xray)
    if refused:
        return Unknown(reason=refused)
    ids_of = batch.ids_BT.tolist()
    floor = max(0.01 * error_above, influence.floor)
    own, later, back = (_pointing(xray, batch, influence, step) for step in (0, 1, -1))
    num = sum(1 for _ in counted(xray, 0))
    power = Power(quantity="influence of the target token, relative to the own past", smallest_detectable=floor)
    is_hidden = batch.intent == "masked" and later.stand_at_one_token  # a repeated word, hidden once
    if later.above(floor) and len(later.targets) > tolerated_share * num and not is_hidden:
        found, which, fix = later, 1, "restore the causal mask"
    elif own.above(floor) and len(own.targets) > tolerated_share * num:
        if influence.is_causal_by_measure:
            return NotApplicable(reason="a causal model whose labels are not shifted: unshifted-labels judges it")
        found, which, fix = own, 0, _fix_of_own(influence, batch, num, own.targets)
    elif back.above(floor) and 2 * len(back.targets) > num and not influence.is_causal_by_measure:
        found, which, fix = back, -1, "shift the labels the other way, or, for a masked model, not at all"
    elif not influence.has_power:
        return Unknown(reason="the influence of the own past is not above the noise floor, so none would have been seen")
    elif not later.looked and len(own.targets) > tolerated_share * num and not own.looked:
        return Unknown(reason="the influence of the target tokens was not measured at the trained positions")
    else:
        return answer((), power=power, reason=f"{len(own.targets)} of {num} trained positions predict their own token")
    bad, looked, example = found.above(floor), found.looked, influence.matrix_example
    position, strength = max(bad, key=lambda p: p[1])
    token = ids_of[example][position + which]
    place = influence.trained_future.target if which and influence.trained_future is not None else (example, position)
    return answer(
        [
            Finding(
                message=f"the answer is visible: {len(bad)} of {len(looked)} positions looked at in example {example} depend on "
                f"the token they are trained to predict; position {position} predicts token {token}, which stands at position "
                f"{position + which}, and changing that token moves its output by {strength:.2g} of what its own past does. To fix, "
                f"{fix}.",
                where=Where(example=place[0], position=place[1]),
                measured=Quantity(value=strength, unit="influence relative to the own past"),
                expected=Quantity(value=0, unit="influence relative to the own past"),
                severity=Severity.ERROR if strength > error_above else Severity.WARNING,
            )
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pointing:
    """Trained positions whose target is the token at one step from them: their targets, over all examples, and (position,
    influence of that token) for those of the example whose matrix was measured."""

    targets: list[int]
    looked: list[tuple[int, float]]
    own_ids: list[int]

    @property
    def stand_at_one_token(self) -> bool:
        """True if most of these positions themselves hold one and the same token: a mask token."""
        return bool(self.own_ids) and max(map(self.own_ids.count, set(self.own_ids))) > 0.6 * len(self.own_ids)

    def above(self, floor: float) -> list[tuple[int, float]]:
        return [p for p in self.looked if p[1] > floor]


def _pointing(xray: LossXray, batch: BatchFacts, influence: Influence, step: int) -> _Pointing:
    """Targets that a token nearer to the position (its own; for -1 also the next one) would explain as well do not count."""
    ids_of, targets, looked, own_ids = batch.ids_BT.tolist(), [], [], []
    for c in counted(xray, 0):
        ids, t = ids_of[c.example], c.position
        nearer = {0: [], 1: ids[t : t + 1], -1: ids[t : t + 2]}[step]
        if not 0 <= t + step < len(ids) or ids[t + step] != c.target or c.target in nearer:
            continue
        targets.append(c.target)
        own_ids.append(ids[t])
        strength = at(influence.matrix_ST, t + step, t)
        if c.example == influence.matrix_example and not math.isnan(strength):  # NaN: not looked at
            looked.append((t, strength))
    return _Pointing(targets=targets, looked=looked, own_ids=own_ids)


def _fix_of_own(influence: Influence, batch: BatchFacts, num: int, own_targets: list[int]) -> str:
    """What to do where positions see their own target: depends on what the model is meant to be, and on where labels stand."""
    if influence.intent.causal:
        return "restore the causal mask and shift the labels"
    token = max(set(own_targets), key=own_targets.count)
    if own_targets.count(token) > 0.6 * len(own_targets):
        return (
            f"take the labels from the ids before they are masked: {own_targets.count(token)} of these targets are the same token "
            f"{token}, which is what stands in the masked input"
        )
    num_real = batch.ids_BT.size if batch.padding_BT is None else int((~batch.padding_BT).sum())
    if 2 * num > num_real:
        return "set the labels of tokens that are not masked to -100 (labels stand at nearly all positions)"
    return (
        "put the mask token into the input at the positions that carry labels: they still hold the token to be predicted (or shift the "
        "labels, if the model is meant to be causal)"
    )
