"""The two halves of torch's clip, under the names that every supported version of torch can give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghoststep.remedies.clip_gradients import is_sharded, local, whole

if TYPE_CHECKING:
    import torch


def total_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """torch's norm of the norms; 0-dim, a DTensor if the gradients are.

    torch refuses gradients on several meshes (FSDP over tensor parallelism for a part of the model): there, one norm a mesh is
    reduced and joined.
    """
    import torch

    groups = by_mesh(gradients)
    if len(groups) <= 1:
        return _one_norm(gradients, norm_type, error_if_nonfinite, foreach)
    norms = [whole(_one_norm(group, norm_type, error_if_nonfinite, foreach)) for group in groups]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    return joined


def by_mesh(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients that torch can reduce together."""
    import torch

    if {type(g) for g in gradients} == {torch.Tensor}:  # a thousand tensors are asked at once
        return [list(gradients)]
    groups: dict[object, list[torch.Tensor]] = {}
    for g in gradients:
        groups.setdefault(g.device_mesh if is_sharded(g) else None, []).append(g)  # type: ignore[attr-defined]
    return list(groups.values())


def _one_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """torch has it apart from the clip since 2.6."""
    import torch

    if hasattr(torch.nn.utils, "get_total_norm"):
        return torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    norms = [
        torch._foreach_norm([g], norm_type)[0] if g.device.type in ("cpu", "cuda") and foreach is not False
        else torch.linalg.vector_norm(g, norm_type)
        for g in gradients
    ]  # fmt: skip
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(gradients[0].device) for n in norms]), norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError("the gradient norm is not finite, so it cannot be clipped (error_if_nonfinite=True)")
    return norm


def clip_with_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """torch's multiplication by `max_norm / (norm + 1e-6)`, at most 1, in place of the gradients."""
    import torch

    if (
        hasattr(torch.nn.utils, "clip_grads_with_norm_")
        and len(by_mesh([p.grad for p in parameters if p.grad is not None])) <= 1
    ):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return
    coefficient = (max_norm / (whole(norm) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(coefficient.to(parameter.grad.device))
