"""Facts about optimizer steps: what the watch saw while training, or what its record says afterwards.

Norms are L2. "Before" is after the last backward of a step and before any clipping, "after" is what the optimizer was given.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ghoststep.evidence.base import Evidence
from ghoststep.evidence.training import OptimizerGroup


class StepOutcome(enum.Enum):
    """What became of the gradients of a step."""

    STEPPED = "stepped"
    SKIPPED_BY_SCALER = "skipped by the loss scaler"
    SKIPPED_BY_POLICY = "skipped by ghoststep"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One place in the batch whose gradient, at the output of an input embedding, is among the largest of its step on this rank.

    This gradient is this rank's own, before any reduction, and free of the loss scale. micro_batch, example, position: counted
    from 0. gradient_norm: float64, overflow-free; of this one place (a token that occurs twice has two). row_norm_before and
    row_norm_after: float64 norm of the table row before and after the optimizer step; None where the row was not readable
    (sharded, frozen under a quantisation).
    """

    table: str
    token_id: int
    micro_batch: int
    example: int
    position: int
    gradient_norm: float
    row_norm_before: float | None = None
    row_norm_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOutlier:
    """A parameter whose gradient norm left its own history: `typical` is the median of its last norms (at least 20 steps)."""

    parameter: str
    norm: float
    typical: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of one rank, taken or skipped. None where a quantity was not seen (`RunFacts.unseen` says why).

    number: from 1, goes on after a resume. seconds: since the end of the step before. num_dropped: backwards before this step
    whose gradients were set to None before any step could use them, where no other model's optimizer had stepped since.
    num_tokens: ids looked up in the input tables on this rank. loss: sum of what `backward` was called on, free of the loss
    scale: their mean where the loop divides by the number of micro-batches. norm: of all gradients of this rank's shards, in
    float32 as torch computes it, so that it is inf where the squares overflow; NaN if a gradient holds one. *_after: of models of
    more than 512 tensors, a part is measured, and one factor carries it over to the others. tables: embedding tables; trunk:
    everything else. num_gradients: tensors with a gradient before. num_zero_*: of those, tensors whose gradient is exactly zero.
    nonfinite_*: names of at most four tensors with inf or NaN in the gradient, num_nonfinite_* counts all. lrs: of each optimizer
    group. scale: the loss scale during the step. moved: norm of the change over the norm, of a fixed sample of weights
    (`RunFacts.num_sampled`). clip_bound: max_norm of the clip that ran in this step; None if none was seen. clip_action: what
    ghoststep's clip did, or "". num_graph_nodes: nodes of the loss's autograd graph, in the steps where they were counted.
    kept_gradients: True where the gradients of an optimizer that stepped were not cleared since its last step, so that the
    backward added to them; False where something cleared or changed them; None where neither was seen (records of earlier
    versions too). stuck: at the end of every 64th step that was taken, where 16-bit weights train by an optimizer of torch: of
    the sampled elements with a finite non-zero gradient in each of those steps, the share that had one and the same value all the
    while, each element weighted by how much of the model it stands for; else None, also where gradients and loss have fallen to
    next to nothing.
    """

    number: int
    ended_at: float
    seconds: float | None = None
    outcome: StepOutcome = StepOutcome.STEPPED
    num_micro_batches: int = 1
    num_dropped: int = 0
    num_tokens: int = 0
    loss: float | None = None
    norm: float | None = None
    tables_norm: float | None = None
    trunk_norm: float | None = None
    norm_after: float | None = None
    trunk_norm_after: float | None = None
    num_gradients: int = 0
    num_zero_before: int = 0
    num_zero_after: int = 0
    num_nonfinite_before: int = 0
    num_nonfinite_after: int = 0
    nonfinite_before: tuple[str, ...] = ()
    nonfinite_after: tuple[str, ...] = ()
    lrs: tuple[float, ...] = ()
    scale: float | None = None
    moved: float | None = None
    clip_bound: float | None = None
    clip_action: str = ""
    rows: tuple[StepRow, ...] = ()
    outliers: tuple[TensorOutlier, ...] = ()
    num_graph_nodes: int | None = None
    kept_gradients: bool | None = None
    stuck: float | None = None
    norms: bytes = b""
    """Full detail only: float32 gradient norm before clipping of each tensor of `RunFacts.trainable`, -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """One embedding table of the watched model; `name` is the parameter's first name."""

    name: str
    num_rows: int
    num_dims: int
    is_trainable: bool
    is_tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedFacts:
    """Parameters with requires_grad that are not trained, as of the last flush of this process. At most 8 names of each kind.

    unheld: no optimizer that has stepped holds them; of those, num_unheld_alive had a gradient that is not zero, and num_idle
    are in an optimizer that the watch was given and that never stepped (each is one of the two at least). num_strange:
    trainable tensors in optimizers that stepped that are none of the model's and never had a gradient (0 where nothing is
    unheld). absent: held, and never had a gradient at all. still: held, and had none or one of exactly zero in at least the
    last `QUIET_STEPS` steps in which others learned; still_since: the last step in which it was not zero, of each name; 0:
    never.
    """

    unheld: tuple[str, ...] = ()
    num_unheld: int = 0
    num_unheld_alive: int = 0
    num_idle: int = 0
    num_strange: int = 0
    absent: tuple[str, ...] = ()
    num_absent: int = 0
    still: tuple[str, ...] = ()
    num_still: int = 0
    still_since: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known about a run on one rank beside its steps (its manifest).

    trainable: names of the parameters that train, in the model's order. unseen: quantity of `Step` → why it is not seen.
    tokenizer: fingerprint of the tokenizer, or "". tokens: id → decoded text of ids that steps name, not escaped. schedule: class
    of the learning-rate scheduler, or "". parallelism: "", "DDP", "FSDP2", ... detail: "default" or "full". untrained: None where it
    was not looked at, or for fewer than `QUIET_STEPS` steps.
    """

    run_id: str = ""
    rank: int = 0
    world_size: int = 1
    started_at: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    num_parameters: int = 0
    num_sampled: int = 0
    trainable: tuple[str, ...] = ()
    tables: tuple[TableFacts, ...] = ()
    groups: tuple[OptimizerGroup, ...] = ()
    optimizers: tuple[str, ...] = ()
    schedule: str = ""
    parallelism: str = ""
    tokenizer: str = ""
    detail: str = "default"
    unseen: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[int, str] = field(default_factory=dict)
    untrained: UntrainedFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Steps that the record lacks: after step `after` (0: before the first), and why."""

    after: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's steps, by number. is_closed: the watch said goodbye (False: killed, crashed, or still running)."""

    facts: RunFacts
    steps: tuple[Step, ...]
    gaps: tuple[Gap, ...] = ()
    is_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Evidence):
    """A run: live, one rank and a window of its last steps; replayed, every rank and all steps.

    broken: what failed in ghoststep itself while watching, by hook. A check judges each step by the steps before it only, at most
    `HISTORY` of them, so that the window and the whole record give the same answer.
    """

    ranks: tuple[RankRecord, ...]
    is_live: bool = False
    broken: tuple[str, ...] = ()


UNWATCHED = "unwatched parameters"
"""Key in `RunFacts.unseen`: parameters that train since some time after the start and are in no norm."""

OWN_GRADIENTS = "gradients of one rank only"
"""Key in `RunFacts.unseen`: why ranks may rightly step with unequal gradients under DDP."""

STUCK_STEPS = 64
"""Steps that a value of `Step.stuck` is about. Long enough that an element whose update is near half a spacing moves once (Adam's
updates of one element vary by some ten within as many steps), short enough to be in the record of a small fine-tuning."""

HISTORY = 256
"""Steps of history that a check may look back on."""

QUIET_STEPS = 64
"""Steps in which others learn and a parameter does not that are no chance any more: one that every tenth batch uses is left out of
so many with a chance of 1e-3, one that half of them use with 5e-20."""
