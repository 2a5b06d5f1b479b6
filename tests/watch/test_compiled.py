"""A watch around `torch.compile`: the same bits, no graph break and no compilation that would not be there without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.watch.loops import Loop, Ran, TinyLM, language_model, next_token_loss, run, same, steps_of, tokens, watch


def counted(make: Callable[[], Loop], steps: int, folder: Path | None = None, **wishes: Any) -> tuple[Ran, dict[str, Any]]:
    """The run, and how often dynamo compiled and broke."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ran = run(make, steps, folder, **wishes)
    found = torch._dynamo.utils.counters
    return ran, {
        "frames": dict(found["frames"]),
        "breaks": dict(found["graph_break"]),
        "graphs": found["stats"]["unique_graphs"],
        "recompiled": dict(found["recompiles"]) if "recompiles" in found else {},
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("starts_at", [0, 4], ids=["before the first call", "warm"])
def test_compiled(backend: str, starts_at: int, tmp_path: Path) -> None:
    make = language_model(backend=backend, tied=True)
    bare, expected = counted(make, 12)
    for detail in ("default", "full"):
        watched, found = counted(make, 12, tmp_path / detail, detail=detail, flush_steps=4, starts_at=starts_at)
        same(bare.state, watched.state)
        assert found == expected
        assert not expected["breaks"]
        (w,) = watched.watches
        assert not w.faults.lines()
        steps = steps_of(w)
        assert [s.number for s in steps] == list(range(1, 13 - starts_at))
        assert all(s.norm is not None and s.loss is not None for s in steps)


@pytest.mark.parametrize("compiles", ["module", "method", "inside"])
def test_other_ways_to_compile(compiles: str) -> None:
    """`model.compile()`, a compiled part, and the bare model in the hands of the watch."""

    def make() -> Loop:
        model = TinyLM()
        called: Any = model
        if compiles == "module":
            called = torch.compile(model, backend="eager", fullgraph=True)
        elif compiles == "method":
            model.compile(backend="eager", fullgraph=True)
        else:
            for block in model.blocks:
                block.compile(backend="eager", fullgraph=True)
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(i: int) -> torch.Tensor:
            made.zero_grad()
            loss = next_token_loss(called(tokens(i)), tokens(i))
            loss.backward()  # type: ignore[no-untyped-call]
            made.step()
            return loss

        return Loop(models=[model], optimizers=[[made]], step=step)

    bare, expected = counted(make, 6)
    watched, found = counted(make, 6, flush_steps=4)
    same(bare.state, watched.state)
    assert found == expected
    (w,) = watched.watches
    assert not w.faults.lines()
    assert len(steps_of(w)) == 6
    if compiles == "method":
        assert "torch.compile" in w.flusher.facts.unseen["rows"]
    if compiles == "inside":
        assert all(s.rows for s in steps_of(w))


def test_a_whole_step_in_one_graph() -> None:
    """Backward and the optimizer's step outside, the loss inside; compiled again after the watch has closed."""
    torch._dynamo.reset()
    model = TinyLM()
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda ids: next_token_loss(model(ids), ids), backend="aot_eager", fullgraph=True)
    with watch(model, made, flush_steps=2) as w:
        for i in range(5):
            made.zero_grad()
            loss_of(tokens(i)).backward()  # type: ignore[no-untyped-call]
            made.step()
    assert len(steps_of(w)) == 5
    for i in range(3):
        made.zero_grad()
        loss_of(tokens(i)).backward()  # type: ignore[no-untyped-call]
        made.step()
    torch._dynamo.reset()
    loss_of(tokens(9)).backward()  # type: ignore[no-untyped-call]
    assert not w.faults.lines()
