"""`clip_grad_norm_`: torch's clip, bit for bit, until a step would be lost; then one that cannot lose it."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError
from ghoststep.lost_step import LOST_COEFFICIENT
from ghoststep.remedies.clip_gradients import Gradients, local, measure, num_rows, scale_all, scale_on_device, scale_rows, whole
from ghoststep.remedies.clip_later import Outcome, pack, tell_later, tell_now, tell_waiting, to_host
from ghoststep.remedies.clip_plan import Plan, plan_clip
from ghoststep.remedies.clip_tables import named_tables, tables_among
from ghoststep.remedies.clip_torch import clip_with_norm, total_norm

if TYPE_CHECKING:
    import torch

MODES = ("row", "group", "global")


def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    mode: str | float = "row",
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_`, without ever losing a step to one table row.

    A drop-in: pass the model (best: tables are known by their modules) or its parameters. As long as the step is healthy, the
    returned norm and every gradient are bit-identical to torch's. It engages only if

    - the norm in the gradients' own type is not finite or torch's coefficient is zero, or
    - the clip coefficient `max_norm / norm` is below 1e-3 and a few table rows hold more than 99 % of the squared norm.

    Then `mode` decides:

    - ``"row"`` (default): cap each spiking row at ``max(max_norm, 10 x the 99th percentile of the rows below it)``, then clip
      once. Every spiking row heals and every other row keeps its gradient. Without a row below, the trunk's norm is the cap.
    - ``"group"``: clip the tables and the rest of the model apart, each to `max_norm`. The largest row takes the tables' budget.
    - ``"global"``: one clip without overflow. Nothing becomes zero, and a spiking row still crushes the rest.

    Non-finite values confined to table rows: those rows get a zero gradient. Anywhere else: every ``grad`` is set to None, so that
    ``optimizer.step()`` moves nothing (a zero gradient would still move weights by momentum and decay). A huge gradient
    outside the tables is clipped without overflow and named, also where torch's clip is left to do it. Each such step is
    told: a line in the log ``ghoststep.clip``, and `ghoststep.remedies.clip_events.listening`.

    Args:
        parameters: the model, or its parameters (named as in torch, so that it can stand in torch's place).
        max_norm: above 0; ``math.inf`` only measures. norm_type: other than 2 goes to torch unchanged.
        error_if_nonfinite: raise RuntimeError, before anything is changed, if the norm is truly not finite.
        foreach: as in torch.

    Returns:
        The norm before clipping, 0-dim: torch's own value when not engaged; else float32 (float64 if a gradient is, or if the
        norm exceeds float32), finite whenever the kept gradient is. NaN or inf if the step was skipped.

    Sparse gradients are coalesced in place of ``grad``. DTensors (FSDP2, HSDP, tensor parallel) are reduced over their own mesh,
    never gathered but for the row norms of a measured step; every rank must call. After `unscale_` under a GradScaler; once a
    step under accumulation. Cost on the CPU: torch's, and two to three times as much if engaged. On accelerators the host reads
    nothing: every step is measured, at about twice torch's memory traffic, events are told one call later, a skipped step leaves
    zeros, and the norm of float16 gradients comes in float32. `error_if_nonfinite` or a sparse gradient takes the CPU's way.

    Raises:
        UsageError: max_norm is 0, negative or NaN; or an unknown mode.
    """
    import torch

    if not isinstance(mode, str):  # torch's third positional argument
        mode, norm_type = "row", float(mode)
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    max_norm = _number(max_norm)
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; expected a number above 0 (0 would lose every step; math.inf only measures)")
    with torch.no_grad():
        step = _Step.of(parameters)
        if not step.with_grad:
            if isinstance(parameters, types.GeneratorType) and not step.parameters:  # torch's warning
                warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2)
            return torch.tensor(0.0)
        if norm_type != 2.0 or any(p.is_meta for p in step.with_grad):
            return _torchs(step, max_norm, norm_type, error_if_nonfinite, foreach)
        return _clip(step, max_norm, mode, error_if_nonfinite=error_if_nonfinite, foreach=foreach)


def _listed(given: Any) -> list[torch.Tensor]:
    try:
        return list(given)
    except TypeError:
        raise UsageError(f"got a {type(given).__name__}; expected the model, or tensors such as model.parameters()") from None


def _number(value: Any) -> float:
    try:
        return float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        raise UsageError(f"max_norm is a {type(value).__name__}; expected a number above 0") from None


