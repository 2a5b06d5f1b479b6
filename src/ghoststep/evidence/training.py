"""Facts about what really trains: parameters, optimizer, gradients and a few real steps of a setup."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ghoststep.evidence.base import Evidence


class Gradient(enum.Enum):
    """What a backward pass left in `.grad` of a parameter."""

    NONE = "None"
    ZERO = "exactly zero"
    NONFINITE = "not finite"
    NORMAL = "finite and not zero"
    FROZEN = "frozen"
    """`requires_grad` is False: none was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter of the model; a tied one is listed once, under its first name, with its other names in `aliases`.

    `group` is the optimizer group that holds it, or None. `gradient` is what one backward of the user's loss on the first batch
    left, with its L2 norm (float64; 0 for None), or None where no backward was run (`LiveWiring.gradient_reason` says why).
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    trainable: bool
    group: int | None
    gradient: Gradient | None = None
    gradient_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """One parameter group as it stands now. `initial_lr` is what a scheduler took as its base, None without one."""

    index: int
    optimizer: str
    lr: float
    initial_lr: float | None
    weight_decay: float
    num_tensors: int
    num_frozen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A tensor in the optimizer that the model does not hold. `gets_gradient`: the loss reaches it (a parameter of the loss)."""

    group: int
    shape: tuple[int, ...]
    dtype: str
    gets_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CutParameters:
    """Trainable parameters without gradient (None) whose value the loss depends on: the graph is cut between them and the loss.

    `loss_change` is how far the loss moved when they were perturbed together; `reason` is the cause as far as it was seen.
    """

    names: tuple[str, ...]
    loss_change: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSignal:
    """A trainable table (input embedding, or untied head) and which rows the first batch should have trained.

    `fed_rows`: ids of the batch whose positions received a gradient at the embedding's output. `masked_rows`: those of them
    whose gradient in the table itself is exactly zero although the table's is not: something zeroes it on purpose.
    """

    parameter: str
    fed_rows: tuple[int, ...]
    masked_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """`padding_idx` of the input embedding. `num_real`: positions of the batches that hold this id, are attended
    (attention_mask 1) and, where it was looked at, received a gradient at the embedding's output. `place` is the first one.
    gradient_error: norm of what the embedding drops of the table row's gradient, over the norm of the whole gradient."""

    module: str
    index: int
    num_real: int
    place: tuple[int, int] | None
    row_is_zero: bool
    gradient_error: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWiring(Evidence):
    """Parameters against optimizer, and one backward of the user's loss on the first batch. Cost: one forward and backward,
    and one forward for each group of parameters without gradient (at most 8).

    has_optimizer: one was given. holds_copies: it holds no parameter of the model but tensors of the same shapes (master
    weights): then `group` says nothing. gradient_reason: why no backward was run, else "". loss: its value on the first batch.
    grad_mode_before / after: gradient mode before the user's loss ran, and after. unused: trainable parameters without gradient
    that the loss does not depend on (experts without tokens, an unused pooler). undecided: without gradient, and dependence
    could not be tried. head: name of the output head's weight, embedding: of the input embedding's; "" if none.
    """

    parameters: tuple[ParameterFacts, ...]
    groups: tuple[OptimizerGroup, ...]
    orphans: tuple[Orphan, ...]
    has_optimizer: bool
    holds_copies: bool
    gradient_reason: str
    loss: float
    grad_mode_before: bool
    grad_mode_after: bool
    cut: tuple[CutParameters, ...] = ()
    unused: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    tables: tuple[TableSignal, ...] = ()
    padding_row: PaddingRow | None = None
    head: str = ""
    embedding: str = ""

    def named(self, name: str) -> ParameterFacts | None:
        """The parameter with this name or alias."""
        return next((p for p in self.parameters if p.name == name or name in p.aliases), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One call of `optimizer.step()`. `lrs` one a group; `gradient_norm` over all tensors of the optimizer as the step saw them;
    `backward_norm` the same as backward delivered it since the step before; `num_micro_batches` train_step calls since then."""

    lrs: tuple[float, ...]
    gradient_norm: float
    backward_norm: float
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSteps:
    """What the steps did to one parameter of the optimizer.

    norms: gradient norm as each step saw it (0 for None). num_pushed: elements with a finite non-zero gradient in the last step
    that had one; num_changed: of all elements, those whose value differs after all steps; num_lost: pushed and unchanged.
    max_change: the largest difference. leftover: L2 norm of what `.grad` already held when the first backward after a step
    began, the largest over the windows (0: cleared), and largest_gradient the norm it is to be compared with.
    kept_state: the optimizer keeps more tensors of the parameter's shape than two moments (it may compensate rounding).
    """

    name: str
    dtype: str
    group: int
    norms: tuple[float, ...]
    num_elements: int
    num_pushed: int
    num_changed: int
    num_lost: int
    max_change: float
    leftover: float
    largest_gradient: float
    typical_value: float = 0.0
    kept_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSteps:
    """Rows of a table that the first batch feeds and whose gradient is exactly zero in every step (so they are meant to stay).

    `ratios` are their L2 norms after all steps over before (1: unchanged); rows of norm 0 are left out.
    """

    parameter: str
    group: int
    rows: tuple[int, ...]
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe(Evidence):
    """A few real steps, taken and undone bit for bit. Cost: `num_calls` training steps and a copy of parameters and state.

    is_users: the user's own train_step ran; otherwise zero_grad, loss, backward, clip, step (then nothing is said about
    clearing). num_skipped: steps that a GradScaler left out; scales: loss scale before and after. scheduler_steps: how often
    the scheduler advanced (None without one). scheduler_is_bound: its optimizer is the setup's. lrs_ahead: largest learning
    rate of all groups over the next scheduler steps (NaN without a scheduler). changed_outside: parameters that are not in the
    optimizer and changed all the same (another optimizer trains them). grad_mode_after: gradient mode afterwards.
    accumulation_steps: micro-batches an optimizer step, as the setup declares them.
    """

    is_users: bool
    num_calls: int
    steps: tuple[StepFacts, ...]
    parameters: tuple[ParameterSteps, ...]
    rows: tuple[RowSteps, ...]
    num_skipped: int
    scales: tuple[float, float] | None
    scheduler_steps: int | None
    scheduler_is_bound: bool
    lrs_ahead: float
    changed_outside: tuple[str, ...]
    grad_mode_after: bool
    accumulation_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts(Evidence):
    """A scheduler against the optimizer. lrs_ahead: largest learning rate over the groups at each of the next steps, now first.

    is_adaptive: Adam-like (second moments). has_state: has stepped before.
    """

    lrs_ahead: tuple[float, ...]
    is_adaptive: bool
    has_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState(Evidence):
    """Trainable parameters after `save` and `load`, having been moved before: which came back.

    missing: absent from the loaded model. different: present with other values (largest difference over the move, by name).
    """

    num_compared: int
    missing: tuple[str, ...]
    different: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveProbe(Evidence):
    """A contrastive loss driven with chosen embeddings instead of the model's.

    num_examples: B. floor: the smallest loss that any embeddings of the model's kind reached. free_floor: the same when their
    length is free (a larger length acts as a larger scale; what remains is the loss's own, such as ln of the number of
    positives); NaN where the loss normalises by itself and is no plain softmax. collapsed: the loss when all embeddings are equal
    (ln B for InfoNCE).  scale: the logit scale of a softmax over cosines, NaN for
    other losses. is_learnable: the scale comes from a trainable parameter.
    duplicates: (example i, example j): the target of j has the token ids of i's own positive, and the loss pushes i away from it.
    duplicates_looked_at: False where token ids could not be matched to embeddings.
    """

    num_examples: int
    floor: float
    free_floor: float
    collapsed: float
    is_learnable: bool
    scale: float
    duplicates: tuple[tuple[int, int], ...]
    duplicates_looked_at: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows(Evidence):
    """Output rows of the tokens added at the end of the vocabulary, against the rows before them, on the first batch.

    first_row, num_rows: the added rows. mean_logit_new / mean_logit_old: mean logits over positions (and rows); spread_old: mean
    standard deviation of the others. share: softmax mass of the added rows, a mean over positions that none of them follows.
    norm_new / norm_old: mean L2 norm of the output rows (NaN: not measured). num_classes: V.
    """

    first_row: int
    num_rows: int
    num_classes: int
    mean_logit_new: float
    mean_logit_old: float
    spread_old: float
    share: float
    norm_new: float
    norm_old: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBound(Evidence):
    """The bound that the setup hands to gradient clipping (L2 norm); may be NaN, negative or inf."""

    max_grad_norm: float
