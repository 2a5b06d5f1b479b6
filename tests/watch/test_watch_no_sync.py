"""Between flushes the host reads nothing: whole training steps on fake CUDA tensors, and on real ones under a counting mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.watch import other_loops
from tests.watch.loops import Watch, language_model, tokens, watch

READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "_assert_async", "masked_select", "unique", "equal")


COPY = torch.ops.aten.copy_.default


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads by the host, and copies from the device to it: (elements, without waiting). Only while `is_on`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        self.copies: list[tuple[int, bool]] = []
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.num_calls += 1
        if any(name.startswith(r) for r in READS):
            self.reads.append(name)
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name in ("_to_copy", "copy_") and isinstance(result, Tensor):
            source = tensors[-1]
            without_waiting = bool((kwargs or {}).get("non_blocking") or args[2:3] == (True,))
            if source.device.type == "cuda" and result.device.type == "cpu":
                self.copies.append((source.numel(), without_waiting))
            elif source.device.type == "cpu" and result.device.type == "cuda" and not without_waiting:
                self.reads.append("upload")  # waits as well
        return result


class Event:
    """Of a copy that has not arrived."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host waited for the device")


class Backend:
    Event = Event


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]`, without the driver that torch's own asks for CUDA tensors."""
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(one, int):
            tensor = tensor.select(dim, one)
            continue
        else:
            start, stop, _ = one.indices(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, max(stop - start, 0))
        dim += 1
    return tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake CUDA tensors in the whole test."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: Backend)
    empty = torch.empty

    def unpinned(*given: Any, pin_memory: bool = False, **more: Any) -> Tensor:  # pinning asks a real driver
        made: Tensor = empty(*given, **more)
        return made

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "__getitem__", _indexed)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: COPY(self, source, non_blocking))
    with FakeTensorMode():
        yield


class Scaler:
    """Stands for torch's, which asks a real driver: scales, unscales, and lets every second step pass."""

    def __init__(self) -> None:
        self._scale = torch.full((), 1024.0, device="cuda")
        self._per_optimizer_states: dict[int, Any] = {}
        self.count = 0

    def step(self, optimizer: Any) -> None:
        self.count += 1
        if self.count % 2:
            optimizer.step()
        self._per_optimizer_states[id(optimizer)] = {"found_inf_per_device": {"cuda": torch.zeros((), device="cuda")}}


class FakeEmbedding(nn.Embedding):
    """Autograd needs a driver for CUDA tensors, even fake ones: the output is a leaf that has the hooks of an ordinary one."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.empty((*ids.shape, self.embedding_dim), dtype=self.weight.dtype, device="cuda", requires_grad=True)


class FakeLM(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.embed, self.mix, self.norm, self.head = (
            FakeEmbedding(500, 16),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 500),
        )
        for module in self.children():
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=kind, device="cuda")))
        self.outputs: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.outputs.append(self.embed(ids))
        return torch.empty((), device="cuda")

    def backward(self, loss: Tensor) -> None:
        """What autograd would do, run by `torch.autograd.backward`."""
        for output in self.outputs:
            for hook in (output._backward_hooks or {}).values():
                assert hook(torch.empty_like(output)) is None
        self.outputs.clear()
        with torch.no_grad():
            for p in self.parameters():
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                else:
                    p.grad += torch.empty_like(p)


def train(w: Watch, model: FakeLM, optimizer: Any, steps: int, *, clip: str, micro: int, scaler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            torch.autograd.backward(model(torch.zeros((4, 12), dtype=torch.long, device="cuda")))
        if clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            w.before_scaler_step(scaler, optimizer)
            scaler.step(optimizer)
            w.after_scaler_step(scaler, optimizer)


def made(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeLM, Any]:
    model = FakeLM(kind)
    monkeypatch.setattr(torch.autograd, "backward", model.backward)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("clip", "micro", "scaled", "detail"),
    [("torch", 1, False, "default"), ("", 1, False, "full"), ("torch", 3, True, "default"), ("", 2, True, "full")],
)
def test_fake_cuda(
    kind: torch.dtype, clip: str, micro: int, scaled: bool, detail: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(kind, monkeypatch)
    scaler = Scaler() if scaled else None
    with Counting() as counting:
        w = watch(model, optimizer, flush_steps=8, flush_seconds=1e9, run_dir=tmp_path, detail=detail).start()
        counting.copies.clear()
        train(w, model, optimizer, 7 if scaled else 8, clip=clip, micro=micro, scaler=scaler)
        assert not w.faults.lines()
        assert counting.num_calls > 500
        assert (counting.reads, counting.copies) == ([], [])
        # The forward of the ninth step (or the scaler's skip of the eighth) ends the eighth: the ring is full and its copy starts.
        train(w, model, optimizer, 3, clip=clip, micro=micro, scaler=scaler)
        assert not w.faults.lines()
    assert counting.reads == []
    num_parameters = len(list(model.parameters()))
    sizes = [size for size, _ in counting.copies]
    assert sizes[:2] == [8 * num_parameters] * 2
    assert len(sizes) == 3
    assert all(without_waiting for _, without_waiting in counting.copies)
    assert len(w.flusher.waiting) == 1
    assert w.flusher.num_steps == 0
    w.flusher.waiting.clear()
    w.builder.has_stepped = False
    w._ring.host.clear()  # type: ignore[union-attr]
    w.close()


@pytest.mark.usefixtures("cuda")
def test_a_waiting_flush_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counter, and a host that asks."""
    model, optimizer = made(torch.float32, monkeypatch)
    w = watch(model, optimizer, flush_steps=8, flush_seconds=1e9).start()
    train(w, model, optimizer, 2, clip="", micro=1)
    w.flush()
    assert "the host waited" in w.faults.by_hook["recorder"] or "the host waited" in str(w.faults.by_hook)
    w._ring.host.clear()  # type: ignore[union-attr]
    w.close()


class Apart(Counting):  # type: ignore[no-untyped-call]
    """Counts only what happens inside our own hooks."""

    depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not Apart.depth:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


LOOPS = {
    "plain": language_model(),
    "our clip": language_model(clip="ours"),
    "scaler": language_model(autocast=torch.float16, init_scale=2.0**20, accumulate=2),
    "two optimizers": other_loops.two_optimizers,
    "sparse": other_loops.sparse,
}


@pytest.mark.parametrize("name", LOOPS)
def test_real_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours asks a tensor for its value before the flush; at the flush on a CPU the copies are there already."""
    from ghoststep.watching.guarded import Faults

    guarded = Faults.guarded

    def noted(self: Faults, hook: str, function: Any) -> Any:
        call = guarded(self, hook, function)

        def inside(*args: Any, **kwargs: Any) -> None:
            Apart.depth += 1
            try:
                call(*args, **kwargs)
            finally:
                Apart.depth -= 1

        return inside

    monkeypatch.setattr(Faults, "guarded", noted)
    loop = LOOPS[name]()
    with watch(loop.models[0], loop.optimizers[0], flush_steps=32, flush_seconds=1e9) as w, Apart() as counting:
        for i in range(20):
            loop.step(i)
        assert not w.faults.lines()
        assert w.flusher.num_steps == 0
        reads, num_calls = list(counting.reads), counting.num_calls
    assert num_calls > 200
    assert reads == []


def test_reads_of_ours_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ghoststep.watching.building import StepBuilder

    original = StepBuilder.end_backward

    def reading(self: StepBuilder, given: Any) -> bool:
        float(next(p.grad for p in self.norms.parameters if p.grad is not None).norm())
        return original(self, given)

    monkeypatch.setattr(StepBuilder, "end_backward", reading)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        test_real_tensors("plain", monkeypatch)
    assert tokens(0).numel()
