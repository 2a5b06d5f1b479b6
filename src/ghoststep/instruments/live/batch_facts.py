"""What the batch declares: its ids, which positions are padding, which documents it announces. B examples, T positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, SetupCannotRun
from ghoststep.evidence.batch import BatchFacts
from ghoststep.instruments.live.batch_documents import announced_documents
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.token_ids import special_token_ids
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

LABEL_NAMES = ("labels", "label_ids", "targets", "target", "label", "y")


@instrument
def batch_facts(setup: Setup, call: LiveCall) -> BatchFacts:
    """Read the batch beside the ids that really reached the input embedding. Cost: no pass; copies int tensors to the CPU."""
    looked_up = grid(call, setup.intent)
    if not looked_up:
        raise CannotLook(
            "no token ids reached an input embedding (the model takes embeddings, or looks ids up without a module)"
        )
    ids_BT = stack(looked_up, -1)
    special = special_token_ids(setup)
    entries = [_entries(setup, call, k, len(looked_up)) for k in range(len(looked_up))]
    labels_BT = _stacked([_named(e, LABEL_NAMES, ids.shape) for e, ids in zip(entries, looked_up, strict=True)], -100)
    padding_BT, source = _padding(entries, looked_up, ids_BT, labels_BT, special.pad_id, special.eos_ids)
    documents = [announced_documents(e, ids) for e, ids in zip(entries, looked_up, strict=True)]
    document_BT, document_source = _documents(documents, padding_BT)
    return BatchFacts(
        ids_BT=ids_BT, padding_BT=padding_BT, padding_source=source, document_BT=document_BT, document_source=document_source,
        labels_BT=labels_BT, sides=_sides(padding_BT), has_attention_mask=any("attention_mask" in e for e in entries),
        has_position_ids=any("position_ids" in e for e in entries), num_batches=len(setup.batches),
        roles_BT=_roles(setup, ids_BT), supervised_per_batch=_supervised(setup), pad_id=special.pad_id,
        bos_id=special.bos_id, eos_ids=special.eos_ids, special_ids=special.special_ids, adds_bos=special.adds_bos,
        intent=setup.intent,
    )  # fmt: skip


def grid(call: LiveCall, intent: str | None = None) -> list[torch.Tensor]:
    """The ids [B, T] that the logits stand over: one look-up a call of the model, and the decoder's of an encoder-decoder.

    Other models that look ids up several times in one call (prediction of more than one token) are read at the first look-up
    of the shape that the logits have. A model that exchanges batch and time before the look-up, and back before the head, is
    read as it is called.
    """
    shaped = [i.reshape(1, -1) if i.dim() == 1 else _as_called(i, call) for i in call.ids if i.dim() in (1, 2)]
    if len(shaped) == len(call.calls):
        return shaped
    if is_sequence_to_sequence(call, intent):
        return shaped[-1:]
    lead = tuple(call.head_outputs[0].shape[:-1]) if call.head_outputs else None
    return [i for i in shaped if tuple(i.shape) == lead][:1] or shaped[:1]


def _as_called(ids: torch.Tensor, call: LiveCall) -> torch.Tensor:
    import torch

    out = call.head_outputs[0] if call.head_outputs else call.logits
    if out is None or tuple(ids.T.shape) != tuple(out.shape[:-1]) or ids.shape == ids.T.shape:
        return ids
    given = [v for c in call.calls for v in (*c.args, *c.kwargs.values()) if isinstance(v, torch.Tensor)]
    return ids.T if any(v.shape == ids.T.shape and torch.equal(v, ids.T) for v in given) else ids


def is_sequence_to_sequence(call: LiveCall, intent: str | None) -> bool:
    """As the setup declares it, or the model's config does."""
    return intent == "seq2seq" or getattr(getattr(call.core, "config", None), "is_encoder_decoder", False) is True


def stack(tensors: list[torch.Tensor], fill: int) -> NDArray[np.int64]:
    """Int tensors [B_k, T_k] below one another as int64, shorter ones filled up at the right."""
    import numpy as np

    width = max(t.shape[1] for t in tensors)
    parts = [t.detach().cpu().numpy().astype(np.int64) for t in tensors]
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=fill) for p in parts])


def _entries(setup: Setup, call: LiveCall, k: int, num: int) -> dict[str, torch.Tensor]:
    """Tensors by name, as passed to the k-th call of the model and, for a single call, as they stand in the batch."""
    import torch

    which = call.calls[k] if num == len(call.calls) else call.calls[-1]
    found = {n: v for n, v in which.kwargs.items() if isinstance(v, torch.Tensor)}
    if num == 1:
        given = setup.batches[0] if setup.batches else {}
        found = {**{n: v for n, v in given.items() if isinstance(v, torch.Tensor) and n not in found}, **found}
        if is_sequence_to_sequence(call, setup.intent) or len({tuple(i.shape) for i in call.ids}) > 1:
            # An encoder-decoder's attention_mask speaks of the encoder's ids.
            found.pop("attention_mask", None)
            if "decoder_attention_mask" in found:
                found["attention_mask"] = found["decoder_attention_mask"]
    return found


def _named(entries: Mapping[str, torch.Tensor], names: tuple[str, ...], shape: torch.Size) -> torch.Tensor | None:
    for name in names:
        value = entries.get(name)
        if value is not None and not value.is_floating_point():
            if value.shape == shape:
                return value
            if value.dim() == 1 and shape[0] == 1 and value.shape[0] == shape[1]:
                return value.reshape(1, -1)
    return None


def _stacked(parts: list[torch.Tensor | None], fill: int) -> NDArray[np.int64] | None:
    found = [p for p in parts if p is not None]
    return stack(found, fill) if len(found) == len(parts) else None


