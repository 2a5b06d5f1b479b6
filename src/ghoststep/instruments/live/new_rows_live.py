"""Output rows of tokens that were added to a vocabulary, against the others, on the first batch."""

from __future__ import annotations

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.rows import OutputRows
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.evidence.training import NewRows
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.registry import instrument


@instrument
def new_rows(call: LiveCall, vocabulary: Vocabulary, output_rows: OutputRows | Missing) -> NewRows:
    """The run of added tokens at the end of the vocabulary: their logits and softmax mass on the first batch.

    Positions whose next token is one of them are left out. `DoesNotApply` where no added token stands at the end.
    Cost: one softmax over logits that the model has computed anyway, in blocks.
    """
    import torch

    if call.logits is None or not call.ids:
        raise CannotLook("the loss never shows logits over the vocabulary")
    first = vocabulary.max_id + 1
    while first - 1 in vocabulary.added:
        first -= 1
    num_new = vocabulary.max_id + 1 - first
    logits = call.logits.reshape(-1, call.logits.shape[-1])
    if num_new == 0 or first < 0.5 * vocabulary.max_id or vocabulary.max_id >= logits.shape[1]:
        raise DoesNotApply("no added tokens stand at the end of the vocabulary")
    keep = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    ids = call.ids[-1]
    if ids.shape == call.logits.shape[:-1]:
        following = torch.cat([ids[:, 1:], ids[:, :1] * 0], dim=1)
        keep = ~((following >= first) & (following < first + num_new)).reshape(-1)
    logits = logits[keep]
    if not len(logits):
        raise CannotLook("every position of the first batch is followed by an added token")
    sums = [0.0, 0.0, 0.0, 0.0]
    for start in range(0, len(logits), 256):
        block = logits[start : start + 256].float()
        mass = block.softmax(dim=1)
        sums[0] += float(block[:, first : first + num_new].mean(dim=1).sum())
        sums[1] += float(block[:, :first].mean(dim=1).sum())
        sums[2] += float(block[:, :first].std(dim=1).sum())
        sums[3] += float(mass[:, first : first + num_new].sum())
    mean_new, mean_old, spread, share = (s / len(logits) for s in sums)
    norms = None if isinstance(output_rows, Missing) else output_rows.rows.norms_R
    return NewRows(
        first_row=first, num_rows=num_new, mean_logit_new=mean_new, mean_logit_old=mean_old, spread_old=spread, share=share,
        num_classes=int(logits.shape[1]),
        norm_new=float("nan") if norms is None else float(norms[first : first + num_new].mean()),
        norm_old=float("nan") if norms is None else float(norms[:first].mean()),
    )  # fmt: skip
