"""The contrastive X-ray: which embeddings the loss pulls together and pushes apart, from its gradient at fed ones.

N embeddings, B examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.contrastive import Anchor, ContrastiveForm, ContrastiveXray
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.embedding_seam import FedLoss, Seam, find_seam
from ghoststep.instruments.live.influence_intent import returns_vectors
from ghoststep.instruments.live.xray_pairs import Feed, Pairs, read_pairs
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup

if TYPE_CHECKING:
    import torch

MAX_EMBEDDINGS = 1024
NUM_CUTS = 3
"""Layers of the seam that are tried: modules that compare embeddings, or classify them, stand behind the one that is sought."""
_COUPLED = 1e-4


@instrument
def contrastive_xray(setup: Setup, call: LiveCall) -> ContrastiveXray:
    """Feed orthogonal embeddings where the loss takes them, and read which pairs it pulls and pushes, and how sharply.

    The gradient at one embedding changes when another one does, of another example or of another call (a triplet). `DoesNotApply`
    for any other loss, `CannotLook` where other embeddings cannot be fed.
    Cost: two forwards without activations (up to six), about 12 evaluations of the loss on [N, N] tensors.
    """
    if setup.intent in ("causal", "prefix", "masked", "seq2seq", "rl"):
        raise DoesNotApply(f"no contrastive loss: the setup's intent is {setup.intent}")
    if setup.intent != "contrastive" and call.head is not None and not returns_vectors(call):
        raise DoesNotApply("no contrastive loss: the model returns a score for each class at each position")
    if setup.loss_fn is None and call.loss is None:
        raise CannotLook(call.loss_error or "the setup gives no loss as a function of the model and a batch")
    seam = coupled_seam(setup, call, across_examples=False)
    with FedLoss(setup, seam).open() as loss:
        feed = Feed(loss, seam.values)
        pairs = read_pairs(feed)
    if pairs.form is ContrastiveForm.OTHER and any(_is_by_position(v, call) for v in seam.values):
        raise DoesNotApply("no contrastive loss: it reads a number for each position")
    return _evidence(setup, call, seam, pairs)


def _is_by_position(value: torch.Tensor, call: LiveCall) -> bool:
    """As wide as the texts are long, or one less: log-probabilities of tokens, as preferences compare them."""
    return value.dim() == 2 and any(i.dim() == 2 and value.shape[1] in (i.shape[1], i.shape[1] - 1) for i in call.ids)


def coupled_seam(setup: Setup, call: LiveCall, *, across_examples: bool) -> Seam:
    """The last places at which the gradient of one embedding depends on another one; `DoesNotApply` without any.

    `across_examples`: on one of another example, not only on its own of another call.
    """
    skipped: list[torch.nn.Module] = []
    num_forward = 0
    for _ in range(NUM_CUTS):
        seam = find_seam(setup, call, skipped)
        num_forward += seam.num_forward
        total = sum(int(v.shape[0]) for v in seam.values)
        if total > MAX_EMBEDDINGS:
            raise CannotLook(f"{total} embeddings in the batch; at most {MAX_EMBEDDINGS} are looked at")
        with FedLoss(setup, seam).open() as loss:
            if _couples(loss, seam.values, across_examples):
                return Seam(places=seam.places, values=seam.values, stubs=seam.stubs, num_forward=num_forward)
        skipped += [p.module for p in seam.places]
    raise DoesNotApply("no contrastive loss: each example's gradient is its own")


def _couples(loss: FedLoss, values: Sequence[torch.Tensor], across_examples: bool) -> bool:
    """Does the gradient at the first example move with the last one, or that of one place with the embeddings of another?"""
    import torch

    def gradients(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [v.detach().clone().requires_grad_(True) for v in given]
        value = loss(leaves)
        if not value.requires_grad:
            return [torch.zeros_like(v) for v in leaves]
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        return [torch.zeros_like(v) if g is None else g for g, v in zip(found, leaves, strict=True)]

    def moved(v: torch.Tensor, rows: slice) -> torch.Tensor:
        other = v.clone()
        other[rows] = -other[rows] + other[rows].roll(1, -1) + other[:1]
        return other

    last = slice(-1, None)
    for start in ([v.float() for v in values], [_alike(v) for v in values]):
        before, after = gradients(start), gradients([moved(v, last) for v in start])
        size = _COUPLED * max(*(float(b.norm(dim=-1).max()) for b in before), 1e-12)
        if any(float((a[0] - b[0]).norm()) > size for a, b in zip(after, before, strict=True)):
            return True
        if across_examples or len(values) < 2:
            continue
        after = gradients([start[0], *(moved(v, slice(None)) for v in start[1:])])
        if float((after[0] - before[0]).norm()) > size:
            return True
    return False


def _alike(v: torch.Tensor) -> torch.Tensor:
    """Embeddings of one length that differ little: no softmax over them is saturated, whatever its scale."""
    import torch

    drawn = torch.randn(v.shape, generator=torch.Generator().manual_seed(2)) * 0.05
    alike: torch.Tensor = ((1 + drawn) * v.detach().float().norm(dim=-1).mean().cpu() / v.shape[-1] ** 0.5).to(v.device)
    return alike


def _evidence(setup: Setup, call: LiveCall, seam: Seam, pairs: Pairs) -> ContrastiveXray:
    rows = [int(v.shape[0]) for v in seam.values]
    texts = _texts(call, rows)
    pull = pairs.pull_NN
    anchors = tuple(
        Anchor(
            index=i, positives=tuple((pull[i] < 0).nonzero().flatten().tolist()), num_negatives=int((pull[i] > 0).sum()),
            weight=float(pairs.weight_N[i]),
        )
        for i in pairs.anchor_N.nonzero().flatten().tolist()
    )  # fmt: skip
    pairing = None if texts is None else _Pairing.of(setup.batches[0], texts)
    misplaced, num_paired, columns = ([], 0, ("", "")) if pairing is None else _misplaced(anchors, pairing, texts or [])
    is_softmax = pairs.form is ContrastiveForm.SOFTMAX
    return ContrastiveXray(
        form=pairs.form, places=tuple((p.name, n) for p, n in zip(seam.places, rows, strict=True)), pull_NN=pull.numpy(),
        anchors=anchors, scale=pairs.scale if is_softmax else float("nan"), is_symmetric=pairs.is_symmetric,
        is_cosine=pairs.is_cosine, residual=pairs.residual,
        text_N=None if texts is None else tuple(sorted(set(texts)).index(t) for t in texts),
        example_N=None if pairing is None else tuple(next(iter(p))[1] if len(p) == 1 else -1 for p in pairing.places_N),
        misplaced=tuple(misplaced), num_paired=num_paired, columns=columns, num_forward=seam.num_forward,
    )  # fmt: skip


def _texts(call: LiveCall, rows: Sequence[int]) -> list[bytes] | None:
    """The token ids behind each embedding, in order; None where look-ups and embeddings do not match one to one."""
    ids = [i for i in call.ids if i.dim() == 2]
    if [int(i.shape[0]) for i in ids] != list(rows):
        return None
    return [_key(row) for one in ids for row in one]


def _key(row: torch.Tensor) -> bytes:
    return bytes(row.long().cpu().numpy().tobytes())


Standing = tuple[str, int]
"""Column and example of a text in the batch."""


@dataclass(slots=True, kw_only=True)
class _Pairing:
    """Where each embedding's text stands in the batch: places_N, and whether its labels put i and j together."""

    places_N: list[set[Standing]]
    labels: list[torch.Tensor]

    @staticmethod
    def of(batch: Mapping[str, Any], texts: Sequence[bytes]) -> _Pairing | None:
        """None unless the batch has at least two columns of texts with one entry an example each."""
        tensors = list(_tensors(batch))
        known: dict[bytes, set[Standing]] = {}
        wanted = set(texts)
        for name, tensor in tensors:
            if tensor.is_floating_point() or tensor.dim() not in (2, 3):
                continue
            for example, entry in enumerate(tensor):
                for column, row in enumerate(entry if entry.dim() == 2 else [entry]):
                    key = _key(row)
                    if key in wanted:
                        place = (f"{name}[:, {column}]" if entry.dim() == 2 else name, example)
                        known.setdefault(key, set()).add(place)
        places = [known.get(t, set()) for t in texts]
        columns = {c for p in places for c, _ in p}
        if len(columns) < 2 or any(not p for p in places):
            return None
        labels = [
            t for _, t in tensors if (t.dim() == 1 and not t.is_floating_point()) or (t.dim() == 2 and t.shape[0] == t.shape[1])
        ]
        return _Pairing(places_N=places, labels=labels)

    def is_beside(self, i: int, j: int) -> bool:
        """Same example, other column."""
        return any(a == b and c != d for c, a in self.places_N[i] for d, b in self.places_N[j])

    def is_said(self, i: int, j: int) -> bool:
        """Labels of the batch put an example of i and an example of j together (equal classes, or the index of the other)."""
        for _, a in self.places_N[i]:
            for _, b in self.places_N[j]:
                for label in self.labels:
                    if label.dim() == 1 and max(a, b) < label.shape[0]:
                        one, other = int(label[a]), int(label[b])
                        if one in (other, b) or other == a:
                            return True
                    if label.dim() == 2 and max(a, b) < label.shape[0] and bool((label[a, b] > 0) | (label[b, a] > 0)):
                        return True
        return False


