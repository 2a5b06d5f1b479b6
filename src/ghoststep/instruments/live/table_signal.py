"""Which rows of a trainable table the first batch trains: the gradient at the embedding's output against the table's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.base import Missing
from ghoststep.evidence.training import PaddingRow, TableSignal
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.outputs import vectors
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch


class SignalWatch:
    """Keeps, for each look-up of the input embedding, the ids and whether a gradient came back to each position.

    dropped: the sum [D] of the gradients at positions that hold `padding_idx`: what the embedding throws away.
    """

    def __init__(self, call: LiveCall | Missing) -> None:
        self.look_ups: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.dropped: list[torch.Tensor] = []
        self._index = None if isinstance(call, Missing) else getattr(call.embedding, "padding_idx", None)
        self._handles: list[Any] = []
        if not isinstance(call, Missing) and call.embedding is not None:
            self._handles.append(call.embedding.register_forward_hook(self._hook, with_kwargs=True))

    def _hook(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        import torch

        ids, output = args[0] if args else next(iter(kwargs.values()), None), vectors(output)
        if not isinstance(ids, torch.Tensor) or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        seen: list[torch.Tensor] = []
        self.look_ups.append((ids.detach(), seen))

        def note(gradient: torch.Tensor) -> None:
            # Scaled multipliers of a batch aside, a position without any gradient is one that nothing in the loss looks at.
            seen.append((gradient.detach() != 0).any(dim=-1))
            if self._index is not None and gradient.shape[:-1] == ids.shape:
                self.dropped.append(gradient.detach()[ids == self._index].float().sum(dim=0))

        output.register_hook(note)  # type: ignore[no-untyped-call]

    def signals(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """ids and bool "a gradient came back", of one shape, one a look-up whose backward ran."""
        return [(ids, seen[-1]) for ids, seen in self.look_ups if seen and seen[-1].shape == ids.shape]

    def remove(self) -> None:
        """Take the hook off."""
        for handle in self._handles:
            handle.remove()


def table_signals(
    call: LiveCall | Missing, named: list[tuple[str, torch.nn.Parameter]], watch: SignalWatch
) -> tuple[TableSignal, ...]:
    """The input embedding's table, and the head's where it is another one. Called while the gradients are there."""
    if isinstance(call, Missing):
        return ()
    fed = fed_rows(watch)
    found = []
    weights = [getattr(m, "weight", None) for m in (call.embedding, head_of(call)) if m is not None]
    for name, p in named:
        if any(p is w for w in weights) and p.requires_grad and p.grad is not None and p.dim() == 2 and fed:
            zero_R = zero_gradient_rows(p.grad)
            masked = [i for i in fed if i < len(zero_R) and zero_R[i]]
            all_zero = bool(zero_R.all())
            found.append(TableSignal(parameter=name, fed_rows=tuple(fed), masked_rows=() if all_zero else tuple(masked)))
    return tuple(found)


def head_of(call: LiveCall) -> Any:
    """The loss's output head, if its weight has a row for every class of the logits; else None (a wide hidden layer)."""
    weight = getattr(call.head, "weight", None)
    if weight is None or weight.dim() != 2 or weight.shape[0] != call.num_classes:
        return None
    if call.logits is not None and call.logits.shape[-1] != weight.shape[0]:
        return None
    return call.head


def fed_rows(watch: SignalWatch) -> list[int]:
    """Ids at positions that received a gradient, ascending."""
    import torch

    ids = [i[s].reshape(-1) for i, s in watch.signals()]
    return sorted({int(i) for part in ids for i in torch.unique(part)})


def zero_gradient_rows(gradient: torch.Tensor) -> torch.Tensor:
    """bool [R] on the CPU: every value of the table row's gradient is exactly 0."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    dense = getattr(dense, "full_tensor", lambda: dense)()
    return (dense.detach() == 0).all(dim=-1).cpu()


def padding_row(setup: Setup, call: LiveCall | Missing, watch: SignalWatch) -> PaddingRow | None:
    """The embedding's `padding_idx`, and where the first batch feeds it as a real token with a gradient coming back."""
    if isinstance(call, Missing) or call.embedding is None:
        return None
    index = getattr(call.embedding, "padding_idx", None)
    weight = getattr(call.embedding, "weight", None)
    if index is None or weight is None or not weight.requires_grad:
        return None
    attended = setup.batches[0].get("attention_mask")
    num_real, place = 0, None
    for ids, signal in watch.signals():
        real = (ids == index) & signal
        has_mask = getattr(attended, "shape", None) == ids.shape and _is_first_text(ids, setup.batches[0])
        real = real & (attended != 0 if has_mask else _not_trailing(ids == index))
        if bool(real.any()) and place is None and real.dim() == 2:
            first = real.nonzero()[0]
            place = int(first[0]), int(first[1])
        num_real += int(real.sum())
    zero = bool((weight.detach()[index] == 0).all())
    return PaddingRow(
        module=call.embedding_name, index=int(index), num_real=num_real, place=place, row_is_zero=zero,
        gradient_error=_gradient_error(weight.grad, int(index), watch),
    )  # fmt: skip


def _gradient_error(gradient: Any, index: int, watch: SignalWatch) -> float:
    """Norm of what the embedding dropped of the row's gradient, over the norm of the whole (1 if nothing of it is left)."""
    if not watch.dropped or gradient is None:
        return 1.0
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    dense = getattr(dense, "full_tensor", lambda: dense)()
    dropped = sum(watch.dropped[1:], watch.dropped[0])
    whole = float((dropped + dense[index].detach().float()).norm())
    return float(dropped.norm()) / whole if whole > 0 else 1.0


def _is_first_text(ids: torch.Tensor, batch: Mapping[str, Any]) -> bool:
    """False for another text of the batch (a pair's second, a decoder's), which `attention_mask` does not speak of."""
    import torch

    given = batch.get("input_ids")
    return not isinstance(given, torch.Tensor) or torch.equal(given.cpu(), ids.cpu())


def _not_trailing(is_pad: torch.Tensor) -> torch.Tensor:
    """Without a mask, a run of the id at either end of an example is taken for padding."""
    if is_pad.dim() != 2:
        return is_pad
    real = (~is_pad).int()
    after_first = real.cummax(dim=1).values.bool()
    before_last = real.flip(1).cummax(dim=1).values.flip(1).bool()
    return after_first & before_last
