"""On an accelerator the host reads nothing: fake CUDA tensors refuse every read, and copies to the host are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ghoststep.remedies import clip, clip_later
from ghoststep.remedies.clip import _clip, _Step
from tests.remedies.clip_models import fill, on_device, small, table_of

READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "_assert_async", "masked_select", "unique")


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operations that wait for the device, and how many copies go from it to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        self.copies: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if any(name.startswith(r) for r in READS):
            self.reads.append(name)
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if name in ("_to_copy", "copy_") and isinstance(result, torch.Tensor):
            source = tensors[-1]
            if source.device.type == "cuda" and result.device.type == "cpu":
                self.copies.append((source.numel(), bool((kwargs or {}).get("non_blocking") or args[2:3] == (True,))))
        return result


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return False


class Backend:
    Event = Event


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", ["row", "group", "global"])
def test_fake_cuda(kind: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    empty = torch.empty

    def unpinned(*given: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:  # pinning asks a real driver
        made: torch.Tensor = empty(*given, **more)
        return made

    monkeypatch.setattr(torch, "empty", unpinned)
    with FakeTensorMode(), torch.no_grad():
        model = nn.Sequential(nn.Embedding(500, 16), nn.Conv1d(4, 4, 3), nn.LayerNorm(16), nn.Linear(16, 500))
        for module in model:
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=kind, device="cuda")))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with Counting() as counting:
            norm = _clip(_Step.of(model), 1.0, mode, error_if_nonfinite=False, foreach=None)
    assert norm.device.type == "cuda"
    assert counting.reads == []
    ((size, without_waiting),) = counting.copies
    assert size <= 8 + 2 * 32
    assert without_waiting
    assert clip_later._waiting
    clip_later._waiting.clear()


def test_the_counter_would_notice_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's route under the same counter."""
    model = small()
    fill(model, 0.01)
    table_of(model)[3] *= 1e27
    with Counting() as counting:
        clip.clip_grad_norm_(model, 1.0)
    assert "_local_scalar_dense" in counting.reads
    with Counting() as counting:
        on_device(model, 1.0)
    assert counting.reads == []


def test_the_queue_of_untold_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_later, "to_host", lambda values: (values, Event()))
    monkeypatch.setattr(clip, "to_host", lambda values: (values, Event()))
    model = small()
    fill(model, 1.0)
    for _ in range(100):
        on_device(model, 1.0)
    assert len(clip_later._waiting) == 64
    clip_later._waiting.clear()
