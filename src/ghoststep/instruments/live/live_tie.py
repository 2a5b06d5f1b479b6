"""Whether the input embedding and the output head of a model in memory are one tensor, as its config says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.live_tables import base_model, input_weight, output_weight, shares_storage
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

_BLOCK_ROWS = 8192


@instrument
def live_tie_state(setup: Setup, call: LiveCall | Missing, declared: Declared | Missing) -> TieState:
    """Storage identity first, then the values, against the config's flag.

    A class that names no tied parameters ignores the flag: it then counts as undeclared. Cost: at most one pass over both tables.
    """
    (name_in, first), _ = input_weight(setup, call)
    head, why = output_weight(setup, call)
    flag = None if isinstance(declared, Missing) else declared.tie_word_embeddings
    said = (
        "" if isinstance(declared, Missing) or flag is None else f"{declared.file} says {declared.tie_key}={str(flag).lower()}"
    )
    if head is None:
        return TieState(tie=Tie.NO_HEAD, reason=why, declared=flag)
    name_out, second = head
    trainable = len({id(p) for p in (first, second) if p.requires_grad})
    if flag and not _is_honoured(base_model(setup), name_out):
        flag, said = None, f"{said}, which {type(base_model(setup)).__name__} ignores (it names no tied parameters)"
    place = f"{said}; " if said else ""
    if shares_storage(first, second):
        reason = f"{place}{name_out} and {name_in} share one storage"
        return TieState(tie=Tie.TIED, reason=reason, declared=flag, num_trainable_tables=trainable)
    pair = f"{name_out} and {name_in} do not share storage"
    if not flag or first.shape[1:] != second.shape[1:] or first.is_meta or second.is_meta:
        return TieState(tie=Tie.UNTIED, reason=f"{place}{pair}", declared=flag, num_trainable_tables=trainable)
    num_different, first_row = _compare(first, second)
    if num_different:
        reason = f"{pair} and hold different values ({num_different} of {max(len(first), len(second))} table rows)"
        return TieState(
            tie=Tie.BROKEN_FLAG_TRUE, reason=reason, declared=flag, num_different_rows=num_different, first_different_row=first_row,
            num_trainable_tables=trainable,
        )  # fmt: skip
    if not trainable:
        reason = f"{place}{pair}, hold equal values and are both frozen"
        return TieState(tie=Tie.UNTIED, reason=reason, declared=flag, num_different_rows=0, num_trainable_tables=0)
    which = "both are trained" if trainable == 2 else f"{name_out if second.requires_grad else name_in} is trained"
    reason = f"{pair} (equal values now, and {which})"
    return TieState(tie=Tie.DRIFTING, reason=reason, declared=flag, num_different_rows=0, num_trainable_tables=trainable)


def _is_honoured(model: Any, head: str) -> bool:
    """False for a class that declares which parameters it ties, and the head is not among them."""
    if not hasattr(model, "_tied_weights_keys"):
        return True  # a module of the user's own: its config speaks for itself
    keys = model._tied_weights_keys
    if not keys:
        return False
    names = [*keys, *keys.values()] if isinstance(keys, dict) else list(keys)
    leaf = head.rpartition("base_model.model.")[2]
    return any(re.search(str(k), leaf) or leaf.endswith(str(k)) or str(k).rpartition(".")[0] in leaf for k in names)


def _compare(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int | None]:
    """Number of table rows that differ, and the lowest; rows that only one has count. NaN equals NaN."""
    common, found, lowest = min(len(first), len(second)), 0, None
    for start in range(0, common, _BLOCK_ROWS):
        one, two = first.detach()[start : start + _BLOCK_ROWS], second.detach()[start : start + _BLOCK_ROWS].to(first)
        one, two = one[: common - start], two[: common - start]
        different_R = ((one != two) & ~(one.isnan() & two.isnan())).any(dim=1)
        if lowest is None and bool(different_R.any()):
            lowest = start + int(different_R.int().argmax())
        found += int(different_R.sum())
    extra = max(len(first), len(second)) - common
    return found + extra, common if lowest is None and extra else lowest