def _padding(
    entries: list[dict[str, torch.Tensor]],
    looked_up: list[torch.Tensor],
    ids_BT: NDArray[np.int64],
    labels_BT: NDArray[np.int64] | None,
    pad_id: int | None,
    eos_ids: tuple[int, ...],
) -> tuple[NDArray[np.bool_] | None, str]:
    """Which positions are PAD by intent, and what says so; (None, reason) when nothing does."""
    masks, names = [], []
    for e, ids in zip(entries, looked_up, strict=True):
        name, kept = _mask(e, ids.shape)
        masks.append(kept)
        names.append(name)
    kept_BT = _stacked(masks, 0)
    if kept_BT is not None:
        return kept_BT == 0, names[0]
    filled_BT = ids_BT < 0
    if pad_id is None:
        return (filled_BT, "calls of different length") if filled_BT.any() else (None, "no attention_mask and no pad_token_id")
    padding_BT = runs_at_the_ends(ids_BT, labels_BT, pad_id, is_stop=pad_id in eos_ids)
    return padding_BT | filled_BT, f"pad_token_id {pad_id}"


def _mask(entries: Mapping[str, torch.Tensor], shape: torch.Size) -> tuple[str, torch.Tensor | None]:
    """The 2-dimensional mask as 1 = keep. torch's own `*padding_mask` arguments say True for what is left out."""
    for name, value in entries.items():
        if value.shape != shape:
            continue
        if name.endswith("attention_mask") or name == "mask":
            return name, (value != 0).long()
        if name.endswith("padding_mask") and not value.is_floating_point():
            return name, (value == 0).long()
    return "", None


def runs_at_the_ends(
    ids_BT: NDArray[np.int64], labels_BT: NDArray[np.int64] | None, pad_id: int, *, is_stop: bool
) -> NDArray[np.bool_]:
    """Runs of the pad id at either end of an example. A single one that is supervised may be text (an end token): not PAD.

    Where the pad id is also a stop id, the first one after the text is the text's own end.
    """
    import numpy as np

    padding_BT = np.zeros(ids_BT.shape, dtype=bool)
    for b, ids in enumerate(ids_BT.tolist()):
        num = len(ids)
        left, right = 0, num
        while left < num and ids[left] == pad_id:
            left += 1
        while right > left and ids[right - 1] in (pad_id, -1):
            right -= 1
        if is_stop and 0 < left < num:
            left -= 1 if left == 1 else 0  # one begin-or-end token in front is text
        if is_stop and right < num:
            right += 1
        if right == num - 1 and labels_BT is not None and labels_BT[b, right] == pad_id:
            right = num
        padding_BT[b, :left] = True
        padding_BT[b, right:] = True
    return padding_BT


def _documents(
    found: list[tuple[torch.Tensor | None, str]], padding_BT: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64] | None, str]:
    parts = [d for d, _ in found]
    known = [p for p in parts if p is not None]
    if not known or len(known) != len(parts):
        return None, found[0][1]
    document_BT = stack(known, -1)
    real_BT = document_BT >= 0 if padding_BT is None else ~padding_BT
    if all(len(set(d[r].tolist())) < 2 for d, r in zip(document_BT, real_BT, strict=True)):
        return None, "one document an example"
    return document_BT, found[0][1]


def _sides(padding_BT: NDArray[np.bool_] | None) -> str:
    if padding_BT is None or not padding_BT.any():
        return "none"
    some_BT = padding_BT[padding_BT.any(axis=1) & ~padding_BT.all(axis=1)]
    left, right = bool(some_BT[:, 0].any()), bool(some_BT[:, -1].any())
    return "both" if left and right else "left" if left else "right" if right else "none"


def _roles(setup: Setup, ids_BT: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The declared roles laid over the looked-up ids; -1 where nothing is declared."""
    import torch

    roles = setup.token_roles
    if isinstance(roles, str):
        roles = setup.batches[0].get(roles) if setup.batches else None
    if roles is None:
        return None
    value, shape = torch.as_tensor(roles), ids_BT.shape
    if value.dim() == 2 and tuple(value.T.shape) == tuple(shape):
        value = value.T  # the model takes time first
    elif value.dim() == 2 and value.shape[1] < shape[1] and _stand_last(setup, tuple(value.shape), ids_BT):
        # The model puts tokens of its own in front, which have no role.
        value = torch.nn.functional.pad(value, (shape[1] - value.shape[1], 0), value=-1)
    if tuple(value.shape) != tuple(shape):
        raise SetupCannotRun(
            f"token_roles has shape {list(value.shape)}; expected {list(shape)}, that of the ids which the model looks up"
        )
    return stack([value], -1)


def _stand_last(setup: Setup, shape: tuple[int, ...], ids_BT: NDArray[np.int64]) -> bool:
    """True if the looked-up ids end with a tensor of the batch of this shape."""
    import torch

    last = torch.from_numpy(ids_BT[:, -shape[1] :])
    values = setup.batches[0].values() if setup.batches else ()
    return any(isinstance(v, torch.Tensor) and tuple(v.shape) == shape and torch.equal(v.cpu().long(), last) for v in values)


def _supervised(setup: Setup) -> tuple[int, ...]:
    import torch

    counts = []
    for batch in setup.batches:
        labels = next((batch[n] for n in LABEL_NAMES if isinstance(batch.get(n), torch.Tensor)), None)
        if labels is None or labels.is_floating_point() or labels.dim() == 0:
            return ()
        counts.append(int((labels >= 0).sum()))
    return tuple(counts)
