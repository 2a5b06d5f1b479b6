"""Facts about who sees whom. B examples, T positions, S source positions (whose token is changed)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ghoststep.evidence.base import Evidence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Region(enum.Enum):
    """Which relation of source and target a reading belongs to."""

    PAST = "the own past"
    SELF = "the position itself"
    FUTURE = "the future"
    PADDING = "padding, as seen by real tokens"
    OTHER_DOCUMENT = "another announced document of the same example"
    OTHER_EXAMPLE = "another example of the batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The strongest influence found in one region, with its place.

    `relative` is the change of the target's hidden state (at the head's input) over that of the own past, `absolute` that change
    over the typical norm of a hidden state (swap), or the gradient's L2 norm (gradient). `source` and `target` are
    (example, position). `num_pairs` pairs were looked at, `num_above` of them lie above the floor.
    `text` says which of several texts of one call it is about ("" for the only one).
    `method` is "swap" or "gradient". `mode` is "train" or "eval": the mode the model was in.
    """

    region: Region
    relative: float
    absolute: float
    source: tuple[int, int]
    target: tuple[int, int]
    num_pairs: int
    method: str
    mode: str
    num_above: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalIntent:
    """Whether a trained position is meant not to see later tokens. None: nothing says so. `source` says what decides."""

    causal: bool | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence(Evidence):
    """Influence on the first batch, in the user's own call and mode.

    matrix_ST: float64 relative influence of source on target within one example (NaN: not looked at); `matrix_example` says
        which. readings / gradient_readings: the strongest by region, by swapped tokens and by gradient (absent: the region is
        empty here). A swap sees discrete routing, a gradient sees what rounding hides from a swap.
    trained_future / trained_future_gradient: the strongest future on positions that carry loss (None: nothing looked at).
    floor: relative swap influence below which a reading is rounding. past: the smallest influence of the own past that was
        seen, over the typical norm of a hidden state (power): a clear needs past > floor. num_past: pairs behind it.
    near_past: (visible, looked at): positions that see the token right before them, in the same document. blind_example:
        (example, position) in an example where every position looked at sees none of its past, or None.
    order_change: change when a few earlier tokens change places, over that when they are replaced (None: not looked at);
        order_floor: the ratio that rounding alone can reach.
    has_attention: an attention operation, or a softmax over positions, ran. probes_perturbed: zero-initialised parameters were
        perturbed for power (and put back). nothing_visible: (example, position) of real tokens whose keys were all masked, or
        whose output alone is NaN. is_causal_by_measure: no real position moved with a later one above the floor.
    coupled: "" (examples do not see each other), "continuous" (shared statistics, mixed dimensions) or "discrete" (routing).
    encoder_padding: the padding looked at is an encoder's, read at its decoder.
    is_time_first: the model takes [T, B]; example and position are told as meant, not as they stand in its tensors.
    against_order: routing couples examples, and only later ones were seen to move earlier ones: tokens are not served in order.
    choice_unprobed: a discrete choice among scores (routing) ran, and --fast replaced too few tokens to see one tip over.
    separators: (example, position) of BOS/EOS tokens in the middle of an example where no boundary is announced.
    num_texts: texts that the call looks up and that do not meet; readings are the strongest of any, `trained_future` and the
        matrix are the last one's. unread: which of them could not be looked at, and why ("": all were).
    serial: examples were probed one at a time. readout: where the influence was measured.
    num_forward / num_backward: passes over the whole batch that this cost.
    """

    matrix_ST: NDArray[np.float64]
    matrix_example: int
    readings: Mapping[Region, Reading]
    gradient_readings: Mapping[Region, Reading]
    trained_future: Reading | None
    trained_future_gradient: Reading | None
    intent: CausalIntent
    floor: float
    past: float
    num_past: int
    near_past: tuple[int, int]
    blind_example: tuple[int, int] | None
    order_change: float | None
    order_floor: float
    has_attention: bool
    probes_perturbed: bool
    nothing_visible: tuple[tuple[int, int], ...]
    is_causal_by_measure: bool
    coupled: str
    against_order: bool
    is_time_first: bool
    encoder_padding: bool
    mode: str
    serial: bool
    readout: str
    num_examples: int
    num_forward: int
    num_backward: int
    choice_unprobed: bool = False
    separators: tuple[tuple[int, int], ...] = ()
    num_texts: int = 1
    unread: str = ""
    reasons: tuple[str, ...] = field(default=())

    @property
    def has_power(self) -> bool:
        """True if the own past was seen: only then does silence mean anything."""
        return self.num_past > 0 and self.past > self.floor
