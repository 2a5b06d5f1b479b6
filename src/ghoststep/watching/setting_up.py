"""What the user wished, refused where it cannot work, and turned into the parts of a watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.evidence.steps import RunFacts
from ghoststep.remedies.clip_gradients import is_sharded
from ghoststep.sinks import Sinks
from ghoststep.text import counted
from ghoststep.watching import given
from ghoststep.watching.flushing import Flusher
from ghoststep.watching.forensics import BatchKeeper
from ghoststep.watching.guarded import Faults
from ghoststep.watching.judge import Judge
from ghoststep.watching.policy import ACTIONS, Means, Policy, parse
from ghoststep.watching.recorder import Recorder
from ghoststep.watching.spool import Spool
from ghoststep.watching.state_saver import cannot_roll_back
from ghoststep.watching.strict import Decider, StrictStep, cannot_skip

if TYPE_CHECKING:
    import torch

    from ghoststep.watching.listening import Listening

DETAILS = ("default", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The arguments of `watch`."""

    run_dir: Path | None = None
    policy: str | Mapping[str, str] | None = None
    strict: bool = False
    sinks: tuple[Any, ...] = ()
    detail: str = "default"
    tokenizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    saver: Any = None
    flush_steps: int = 32
    flush_seconds: float = 5.0
    keep_batches_bytes: int = 64 << 20


def make_wishes(
    *,
    run_dir: Any = None,
    policy: Any = None,
    strict: Any = False,
    sinks: Any = (),
    detail: Any = "default",
    tokenizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    saver: Any = None,
    flush_steps: Any = 32,
    flush_seconds: Any = 5.0,
    keep_batches_bytes: Any = 64 << 20,
) -> Wishes:
    """What was given to `watch`, beside model and optimizer. `UsageError` for what cannot be used, whoever trains with it."""
    if not isinstance(detail, str) or detail not in DETAILS:
        raise UsageError(f"detail is {given.got(detail)}; expected one of {', '.join(DETAILS)}")
    return Wishes(
        run_dir=given.folder(run_dir), policy=given.policy(policy, ACTIONS), strict=given.yes_or_no("strict", strict),
        sinks=given.sinks(sinks), detail=detail, tokenizer=given.helper("tokenizer", tokenizer),
        scheduler=given.helper("scheduler", scheduler), scaler=given.helper("scaler", scaler), saver=given.helper("saver", saver),
        flush_steps=given.whole("flush_steps", flush_steps, least=1), flush_seconds=given.seconds("flush_seconds", flush_seconds),
        keep_batches_bytes=given.whole("keep_batches_bytes", keep_batches_bytes, least=0),
    )  # fmt: skip


def refuse_untrainable(parameters: Sequence[torch.nn.Parameter]) -> None:
    """`UsageError` where nothing trains, or where a shape is not known before the first batch."""
    from torch.nn.parameter import is_lazy

    if not parameters:
        raise UsageError("nothing to watch: no parameter of the model has requires_grad=True")
    if any(is_lazy(p) for p in parameters):
        raise UsageError(
            "parameters of the model have no shape yet (torch.nn.Lazy...): run one batch through it before the watch"
        )


def holds_none(model: torch.nn.Module, optimizers: Sequence[Any]) -> str:
    """Why none of these optimizers can train the model; "" where one can, or where none was given."""
    import torch

    held = [p for o in optimizers for g in o.param_groups for p in g["params"] if isinstance(p, torch.Tensor)]
    ours = {id(p): p for p in model.parameters()}
    if not optimizers or any(id(p) in ours and p.requires_grad for p in held):
        return ""
    names = ", ".join(type(o).__qualname__ for o in optimizers)
    frozen = sum(id(p) in ours for p in held)
    said = f"; {frozen} are parameters of it that are frozen (requires_grad=False)" if frozen else ""
    return (
        f"the optimizer ({names}) holds {counted(len(held), 'tensor', 'tensors')}, and none of them is a trainable parameter of this "
        f"{type(model).__qualname__}{said}. Its steps cannot train the model: build the optimizer after the model is in its final form "
        "(after PEFT, a new head, .to_empty() or fully_shard). Where a library trains copies of its own (DeepSpeed, master weights), "
        "leave the optimizer out: ghoststep.watch(model)"
    )


def make_flusher(
    wishes: Wishes, facts: RunFacts, faults: Faults, optimizers: Sequence[Any], model: torch.nn.Module
) -> tuple[Flusher, int]:
    """The host's side, and the number of the first step. The record is opened last: a refused watch leaves none behind."""
    judge = Judge()
    rules = parse(wishes.policy, judge.checks, _means(wishes, facts, optimizers, model))
    policy = Policy(rules=rules, names={c.code: c.name for c in judge.checks})
    sinks = Sinks(wishes.sinks)
    try:
        spool = None if wishes.run_dir is None else Spool(wishes.run_dir, facts)
    except BaseException:
        sinks.close()
        raise
    trained = set(facts.trainable)
    recorder = Recorder(facts.trainable, [t.name for t in facts.tables], keep_norms=wishes.detail == "full")
    assert all(t.name in trained or not t.is_trainable for t in facts.tables)
    keeper = None
    if wishes.run_dir is not None or policy.needs_guard:
        keeper = BatchKeeper(num_steps=3 * wishes.flush_steps, max_bytes=wishes.keep_batches_bytes)
    flusher = Flusher(
        recorder=recorder, judge=judge, policy=policy, sinks=sinks, faults=faults, facts=facts, spool=spool, keeper=keeper,
        tokenizer=wishes.tokenizer, run_dir=wishes.run_dir,
    )  # fmt: skip
    return flusher, 1 if spool is None else spool.last_number + 1


def _means(wishes: Wishes, facts: RunFacts, optimizers: Sequence[Any], model: torch.nn.Module) -> Means:
    """What a policy has to work with here."""
    reasons = [cannot_skip(o, is_strict=wishes.strict) for o in optimizers]
    skip = next((r for r in reasons if r), "")
    if not optimizers:
        skip = "it needs the optimizer: ghoststep.watch(model, optimizer, ...)"
    elif not skip and facts.world_size > 1 and any(is_sharded(p) for p in model.parameters()):
        skip = "parameters are sharded over several ranks, each of which would decide by its own shard"
    roll = cannot_roll_back(
        model, optimizers, saver=wishes.saver, scheduler=wishes.scheduler, run_dir=wishes.run_dir, num_ranks=facts.world_size
    )
    return Means(cannot_skip=skip, cannot_roll_back=roll)


def make_strict(watch: Listening, optimizer: Any, indices: list[int]) -> StrictStep | None:
    """The gate before an optimizer's step, if a policy skips steps."""
    import torch

    policy = watch.flusher.policy
    if not policy.skips:
        return None
    builder = watch.builder
    decider = Decider(
        tables=[builder.index_of[id(t.module.weight)] for t in builder.tables if id(t.module.weight) in builder.index_of]
    )

    def decide() -> str | None:
        with torch.no_grad():
            before = builder.early.now()
            if before is not None and builder.scale is not None:
                before = torch.where(before >= 0, before / builder.scale.to(before.device), before)
            return decider.decide(before, builder.norms.of(indices), lambda: builder.norms.any_nonfinite(indices))

    def skip(code: str) -> None:
        watch.skipped_by_policy(code)

    return StrictStep(
        optimizer, decide, skips=policy.skips, on_skip=skip, on_fault=lambda error: watch.faults.keep("strict step", error)
    )
