"""Running one module of a model again, alone, with something changed, and asking its graph what depends on what.

T positions; which axis of a tensor they lie on is found by its length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.remedies.gate_floor_hooks import activations

if TYPE_CHECKING:
    import torch


PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__")
"""Names of torch functions that multiply."""


@dataclass(slots=True)
class Activation:
    """One call of a function that gates use. stack: the modules around it, outermost first. times_input: its output was
    multiplied by its own input, so it is a part of an activation (`z * sigmoid(z)`) and no gate by itself."""

    kind: str
    stack: tuple[torch.nn.Module, ...]
    given: torch.Tensor
    output: torch.Tensor
    times_input: bool = False


@dataclass(slots=True)
class Trace:
    """What one forward did."""

    activations: list[Activation] = field(default_factory=list)
    calls: dict[torch.nn.Module, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    outputs: dict[torch.nn.Module, list[Any]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    stack: list[torch.nn.Module] = field(default_factory=list)


@dataclass(slots=True)
class Replay:
    """Runs one module alone on the arguments that it had, or with one position of its input changed.

    filled: see `_filled`; the module's own parameters stay as they are.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: int | str
    axis: int
    num_positions: int
    filled: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], num: int) -> Replay | None:
        import torch

        named: Sequence[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for at, value in named:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                axis = position_axis(value, num)
                return None if axis is None else cls(module, args, kwargs, at, axis, num, _filled(module))
        return None

    @property
    def gate_position(self) -> int:
        return self.num_positions // 2

    def __call__(self, position: int | None = None) -> Run:
        """Run without a graph. position: where the input is changed."""
        given = self._given()
        return self._run(given if position is None else _moved(given, self.axis, position))

    def graph(self) -> Graph:
        """Run once with a graph from the input."""
        import torch

        leaf = self._given().detach().clone().requires_grad_()
        with torch.enable_grad():
            run = self._run(leaf)
        return Graph(leaf, self.axis, self.gate_position, run.output, run.trace)

    def _given(self) -> torch.Tensor:
        """The input it had; random numbers for zeros, through which no dependence is seen."""
        import torch

        given: torch.Tensor = self.args[self.at] if isinstance(self.at, int) else self.kwargs[self.at]
        if given.any():
            return given
        return torch.randn(given.shape, generator=torch.Generator().manual_seed(4)).to(given)

    def _run(self, value: torch.Tensor) -> Run:
        import torch

        args, kwargs = list(self.args), dict(self.kwargs)
        holder: Any = args if isinstance(self.at, int) else kwargs
        holder[self.at] = value
        torch.manual_seed(0)
        output: list[Any] = []
        call = torch.func.functional_call
        trace = traced(self.module, lambda: output.append(call(self.module, self.filled, tuple(args), kwargs)))
        return Run(_with_positions(output[0], self.num_positions), trace)


@dataclass(slots=True)
class Run:
    """output: the first tensor with an axis of positions."""

    output: torch.Tensor
    trace: Trace


@dataclass(slots=True)
class Graph:
    """A run whose graph is asked what depends on what: a derivative of exactly zero is no dependence, however small the others."""

    leaf: torch.Tensor
    axis: int
    position: int
    output: torch.Tensor
    trace: Trace

    def mixes(self) -> bool:
        """The output at the gate's position depends on the input at another one."""
        return bool(self._input_positions(self._output_part(here=True)) - {self.position})

    def is_gate(self, k: int, mask: torch.Tensor) -> bool:
        """The three conditions for the elements of activation k at the gate's position.

        The third by a second derivative: how strongly the output depends on the gate, by the input.
        """
        import torch

        activation = self.trace.activations[k].output
        with torch.enable_grad():
            value = _weighted(activation)[mask].sum()
        if self._input_positions(value) - {self.position}:
            return False
        elsewhere = self._gradient(self._output_part(here=False), activation)
        if elsewhere is not None and elsewhere[mask].any():
            return False
        if self._gradient(self._output_part(here=True), activation) is None:
            return False
        part = self._part_around(k)
        with torch.enable_grad():
            asked = self._output_part(here=True) if part is None else _weighted(part).sum()
        answer = self._gradient(asked, activation, again=True)
        if answer is None:
            return False
        with torch.enable_grad():
            strength = _weighted(answer)[mask].sum()
        return bool(self._input_positions(strength) - {self.position})

    def _part_around(self, k: int) -> torch.Tensor | None:
        """What the module's own child around activation k returns: a feed-forward layer beside a mixer under one norm is asked
        by itself, or the norm would make it look like a gate. None where there is no such child, or it is the activation."""
        import torch

        activation = self.trace.activations[k]
        outputs = self.trace.outputs.get(activation.stack[1], ()) if len(activation.stack) > 1 else ()
        output = outputs[0] if len(outputs) == 1 else None
        return output if isinstance(output, torch.Tensor) and output is not activation.output else None

    def _output_part(self, *, here: bool) -> torch.Tensor:
        import torch

        num = self.leaf.shape[self.axis]
        axis = position_axis(self.output, num)
        assert axis is not None
        chosen = [t for t in range(num) if (t == self.position) == here]
        with torch.enable_grad():
            return _weighted(self.output).movedim(axis, 0)[chosen].sum()

    def _input_positions(self, value: torch.Tensor) -> set[int]:
        gradient = self._gradient(value, self.leaf)
        if gradient is None:
            return set()
        return set(gradient.movedim(self.axis, 0).flatten(1).any(dim=1).nonzero().flatten().tolist())

    def _gradient(self, value: torch.Tensor, by: torch.Tensor, *, again: bool = False) -> torch.Tensor | None:
        import torch

        if not value.requires_grad:
            return None
        return torch.autograd.grad(value, by, retain_graph=True, create_graph=again, allow_unused=True)[0]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """Times fixed random numbers, so that nothing cancels in a sum."""
    import torch

    with torch.enable_grad():
        return tensor * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)).to(tensor)


