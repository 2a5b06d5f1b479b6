"""Several texts looked up in one call of the model, such as question and document: each is looked at by itself, then all count.

A text is one of its own if replacing it whole leaves the hidden states of the call's last text as they are: an encoder's reaches
its decoder. B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ghoststep.evidence.base import Missing
from ghoststep.evidence.batch import BatchFacts
from ghoststep.evidence.influence import Influence, Reading
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.influence_plan import Positions, replacements
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_regions import changes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

STILL = 1e-6
"""Change of a hidden state, over the typical norm, up to which it did not move."""


def texts_apart(probe: Probe) -> list[torch.Tensor]:
    """The ids of each text of the call, in order, if they are several that do not meet where hidden states are read; else [].

    One forward a text.
    """
    import torch

    if probe.num_streams < 2:
        return []
    still: list[bool] = []
    own = 0
    for k, (ids, tables) in enumerate(probe.streams):
        if torch.equal(ids.reshape(-1), probe.ids_BT.reshape(-1)):
            own = k
        flat = ids.reshape(1, -1).numpy()
        everywhere = flat < flat + 1
        at = Positions(ids=flat, real=everywhere, padding=~everywhere, document=0 * flat, trained=everywhere)
        replaced = replacements(at, everywhere, tables, (), k + 1).reshape(ids.shape)
        still.append(bool((changes(probe.hidden_with(ids, tables, replaced), probe.base) <= STILL).all()))
    if not any(still):
        return []
    return [ids for k, (ids, _) in enumerate(probe.streams) if still[k] or still[own] or k == own]


def facts_of(batch: BatchFacts | Missing, call: LiveCall, ids: torch.Tensor, number: int, total: int) -> BatchFacts | Missing:
    """What the batch says of this text: padding by the pad id at the ends, else by the mask that stands at its place."""
    import numpy as np

    ids_BT = ids.numpy()
    if isinstance(batch, Missing) or np.array_equal(batch.ids_BT, ids_BT):
        return batch
    padding_BT, source = _mask(call, ids, number, total), "the mask of this text"
    if batch.pad_id is not None:
        padding_BT, source = _pads(ids_BT, batch.pad_id, is_stop=batch.pad_id in batch.eos_ids), f"pad_token_id {batch.pad_id}"
    return replace(batch, ids_BT=ids_BT, padding_BT=padding_BT, padding_source=source, document_BT=None, labels_BT=None)


def _pads(ids_BT: NDArray[np.int64], pad_id: int, *, is_stop: bool) -> NDArray[np.bool_]:
    import numpy as np

    is_pad = ids_BT == pad_id
    left, right = np.logical_and.accumulate(is_pad, axis=1), np.logical_and.accumulate(is_pad[:, ::-1], axis=1)[:, ::-1]
    if is_stop:  # the first one behind the text is its end
        right = right & np.concatenate([np.zeros_like(right[:, :1]), right[:, :-1]], axis=1)
    return left | right


def _mask(call: LiveCall, ids: torch.Tensor, number: int, total: int) -> NDArray[np.bool_] | None:
    import torch

    given = [v for v in (*call.calls[0].args, *call.calls[0].kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() == 2]
    masks = [v for v in given if bool(((v == 0) | (v == 1)).all())]
    if len(masks) != total or masks[number].shape != ids.shape:
        return None
    return (masks[number] == 0).cpu().numpy()


def joined(main: Influence, texts: Sequence[torch.Tensor], look: Callable[[int, torch.Tensor], Influence | str]) -> Influence:
    """What was seen in any of the texts, as one fact. `look` gives why it could not look at one."""
    answers = [look(k, ids) for k, ids in enumerate(texts)]
    unread = [
        f"text {k + 1} of the {len(texts)} that one call looks up was not looked at: {a}"
        for k, a in enumerate(answers)
        if isinstance(a, str)
    ]
    found = [(k, a) for k, a in enumerate(answers) if isinstance(a, Influence)]
    if not found:
        return replace(main, unread="; ".join(unread), num_texts=len(texts))
    all_found = [a for _, a in found]
    order = _order(all_found)
    return replace(
        main,
        readings=_strongest([(k, a.readings) for k, a in found], len(texts)),
        gradient_readings=_strongest([(k, a.gradient_readings) for k, a in found], len(texts)),
        floor=max(a.floor for a in all_found), past=min(a.past for a in all_found),
        num_past=min(a.num_past for a in all_found),
        near_past=(sum(a.near_past[0] for a in all_found), sum(a.near_past[1] for a in all_found)),
        blind_example=next((a.blind_example for a in all_found if a.blind_example is not None), None),
        order_change=order[0], order_floor=order[1], has_attention=any(a.has_attention for a in all_found),
        probes_perturbed=any(a.probes_perturbed for a in all_found),
        nothing_visible=tuple(p for a in all_found for p in a.nothing_visible),
        is_causal_by_measure=all(a.is_causal_by_measure for a in all_found),
        coupled=max((a.coupled for a in all_found), key=("", "discrete", "continuous").index),
        against_order=any(a.against_order for a in all_found), encoder_padding=False,
        is_time_first=any(a.is_time_first for a in all_found), serial=any(a.serial for a in all_found),
        readout=", ".join(dict.fromkeys(a.readout for a in all_found)), num_examples=max(a.num_examples for a in all_found),
        num_forward=main.num_forward + sum(a.num_forward for a in all_found),
        num_backward=main.num_backward + sum(a.num_backward for a in all_found),
        choice_unprobed=any(a.choice_unprobed for a in all_found),
        reasons=tuple(dict.fromkeys((*unread, *(r for a in all_found for r in a.reasons)))),
        unread="; ".join(unread), num_texts=len(texts),
    )  # fmt: skip


def _order(found: list[Influence]) -> tuple[float | None, float]:
    """A text whose order makes no difference, else none where one was not looked at, else the weakest."""
    known = [(a.order_change, a.order_floor) for a in found if a.order_change is not None]
    weakest = min(known, key=lambda pair: pair[0] / max(pair[1], 1e-30), default=None)
    if weakest is None or (len(known) < len(found) and weakest[0] > weakest[1]):
        return None, 0.0
    return weakest


def _strongest(found: list[tuple[int, Any]], total: int) -> dict[Any, Reading]:
    best: dict[Any, Reading] = {}
    for k, readings in found:
        for region, reading in readings.items():
            if region not in best or reading.relative > best[region].relative:
                best[region] = replace(reading, text=f"text {k + 1} of the {total} that one call looks up")
    return best
