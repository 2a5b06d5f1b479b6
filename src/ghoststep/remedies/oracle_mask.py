"""Leave chosen tokens out of a batch's inputs and labels: the treatment that others are compared with."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ghoststep.errors import UsageError

if TYPE_CHECKING:
    import torch


def oracle_mask(
    batch: Mapping[str, Any],
    token_ids: Iterable[int] | torch.Tensor,
    *,
    replacement: int,
    ids_key: str = "input_ids",
    labels_key: str | None = "labels",
    ignore_index: int = -100,
) -> Any:
    """A new batch without the chosen tokens: replaced in the inputs, ignored in the labels.

    This is a reference, not a cure. It needs to know beforehand which tokens do harm, and the model never learns them. Compare a
    clip or a repair with it, to see what harmful tokens cost. To train with these tokens, repair their rows or clip by row.

    The tokens are replaced and not hidden by the attention mask: each architecture treats masked positions in its own way, and some
    still send the whole gradient to the row (linear attention of MiniMax: 2.6e19 masked, 3.8e19 unmasked). Removing them would move
    every position behind. Labels are left out wherever they hold a chosen id, so labels that the collator has already shifted are
    right as well. The token that follows a chosen one keeps its label.

    Args:
        batch: a mapping with an integer tensor of token ids of any shape under `ids_key`. Never changed.
        token_ids: ids to leave out, each ≥ 0; may be empty.
        replacement: what stands in for them. Required, because only you know a harmless one: a frequent, trained token whose
            input row is healthy. Not the padding token, whose row is often exactly zero. Not one of `token_ids`.
        labels_key: token ids in the shape of the inputs, or `ignore_index`. None: the batch has no labels that are token ids; then
            the model is trained to predict `replacement` if it takes its labels from its inputs.
        ignore_index: written into the labels.

    Returns:
        A shallow copy, of the batch's own kind if that can be copied and written to, else a dict. Inputs and labels are new
        tensors of the same dtype, shape and device, without a common memory; all other entries are the same objects.
        If every label of a batch is ignored, torch's mean cross entropy of it is NaN.

    Raises:
        UsageError: a batch that is no mapping, a missing entry, labels of another shape, ids that are no integers, a negative id,
            or a replacement that is to be left out itself or does not fit into the inputs' dtype.

    Cost: one comparison of the batch with the ids.
    """
    import torch

    chosen = _chosen(token_ids, replacement)
    ids = _integers(batch, ids_key)
    if replacement > torch.iinfo(ids.dtype).max:
        raise UsageError(
            f"replacement is {replacement}; expected a token id that fits into batch[{ids_key!r}], which is {ids.dtype}"
        )
    chosen_K = torch.tensor(chosen, dtype=torch.int64, device=ids.device)
    new = copy.copy(batch) if hasattr(batch, "__setitem__") else dict(batch)
    new[ids_key] = ids.masked_fill(torch.isin(ids, chosen_K), replacement)
    if labels_key is None:
        return new
    labels = _integers(batch, labels_key)
    if labels.shape != ids.shape:
        raise UsageError(
            f"batch[{labels_key!r}] has shape {tuple(labels.shape)} and batch[{ids_key!r}] {tuple(ids.shape)}; expected the same. If "
            "the labels are no token ids, pass labels_key=None"
        )
    new[labels_key] = labels.masked_fill(torch.isin(labels, chosen_K.to(labels.device)), ignore_index)
    return new


@dataclass(frozen=True, slots=True)
class OracleCollator:
    """A collator whose batches go through `oracle_mask`, which explains the arguments. Can be pickled if `collator` can.

    Trainer(..., data_collator=OracleCollator(collator, token_ids, replacement=frequent_id))
    """

    collator: Callable[[Any], Mapping[str, Any]]
    token_ids: Iterable[int] | torch.Tensor
    replacement: int = field(kw_only=True)
    ids_key: str = field(default="input_ids", kw_only=True)
    labels_key: str | None = field(default="labels", kw_only=True)
    ignore_index: int = field(default=-100, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", _chosen(self.token_ids, self.replacement))  # an iterator is read once

    def __call__(self, examples: Any) -> Any:
        """The collated batch without the chosen tokens."""
        return oracle_mask(
            self.collator(examples), self.token_ids, replacement=self.replacement, ids_key=self.ids_key,
            labels_key=self.labels_key, ignore_index=self.ignore_index,
        )  # fmt: skip


def _chosen(token_ids: Iterable[int] | torch.Tensor, replacement: int) -> tuple[int, ...]:
    if _index(replacement) is None:
        raise UsageError(f"replacement is {replacement!r}; expected a token id, a whole number of 0 or more")
    chosen = _whole_numbers(token_ids)
    if chosen and chosen[0] < 0:
        raise UsageError(f"token_ids holds {chosen[0]}; expected token ids, which are 0 or more")
    if replacement < 0:
        raise UsageError(f"replacement is {replacement}; expected a token id, which is 0 or more")
    if replacement in chosen:
        raise UsageError(
            f"replacement {replacement} is one of the tokens to leave out; choose a frequent token with a healthy row"
        )
    return chosen


def _whole_numbers(token_ids: Any) -> tuple[int, ...]:
    """Ascending, each once."""
    expected = "expected a list or tensor of token ids, whole numbers of 0 or more"
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable) or getattr(token_ids, "ndim", 1) != 1:
        shape = getattr(token_ids, "shape", None)
        raise UsageError(f"token_ids is {f'of shape {tuple(shape)}' if shape is not None else repr(token_ids)}; {expected}")
    chosen = set()
    for given in token_ids:
        i = _index(given)
        if i is None:
            raise UsageError(f"token_ids holds {given!r}; {expected}")
        chosen.add(i)
    return tuple(sorted(chosen))


def _index(value: Any) -> int | None:
    """A whole number of any library; None for what only looks like one (True, 5.0)."""
    value = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _integers(batch: Mapping[str, Any], key: str) -> torch.Tensor:
    import torch

    if not hasattr(batch, "keys"):
        raise UsageError(
            f"the batch is a {type(batch).__name__}; expected a mapping with token ids under {key!r}, such as a dict"
        )
    if key not in batch:
        raise UsageError(f"the batch has no {key!r}, only {', '.join(sorted(map(str, batch))) or 'nothing'}; name its entries by "
                         "ids_key and labels_key (None if it has no labels)")  # fmt: skip
    value = batch[key]
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        got = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(f"batch[{key!r}] is {got}; expected an integer tensor of token ids")
    return value