@dataclass(slots=True)
class _Step:
    """The parameters of one call. names: None for a bare list."""

    model: torch.nn.Module | None
    parameters: list[torch.Tensor]
    with_grad: list[torch.Tensor]

    @classmethod
    def of(cls, given: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> _Step:
        import torch

        if isinstance(given, torch.nn.Module):
            model, parameters = given, list[torch.Tensor](given.parameters())
        else:
            model, parameters = None, [given] if isinstance(given, torch.Tensor) else _listed(given)
            other = next((p for p in parameters if not isinstance(p, torch.Tensor)), None)
            if other is not None:
                raise UsageError(
                    f"got a {type(other).__name__} among the parameters; expected the model, or tensors such as model.parameters()"
                )
            parameters = list({id(p): p for p in parameters}.values())  # a tied parameter given twice is one gradient
        return cls(model=model, parameters=parameters, with_grad=[p for p in parameters if p.grad is not None])

    def coalesce(self) -> bool:
        """Sum duplicate rows of sparse gradients, in place of `grad`; True if there are any."""
        sparse = [p for p in self.with_grad if p.grad.is_sparse]  # type: ignore[union-attr]
        for parameter in sparse:
            if not _grad(parameter).is_coalesced():
                parameter.grad = _grad(parameter).coalesce()
        return bool(sparse)

    def gradients(self) -> Gradients:
        tables = named_tables(self.model) if self.model is not None else tables_among(self.parameters)
        named = self.model.named_parameters() if self.model is not None else enumerate(self.parameters)
        names = {id(p): str(n) if self.model is not None else f"parameters[{n}]" for n, p in named}
        table = [p for p in self.with_grad if id(p) in tables or _grad(p).is_sparse]
        trunk = [p for p in self.with_grad if not (id(p) in tables or _grad(p).is_sparse)]
        return Gradients(
            tables=[_grad(p) for p in table], trunk=[_grad(p) for p in trunk],
            table_names=[tables.get(id(p), names.get(id(p), "?")) for p in table], trunk_names=[names.get(id(p), "?") for p in trunk],
        )  # fmt: skip


def _clip(
    step: _Step, max_norm: float, mode: str, *, error_if_nonfinite: bool, foreach: bool | None, host_reads: bool | None = None
) -> torch.Tensor:
    """host_reads: None decides by the device."""
    has_sparse = step.coalesce()
    values: list[torch.Tensor] = [p.grad for p in step.with_grad]  # type: ignore[misc]
    if has_sparse:
        values = [local(g) if g.is_sparse else g for g in values]
    norm = total_norm(values, 2.0, foreach=foreach)
    full = whole(norm)
    if host_reads is None:
        host_reads = full.device.type in ("cpu", "mps") or has_sparse or error_if_nonfinite
    if host_reads:
        value = float(full)
        if math.isfinite(value) and max_norm >= LOST_COEFFICIENT * (value + 1e-6):
            _torch_scale(step, max_norm, norm, foreach)
            return norm
    tell_waiting()
    gradients = step.gradients()
    measured = measure(gradients, full.device, host_reads=host_reads)
    plan = plan_clip(measured, full, max_norm, mode)
    outcome, copied = to_host(pack(plan, measured.trunk_squares))
    told = Outcome(
        values=outcome, copied=copied, mode=mode, max_norm=max_norm, table_names=gradients.table_names,
        table_sizes=[num_rows(g) for g in gradients.tables], trunk_names=gradients.trunk_names,
        row_ids=[g._indices()[0] if g.is_sparse else None for g in gradients.tables],
    )  # fmt: skip
    if not host_reads:
        tell_later(told)
        return _choose_on_device(gradients, plan, full, max_norm)
    if not bool(plan.engages):
        tell_now(told)
        _torch_scale(step, max_norm, norm, foreach)
        return norm
    if error_if_nonfinite and (bool(plan.is_bad) or bool(plan.removed_R.any())):
        raise RuntimeError("the gradient norm is not finite, so it cannot be clipped (error_if_nonfinite=True)")
    tell_now(told)
    if bool(plan.is_bad):
        for parameter in step.with_grad:
            parameter.grad = None
        return full
    _apply(gradients, plan)
    return _representable(plan.norm, full.dtype)


def _torch_scale(step: _Step, max_norm: float, norm: torch.Tensor, foreach: bool | None) -> None:
    """torch's own second half."""
    sparse = [p for p in step.with_grad if p.grad.is_sparse]  # type: ignore[union-attr]
    if not sparse:
        clip_with_norm(step.with_grad, max_norm, norm, foreach)
        return
    clip_with_norm([p for p in step.with_grad if not _grad(p).is_sparse], max_norm, norm, foreach)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for rows in (local(_grad(p)) for p in sparse):  # torch has no clip for sparse gradients: the same arithmetic on their rows
        rows.mul_(coefficient.to(rows.device))


def _apply(gradients: Gradients, plan: Plan) -> None:
    start = 0
    for gradient in gradients.tables:
        stop = start + num_rows(gradient)
        scale_rows(gradient, plan.row_factor_R[start:stop], plan.removed_R[start:stop])
        start = stop
    scale_all(gradients.tables, plan.table_factor)
    scale_all(gradients.trunk, plan.trunk_factor)


def _choose_on_device(gradients: Gradients, plan: Plan, full: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Both ways at once: where the plan does not engage, every factor is torch's own."""
    import torch

    coefficient = torch.clamp(max_norm / (full + 1e-6), max=1.0).double()
    factor_R = torch.where(plan.engages, plan.row_factor_R * plan.table_factor, coefficient)
    zeroed_R = (plan.removed_R & plan.engages) | plan.is_bad
    sizes = [num_rows(g) for g in gradients.tables]
    scale_on_device(gradients.tables, torch.split(factor_R, sizes), torch.split(zeroed_R, sizes))
    trunk_factor = torch.where(plan.engages, plan.trunk_factor, coefficient)
    many = len(gradients.trunk)
    scale_on_device(gradients.trunk, [trunk_factor] * many, [plan.is_bad] * many)
    kind = torch.float32 if full.dtype == torch.float16 else full.dtype
    return torch.where(plan.engages & plan.is_bad.logical_not(), plan.norm.to(kind), full.to(kind))


def _representable(norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm in float32, or in float64 where a gradient is float64 or float32 cannot hold it."""
    import torch

    small = dtype != torch.float64 and float(norm) <= torch.finfo(torch.float32).max
    return norm.to(torch.float32) if small else norm


def _torchs(step: _Step, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
    norm = total_norm([_grad(p) for p in step.with_grad], norm_type, error_if_nonfinite, foreach)
    clip_with_norm(step.with_grad, max_norm, norm, foreach)
    return norm


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None  # `with_grad` holds no other
    return parameter.grad
