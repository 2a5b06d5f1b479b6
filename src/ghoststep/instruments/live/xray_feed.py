"""Feeding known tensors in place of a module's output, and seeing which position each of its rows stands for.

B examples, T positions, D hidden size, V classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Fill = Callable[[int, Any], Any]
"""`fill(call number, the module's own output)` gives what is added to a zero output of its shape, or None for nothing."""


@dataclass(slots=True, kw_only=True)
class Fed:
    """One call of a fed module: the leaf that gradients are taken at, and the rows of its input and of the last hidden state."""

    module: torch.nn.Module
    leaf: torch.Tensor
    inputs_ND: torch.Tensor
    reference: torch.Tensor | None
    look_up: int


@dataclass(slots=True, kw_only=True)
class Feeder:
    """What happened while modules were fed. `look_ups` counts calls of the input embedding so far."""

    fed: list[Fed] = field(default_factory=list)
    look_ups: int = 0
    last_hidden: torch.Tensor | None = None
    last_module: torch.nn.Module | None = None


@contextlib.contextmanager
def feeding(
    core: torch.nn.Module, fed_modules: Sequence[torch.nn.Module], embedding: torch.nn.Module | None,
    grid: Sequence[torch.Size], fill: Fill, *, keep_dtype: bool = False,
) -> Iterator[Feeder]:  # fmt: skip
    """Hooks that replace the outputs of `fed_modules` by float32 leaves (plus `fill`), and follow the last hidden state.

    With `keep_dtype` what is fed has the dtype of the output it stands for: hidden states meet weights of that dtype.

    Calls under no_grad are fed the same values without a leaf: a reference model shared with the policy stays comparable.
    """
    feeder = Feeder()
    shapes = {tuple(s) for s in grid} | {tuple(reversed(s)) for s in grid}
    wanted = {id(m) for m in fed_modules}
    handles: list[Any] = []
    spared: list[Any] = []
    if embedding is not None:
        handles.append(embedding.register_forward_hook(lambda *_: _count(feeder)))
    for module in core.modules():
        if module is core:
            continue
        if id(module) in wanted:
            if _is_plain_linear(module):
                spared.append(module)
            handles.append(module.register_forward_hook(_feed(feeder, fill, keep_dtype)))
        else:
            handles.append(module.register_forward_hook(_follow(feeder, shapes)))
    try:
        for module in spared:
            module.forward = _shape_only(module)
        yield feeder
    finally:
        for module in spared:
            vars(module).pop("forward", None)
        for handle in handles:
            handle.remove()
        feeder.last_hidden = None


def _is_plain_linear(module: torch.nn.Module) -> bool:
    """Only its output's shape matters once that is replaced, and nobody else sees it before."""
    import torch

    return type(module) is torch.nn.Linear and "forward" not in vars(module) and not module._forward_hooks


def _shape_only(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that spares the product over all classes: zeros of its shape and dtype that take no memory."""
    import torch

    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - callers may pass it by this name
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        return torch.zeros((), dtype=dtype, device=input.device).expand(*input.shape[:-1], module.out_features)

    return forward


def _count(feeder: Feeder) -> None:
    feeder.look_ups += 1


def _follow(feeder: Feeder, shapes: set[tuple[int, ...]]) -> Callable[..., None]:
    import torch

    def hook(module: torch.nn.Module, _: Any, output: Any) -> None:
        is_hidden = isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() == 3
        if is_hidden and tuple(output.shape[:2]) in shapes:
            feeder.last_hidden = output.detach()
            feeder.last_module = module

    return hook


def _feed(feeder: Feeder, fill: Fill, keep_dtype: bool) -> Callable[..., Any]:
    import torch

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        given = args[0] if args and isinstance(args[0], torch.Tensor) else output
        # A leaf of one class stride: the gradient has the full shape, the leaf itself takes no memory.
        leaf = (
            torch.zeros(output.shape[-1], dtype=torch.float32, device=output.device)
            .expand(output.shape)
            .requires_grad_(torch.is_grad_enabled())
        )
        fed = leaf.clone()  # what the loss may write into
        added = fill(len(feeder.fed), output)
        if added is not None:
            fed.data.add_(added.to(fed))
        if keep_dtype:
            fed = fed.to(output.dtype)
        if torch.is_grad_enabled():
            feeder.fed.append(
                Fed(
                    module=module,
                    leaf=leaf,
                    inputs_ND=given.detach().reshape(-1, given.shape[-1]),
                    reference=feeder.last_hidden,
                    look_up=max(0, feeder.look_ups - 1),
                )
            )
        return fed

    return hook


def places(fed: Fed, grid: Sequence[torch.Size], offsets: Sequence[int], width: int) -> torch.Tensor | None:
    """The position of each row of a fed call, as example * width + position in the stacked batch; None if it cannot be proven.

    A call over [B, T] is the batch itself, one over [B, n, T] has each position n times. Otherwise (chunks, kept positions,
    flattened, time first) the rows of the module's input are found again, bit for bit, among the last hidden states [B, T, D].
    """
    import torch

    k = min(fed.look_up, len(grid) - 1) if len(grid) > 1 else 0
    num_examples, num_positions = grid[k]
    own = torch.arange(num_examples)[:, None] * width + torch.arange(num_positions) + offsets[k] * width
    lead = tuple(fed.leaf.shape[:-1])
    if lead == (num_examples, num_positions):
        return own.reshape(-1)
    if len(lead) == 3 and (lead[0], lead[2]) == (num_examples, num_positions):
        return own[:, None].expand(lead).reshape(-1)  # a head over several tokens ahead at once
    reference = fed.reference
    if reference is None:
        return None
    if tuple(reference.shape[:2]) == (num_positions, num_examples) != (num_examples, num_positions):
        own = own.T
    rows = _match(fed.inputs_ND, reference.reshape(-1, reference.shape[-1]))
    return None if rows is None else own.reshape(-1)[rows]


def _match(rows_ND: torch.Tensor, reference_MD: torch.Tensor) -> torch.Tensor | None:
    """For each row, which reference row it is: equal bit for bit, else equal in direction. Equal candidates go in order."""
    import torch

    if rows_ND.shape[1] != reference_MD.shape[1]:
        return None
    keys: dict[bytes, list[int]] = {}
    for i, key in enumerate(_bytes(reference_MD)):
        keys.setdefault(key, []).append(i)
    found, last = [], -1
    for key in _bytes(rows_ND.to(reference_MD.dtype)):
        candidates = keys.get(key)
        if not candidates:
            return _match_direction(rows_ND, reference_MD)
        last = next((c for c in candidates if c > last), candidates[0])
        found.append(last)
    return torch.tensor(found, dtype=torch.int64)


def _bytes(rows_ND: torch.Tensor) -> list[bytes]:
    import torch

    raw = rows_ND.detach().contiguous().cpu().view(torch.uint8).reshape(rows_ND.shape[0], -1).numpy()
    return [row.tobytes() for row in raw]


def _match_direction(rows_ND: torch.Tensor, reference_MD: torch.Tensor) -> torch.Tensor | None:
    """A multiplier before the head changes bits but not directions. None unless each row has one clear partner."""
    import torch

    if rows_ND.shape[0] * reference_MD.shape[0] > 1 << 26:
        return None
    unit = torch.nn.functional.normalize(rows_ND.float(), dim=-1)
    cosine_NM = unit @ torch.nn.functional.normalize(reference_MD.float(), dim=-1).T
    best, which = cosine_NM.max(-1)
    if bool((best < 0.9999).any()) or len(set(which.tolist())) < which.numel():
        return None
    return which.cpu()
