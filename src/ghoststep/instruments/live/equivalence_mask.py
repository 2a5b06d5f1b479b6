"""An attention mask of ones against none, for a text without padding. B examples, T positions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ghoststep.errors import DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import OtherMask, Variant
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.equivalence_arguments import Arguments
from ghoststep.instruments.live.equivalence_runs import Found, SingleRuns, compared
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

NAME = "attention_mask"


@instrument
def other_mask(setup: Setup, call: LiveCall, batch: BatchFacts, single: SingleRuns) -> OtherMask:
    """Run the longest text, unpadded, with the mask left out; or with a mask of ones where the batch passes none.

    A mask is only added to models with a generation of transformers' kind, which documents 1 = keep. Cost: 2 single examples, up
    to 10 more where something moved. Nothing is changed.
    """
    if batch.document_BT is not None:
        raise DoesNotApply("the batch is packed: a mask says where documents end")
    runs = single.runs
    example, start, stop = single.longest()
    arguments = runs.example(example, start, stop)
    given = arguments[1].get(NAME)
    generates = has_generation(call.core)
    others = _without(arguments) if given is not None else _with(arguments, runs.probe.ids_BT[:1, : stop - start])
    _refuse(call.core, given, stop - start, generates=generates)
    before = runs.num_examples

    def measure() -> Found:
        hidden = runs.hidden(others, (1, stop - start))
        return compared(hidden, runs.alone(example, start, stop), example, start)

    variant = Variant.MASK if given is None else Variant.NO_MASK
    used = "training" if given is None and generates and setup.intent == "rl" else ""
    judged = runs.judge(variant, measure, used, (example, start, stop))
    return OtherMask(
        reading=judged.reading, has_mask=given is not None, generates=generates,
        num_forward=(runs.num_examples - before) / runs.shape[0], reasons=judged.reasons,
    )  # fmt: skip


def has_generation(core: torch.nn.Module) -> bool:
    """True for a model with the generation of transformers (or one that prepares inputs as it does)."""
    return callable(getattr(core, "generate", None)) and callable(getattr(core, "prepare_inputs_for_generation", None))


def _refuse(core: torch.nn.Module, given: Any, time: int, *, generates: bool) -> None:
    """`DoesNotApply` where leaving out or adding a mask means nothing."""
    import torch

    parameters = inspect.signature(core.forward).parameters
    if given is None and (not generates or (NAME not in parameters and _passes_on(core) is None)):
        raise DoesNotApply("the call passes no attention_mask, and nothing says how this model would read one")
    if given is not None and (not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[-1] != time):
        raise DoesNotApply("the attention mask is no mask over positions: it says more than what padding is")
    if given is not None and bool((given != given[:, :1]).any()):
        raise DoesNotApply("the attention mask tells positions of one text apart")
    own = parameters.get(NAME)
    if given is not None and own is not None and own.default is inspect.Parameter.empty:
        raise DoesNotApply("the model needs an attention_mask")


def _passes_on(core: torch.nn.Module) -> inspect.Parameter | None:
    """The parameter of a wrapper (PEFT) that hands named arguments on."""
    every = inspect.signature(core.forward).parameters.values()
    return next((p for p in every if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def _without(arguments: Arguments) -> Arguments:
    return arguments[0], {k: v for k, v in arguments[1].items() if k != NAME}


def _with(arguments: Arguments, ids: torch.Tensor) -> Arguments:
    import torch

    tensors = [v for v in (*arguments[0], *arguments[1].values()) if isinstance(v, torch.Tensor)]
    device = tensors[0].device if tensors else ids.device
    return arguments[0], {**arguments[1], NAME: torch.ones_like(ids, device=device)}
