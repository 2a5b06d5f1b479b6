"""The model's own generation with a cache against one forward over the same tokens. T positions, D dimensions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.equivalence import Cached, Variant
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.equivalence_mask import has_generation
from ghoststep.instruments.live.equivalence_runs import Found, Runs, SingleRuns, compared
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

NUM_STEPS = 4
"""Tokens whose hidden states are read: the last of the prompt, and three that are given one by one."""

UNDERSTOOD = ("input_ids", "attention_mask", "position_ids", "labels")


@instrument
def cached(setup: Setup, call: LiveCall, batch: BatchFacts, single: SingleRuns) -> Cached:
    """Let the model's `generate` continue the longest text by the text's own last tokens, and compare with one plain forward.

    The tokens are forced by a logits processor, so nothing is sampled. Cost: 2 single examples and 3 tokens, up to 10 more where
    something moved. Nothing is changed.
    """
    if not has_generation(call.core) or getattr(call.core, "generation_config", None) is None:
        raise DoesNotApply("the model has no generation of its own")
    if batch.document_BT is not None:
        raise DoesNotApply("the batch is packed")
    if not single.influence.is_causal_by_measure:
        raise DoesNotApply("positions see later tokens: what a cache keeps would have changed with them")
    others = sorted(k for k, v in call.calls[0].kwargs.items() if k not in UNDERSTOOD and _is_tensor(v))
    if others:
        raise CannotLook(f"the call passes {', '.join(others)}, and it is not known what generation makes of that")
    runs = single.runs
    example, start, stop = single.longest()
    num_prompt = max(1, stop - start - NUM_STEPS + 1)
    ids = runs.probe.ids_BT[example : example + 1, start:stop]
    before = runs.num_examples

    def measure() -> Found:
        hidden = _generated(runs, call.core, ids, num_prompt, batch.pad_id)
        base = runs.alone(example, start, stop)
        first = num_prompt - 1
        found = compared(_placed(hidden, base, first), base, example, start)
        return found[first : first + hidden.shape[1]]

    default = getattr(call.core.generation_config, "use_cache", None) is not False
    used = "training" if setup.intent == "rl" else ""
    judged = runs.judge(Variant.CACHED, measure, used, (example, start, stop))
    return Cached(
        reading=judged.reading, num_prompt=num_prompt, is_default=default,
        num_forward=(runs.num_examples - before) / runs.shape[0], reasons=judged.reasons,
    )  # fmt: skip


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _placed(hidden: torch.Tensor, base: torch.Tensor, first: int) -> torch.Tensor:
    """H with what was read put where it belongs, so that changes are told over the norm of the whole text."""
    placed = base.clone()
    placed[:, first : first + hidden.shape[1]] = hidden
    return placed


class _Forced:
    """A logits processor that leaves one token possible: the text's own next one."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = scores.new_full(scores.shape, float("-inf"))
        place = input_ids.shape[1]
        forced[:, int(self.ids[0, place]) if place < self.ids.shape[1] else 0] = 0.0
        return forced


def _generated(runs: Runs, core: Any, ids: torch.Tensor, num_prompt: int, pad_id: int | None) -> torch.Tensor:
    """H float32 [1, n, D] of the last prompt token and the forced ones, as generation computes them."""
    import torch

    lengths: list[int] = []
    caught: list[torch.Tensor] = []
    device = next((p.device for p in core.parameters()), torch.device("cpu"))
    prompt = ids[:, :num_prompt].to(device)
    config = type(core.generation_config)(
        max_new_tokens=ids.shape[1] - num_prompt + 1, do_sample=False, num_beams=1, use_cache=True, pad_token_id=pad_id or 0,
        cache_implementation=getattr(core.generation_config, "cache_implementation", None),
    )  # fmt: skip
    runs.num_examples += 1
    with runs.guarded(), runs.probe.quiet(), _watched(runs, lengths, caught), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core.eval()
        core.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, logits_processor=[_Forced(ids)])
    if len(caught) < 2:
        raise CannotLook(f"generation passed {runs.probe.readout.name} {len(caught)} times")
    if lengths[-1] > 1:
        raise DoesNotApply("the model's generation keeps no cache: every step runs over the whole text")
    return torch.stack(caught, dim=1)


@contextlib.contextmanager
def _watched(runs: Runs, lengths: list[int], caught: list[torch.Tensor]) -> Iterator[None]:
    """Notes how many ids each step looks up, and the hidden state [1, D] of its last position at the readout."""
    import torch

    readout = runs.probe.readout

    def looked_up(module: Any, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            lengths.append(int(args[0].shape[-1]))

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() in (2, 3):
            caught.append(value.detach().reshape(-1, value.shape[-1])[-1:].float().cpu())

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(args[0] if args else next(iter(kwargs.values()), None))

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        named = getattr(output, "last_hidden_state", None)
        note(named if named is not None else output[0] if isinstance(output, tuple) else output)

    handles = [runs.probe.tables[0].register_forward_pre_hook(looked_up)]
    if readout.is_input:
        handles.append(readout.module.register_forward_pre_hook(before, with_kwargs=True))
    else:
        handles.append(readout.module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
