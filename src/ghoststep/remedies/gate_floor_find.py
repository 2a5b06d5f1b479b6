"""Where a model's mixer gates are, found by running and changing things, not by class or name.

An activation is a gate if, in the innermost module around it that mixes positions (the mixer),
  1. it depends on its own position only (so it is not fed by the convolution),
  2. the mixer's output depends on it at its own position only (so it acts after the state was read), and
  3. how much the output depends on it depends on other positions: it multiplies what the mixer has mixed.
A mixer that calls a softmax or an attention function is attention and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.remedies.gate_floor_replay import Replay, Trace, traced

if TYPE_CHECKING:
    import torch

ATTENTION = ("softmax", "attention", "attn")
"""In the name of a torch function: attention, whose weights sum to one."""

MANY_POSITIONS = 6
"""Positions that a probed sequence needs: a changed one, its neighbour, and others before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One gate. module: the smallest module around it that runs once in the mixer; order: which of the `total` activations
    inside that module's forward it is."""

    module: torch.nn.Module
    kind: str
    order: int
    total: int


def find_gates(model: torch.nn.Module, run: Callable[[], Any], num_positions: int) -> list[Site]:
    """The mixer gates that one `run()` of the model passes through, each once, in order of first use.

    Runs the model once and each mixer, alone, 3 times, once of them with a graph. Call it inside `untouched` and `eager`.
    num_positions: of the sequences in that run.
    """
    import torch

    if num_positions < MANY_POSITIONS:
        return []
    with torch.no_grad():
        torch.manual_seed(0)
        whole = traced(model, run)
        decided: dict[torch.nn.Module, list[Site] | None] = {}
        found: dict[tuple[int, int], Site] = {}
        for activation in whole.activations:
            for module in reversed(activation.stack[1:]):  # the root takes ids: its input cannot be changed a little
                if module not in decided:
                    decided[module] = _gates_of(module, whole, num_positions)
                sites = decided[module]
                if sites is not None:
                    found.update({(id(s.module), s.order): s for s in sites if (id(s.module), s.order) not in found})
                    break
    return list(found.values())


def _gates_of(mixer: torch.nn.Module, whole: Trace, num_positions: int) -> list[Site] | None:
    """The gates of this module, or None if it does not mix positions (or cannot be asked)."""
    replay = Replay.of(mixer, *whole.calls[mixer][0], num_positions)
    if replay is None:
        return None
    try:
        graph = replay.graph()
        if not graph.mixes():
            return None
        if any(word in name for name in graph.trace.functions for word in ATTENTION):
            return []
        base, moved = replay(), replay(replay.gate_position)
        changed = _changed(base.trace, moved.trace).items()
        few = {k: mask for k, mask in changed if 0 < int(mask.sum()) <= mask.numel() / num_positions}
        own = {m for m in base.trace.calls if len(whole.calls.get(m, ())) == len(whole.calls[mixer])}
        return [
            _site(base.trace, k, own)
            for k, mask in few.items()
            if not graph.trace.activations[k].times_input and graph.is_gate(k, mask)
        ]
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError):
        return None  # it runs only inside its parent


def _changed(base: Trace, moved: Trace) -> dict[int, torch.Tensor]:
    """For each activation that both runs made: where its output differs."""
    if [a.output.shape for a in base.activations] != [a.output.shape for a in moved.activations]:
        return {}
    return {k: a.output != b.output for k, (a, b) in enumerate(zip(base.activations, moved.activations, strict=True))}


def _site(trace: Trace, k: int, own: set[torch.nn.Module]) -> Site:
    """The innermost module around activation k that ran once. own: modules that run in this mixer only."""
    activation = trace.activations[k]
    module = next(m for m in reversed(activation.stack) if len(trace.calls[m]) == 1 and m in own)
    inside = [i for i, a in enumerate(trace.activations) if module in a.stack]
    return Site(module=module, kind=activation.kind, order=inside.index(k), total=len(inside))
