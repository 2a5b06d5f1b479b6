"""One attention implementation against another one of the same model. B examples, T positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import DoesNotApply
from ghoststep.evidence.equivalence import OtherAttention, Variant
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.equivalence_runs import Found, Runs, SingleRuns, compared
from ghoststep.registry import instrument

if TYPE_CHECKING:
    import torch

KEY = "_attn_implementation_internal"
"""Where a config of transformers keeps the name; its property hands it on to the configs inside."""


@instrument
def other_attention(call: LiveCall, single: SingleRuns) -> OtherAttention:
    """Run one example as it stands in the batch with the model's other attention implementations, and compare the real positions.

    Switched by the name in the config, put back before anything else runs. Cost: 2 single examples, one more where neither of the
    two usual implementations is in use or the model's class cannot say that it switches, up to 10 more where something moved.
    """
    if not single.influence.has_attention:
        raise DoesNotApply("no attention operation runs")
    configs = _configs(call.core)
    used, others = _names(call.core, configs)
    runs, padding_BT = single.runs, single.padding_BT
    num, time = padding_BT.shape
    example = max(range(num), key=lambda b: (not padding_BT[b].all(), int(padding_BT[b].sum())))
    before = runs.num_examples
    operations: dict[str, tuple[int, int]] = {}

    def run(name: str) -> torch.Tensor:
        if name == used:
            return runs.alone(example, 0, time)
        with _switched(configs, name), _counted() as seen:
            hidden = runs.hidden(runs.example(example, 0, time), (1, time))
        operations[name] = (seen.fused, seen.softmax)
        return hidden

    def against(name: str, base: str) -> Callable[[], Found]:
        return lambda: [f for f in compared(run(name), run(base), example, 0) if not padding_BT[example, f[2]]]

    judged = [runs.judge(Variant.ATTENTION, against(name, used), used, (example, 0, time)) for name in others]
    if not _switches(call.core):
        with _counted() as seen:
            runs.hidden(runs.example(example, 0, time), (1, time))
        if all(operations[name] == (seen.fused, seen.softmax) for name in others):
            raise DoesNotApply(f"the model runs the same attention under the names {used} and {', '.join(others)}")
    agree = len(others) > 1 and all(j.reading.num_above for j in judged)
    agree = agree and not runs.judge(Variant.ATTENTION, against(*others), "", (example, 0, time)).reading.num_above
    worst = max(range(len(others)), key=lambda i: (judged[i].reading.num_above, judged[i].reading.change))
    return OtherAttention(
        reading=judged[worst].reading, used=used, other=" and ".join(others) if agree else others[worst],
        own_mask=_has_own_mask(runs), outvoted=agree, num_forward=(runs.num_examples - before) / num,
        reasons=tuple(r for j in judged for r in j.reasons),
    )  # fmt: skip


def _configs(core: torch.nn.Module) -> list[Any]:
    """Every config of the model that names an implementation, also those inside others; each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        values = getattr(config, "__dict__", None)
        if values is None or id(config) in found or not isinstance(values.get(KEY), str):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for module in core.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _names(core: torch.nn.Module, configs: list[Any]) -> tuple[str, list[str]]:
    """The implementation in use and those to compare it with; `DoesNotApply` where there is one only."""
    if not configs:
        raise DoesNotApply("the model has no attention implementations to choose from")
    names = {c.__dict__[KEY] for c in configs}
    if len(names) > 1:
        raise DoesNotApply(f"parts of the model use different attention implementations ({', '.join(sorted(names))})")
    used: str = names.pop()
    owners = _owners(core)
    usual = ["eager", "sdpa"] if owners and all(getattr(m, "_supports_sdpa", False) for m in owners) else ["eager"]
    others = [name for name in usual if name != used]
    if not others:
        raise DoesNotApply(f"the model has one attention implementation, {used}")
    return used, others


def _owners(core: torch.nn.Module) -> list[Any]:
    """The modules that say which implementations they support."""
    return [m for m in core.modules() if hasattr(m, "_supports_sdpa")]


def _switches(core: torch.nn.Module) -> bool:
    """True if the model's class says that its implementation follows the config at any time."""
    asked = [getattr(m, "_can_set_attn_implementation", None) for m in _owners(core)]
    with contextlib.suppress(Exception):  # reads its own source, which may be missing
        return bool(asked) and all(a is not None and a() for a in asked)
    return False


@contextlib.contextmanager
def _switched(configs: list[Any], name: str) -> Iterator[None]:
    kept = [c.__dict__[KEY] for c in configs]
    try:
        for config in configs:
            config.__dict__[KEY] = name
        yield
    finally:
        for config, old in zip(configs, kept, strict=True):
            config.__dict__[KEY] = old


@contextlib.contextmanager
def _counted() -> Iterator[_Count]:
    """Counts scaled dot product attentions and softmaxes of the block."""
    from torch.overrides import TorchFunctionMode

    seen = _Count()

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            seen.fused += "attention" in name
            seen.softmax += name == "softmax"
            return func(*args, **(kwargs or {}))

    with Listener():
        yield seen


@dataclass(slots=True)
class _Count:
    fused: int = 0
    softmax: int = 0


def _has_own_mask(runs: Runs) -> bool:
    import torch

    given = [*runs.call.args, *runs.call.kwargs.values()]
    given += [v for g in given if isinstance(g, dict) for v in g.values()]
    time = runs.shape[1]
    return any(isinstance(g, torch.Tensor) and g.dim() > 2 and tuple(g.shape[-2:]) == (time, time) for g in given)