def _misplaced(
    anchors: Sequence[Anchor], pairing: _Pairing, texts: Sequence[bytes]
) -> tuple[list[tuple[int, int]], int, tuple[str, str]]:
    """Anchors pulled only to others than their partners; how many have a partner among the embeddings; the columns."""
    found: list[tuple[int, int]] = []
    num_paired, columns = 0, ("", "")
    for anchor in anchors:
        i = anchor.index
        partners = [j for j in range(len(texts)) if j != i and pairing.is_beside(i, j)]
        if not partners or not anchor.positives:
            continue
        num_paired += 1
        wanted = {texts[j] for j in partners}
        if any(j in partners or texts[j] in wanted or pairing.is_said(i, j) for j in anchor.positives):
            continue
        if not found:
            columns = _columns(pairing, i, partners[0])
        found.append((i, anchor.positives[0]))
    return found, num_paired, columns


def _columns(pairing: _Pairing, i: int, j: int) -> tuple[str, str]:
    return next((c, d) for c, a in sorted(pairing.places_N[i]) for d, b in sorted(pairing.places_N[j]) if a == b and c != d)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value.detach().cpu()
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _tensors(v, f"{name}.{k}" if name else str(k))
    elif isinstance(value, (list, tuple)):
        for k, v in enumerate(value):
            yield from _tensors(v, f"{name}[{k}]")