def _filled(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random stand-ins for matrices that are zero (as some gates are initialised): through zeros no dependence is seen."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5).to(p)
        for name, p in module.named_parameters() if p.dim() > 1 and not p.any()
    }  # fmt: skip


def position_axis(tensor: torch.Tensor, num_positions: int) -> int | None:
    """The axis of positions: 1 in [B, T, ...], 0 in [T, B, ...], else another one of that length; None without one."""
    order = sorted(range(tensor.dim()), key=lambda axis: (axis != 1, axis))
    return next((axis for axis in order if tensor.shape[axis] == num_positions), None) if tensor.dim() > 1 else None


def _moved(tensor: torch.Tensor, axis: int, position: int) -> torch.Tensor:
    """Random numbers, ten times as large as usual, added at one position."""
    import torch

    changed = tensor.detach().clone()
    part = changed.select(axis, position)
    noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(part.device)
    size = 10 * float(tensor.detach().double().pow(2).mean().sqrt()) or 1.0
    part.add_((noise * size).to(part.dtype))
    return changed


def _with_positions(output: Any, num_positions: int) -> torch.Tensor:
    import torch

    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    tensors = [o for o in items if isinstance(o, torch.Tensor) and o.is_floating_point()]
    found = next((t for t in tensors if position_axis(t, num_positions) is not None), None)
    if found is None:
        raise ValueError("no output has an axis of positions")
    return found


def traced(root: torch.nn.Module, run: Callable[[], Any]) -> Trace:
    """Run under hooks on every module inside `root` and a mode that sees activations."""
    trace = Trace()
    with _stacked(root, trace), _listener(trace):
        run()
    return trace


@contextlib.contextmanager
def _stacked(root: torch.nn.Module, trace: Trace) -> Iterator[None]:
    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.stack.append(module)
        trace.calls.setdefault(module, []).append((args, kwargs))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        trace.stack.pop()
        trace.outputs.setdefault(module, []).append(output)

    handles = []
    try:
        for module in root.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_product(trace: Trace, args: Sequence[Any]) -> None:
    import torch

    for activation in trace.activations:
        for one, other in (args, args[::-1]):
            if one is activation.output and isinstance(other, torch.Tensor) and other.shape == activation.given.shape:
                activation.times_input |= bool((other.detach() == activation.given).all())


def _listener(trace: Trace) -> contextlib.AbstractContextManager[Any]:
    from torch.overrides import TorchFunctionMode

    kinds = activations()

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            trace.functions.add(getattr(func, "__name__", ""))
            if func in kinds and trace.stack:
                given = args[0] if args else kwargs["input"]
                trace.activations.append(Activation(kinds[func], tuple(trace.stack), given.detach(), output))
            elif trace.activations and len(args) == 2 and getattr(func, "__name__", "") in PRODUCTS:
                _note_product(trace, args)
            return output

    return Listener()
