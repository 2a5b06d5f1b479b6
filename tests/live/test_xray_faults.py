"""Each label fault planted in a model family of our own, through the engine and the whole catalogue; its healthy twin beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.registry import Registry, load
from ghoststep.subjects.setup import make_setup

V, D, B, T = 48, 24, 4, 14
PAD, BOS, EOS, END = 0, 1, 2, 3
LENGTHS = (14, 11, 9, 6)


class Words:
    """A stand-in for a tokenizer: as much of it as the instruments ask for."""

    def __init__(self, *, size: int = V, pad: int = PAD, adds_bos: bool = False) -> None:
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad, BOS, EOS
        self.all_special_ids = [PAD, BOS, EOS]
        self.size, self.adds_bos = size, adds_bos

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(self.size)}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [BOS, 9] if self.adds_bos else [9]}


class Decoder(nn.Module):
    """One causal attention layer with learned positions and a bias in the head: unlike the models of the shared cases."""

    def __init__(self, *, causal: bool = True, rows: int = V) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.positions = nn.Embedding(rows, D), nn.Embedding(32, D)
        self.query_key_value = nn.Linear(D, 3 * D)
        self.back = nn.Linear(D, D)
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, rows)
        self.causal = causal

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
        x = self.tokens(input_ids) + self.positions(places)
        q, k, v = self.query_key_value(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / D**0.5
        length = input_ids.shape[1]
        allowed = torch.ones(length, length).bool().tril() if self.causal else torch.ones(length, length).bool()
        allowed = allowed.expand(len(input_ids), -1, -1)
        if position_ids is not None:
            document = (position_ids == 0).cumsum(1)
            allowed = allowed & (document[:, :, None] == document[:, None])
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None, :] != 0)
        x = x + self.back(scores.masked_fill(~allowed, -1e9).softmax(-1) @ v)
        logits: torch.Tensor = self.out(self.norm(x))
        return logits


def texts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, *, pad: int = PAD, end: int = EOS) -> dict[str, torch.Tensor]:
    """Ids that begin with BOS, end with EOS and are padded at the right; labels as they should be."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([4 + torch.randperm(V - 4, generator=g)[:T] for _ in lengths])
    steps = torch.arange(T)[None]
    length = torch.tensor(lengths)[:, None]
    ids[:, 0] = BOS
    ids = torch.where(steps == length - 1, end, ids)
    ids = torch.where(steps >= length, pad, ids)
    keep = (steps < length).long()
    return {"input_ids": ids, "attention_mask": keep, "labels": torch.where(keep == 1, ids, -100)}


def shifted_loss(m: nn.Module, b: dict[str, torch.Tensor], *, by: int = 1) -> torch.Tensor:
    logits = m(b["input_ids"], b.get("attention_mask"))
    labels = b["labels"]
    return functional.cross_entropy(logits[:, : T - by].flatten(0, 1), labels[:, by:].flatten())


def setup(b: dict[str, torch.Tensor] | None = None, loss_fn: Any = shifted_loss, **more: Any) -> dict[str, Any]:
    given = {"model": Decoder(), "batch": texts() if b is None else b, "loss_fn": loss_fn, "tokenizer": Words()}
    return {**given, **more}


def mean_of_means(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, labels = m(b["input_ids"], b["attention_mask"])[:, :-1], b["labels"][:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").reshape(labels.shape)
    return (losses.sum(1) / (labels >= 0).sum(1)).mean()


def with_labels(labels: Callable[[dict[str, torch.Tensor]], torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
    b = texts(**more)
    return {**b, "labels": labels(b)}


def garbage(scale: float) -> Decoder:
    model = Decoder(rows=V + 16)
    with torch.no_grad():
        model.out.weight[V:] = scale * torch.randn(16, D, generator=torch.Generator().manual_seed(4))
    return model


def masked_and_smoothed(smoothing: float) -> Any:
    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = m(b["input_ids"], b["attention_mask"]).masked_fill(torch.arange(V + 16) >= V, -torch.inf)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), label_smoothing=smoothing)

    return loss


def packed(ignore: bool) -> dict[str, Any]:
    """Two documents an example: position_ids restart, and a block-diagonal mask that the model honours."""
    b = texts(lengths=(T,) * B)
    position_ids = torch.cat([torch.arange(7), torch.arange(7)]).expand(B, -1)
    labels = b["input_ids"].clone()
    if ignore:
        labels[position_ids == 0] = -100

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = m(b["input_ids"], position_ids=b["position_ids"])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    return setup({"input_ids": b["input_ids"], "position_ids": position_ids, "labels": labels}, loss)


def prompted(train_prompt: bool) -> dict[str, Any]:
    roles = torch.cat([torch.zeros(B, 5), torch.ones(B, T - 5)], dim=1).long()
    b = with_labels(lambda b: b["labels"] if train_prompt else b["labels"].masked_fill(roles == 0, -100))
    return setup(b, token_roles=roles)


def cut(ended: bool) -> dict[str, Any]:
    b = texts(lengths=(T,) * B, end=EOS if ended else 40)
    return setup({**b, "labels": b["labels"].masked_fill(torch.arange(T) < 6, -100)})


def window(total: bool) -> dict[str, Any]:
    batches = [texts(1, (14, 14, 14, 13)), texts(2, (5, 4, 4, 4))]

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        count = int((b["labels"][:, 1:] >= 0).sum())
        return shifted_loss(m, b) * (count / 30 if total else 1)

    return setup(batches[0], loss, batches=batches, accumulation_steps=2)


def masked_model(replace: bool) -> dict[str, Any]:
    b = texts()
    chosen = (torch.arange(T) % 3 == 1) & (b["attention_mask"] == 1)
    ids = torch.where(chosen, END, b["input_ids"]) if replace else b["input_ids"]

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(m(b["input_ids"], b["attention_mask"]).flatten(0, 1), b["labels"].flatten())

    labels = torch.where(chosen, b["input_ids"], -100)
    return setup({**b, "input_ids": ids, "labels": labels}, loss, model=Decoder(causal=False), intent="masked")


def doubled_bos(twice: bool) -> dict[str, Any]:
    b = texts()
    if twice:
        b["input_ids"][:, 1] = BOS
        b["labels"][:, 1] = BOS
    return setup(b, tokenizer=Words(adds_bos=True))


FAULTS: dict[str, tuple[str, Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "labels never shifted": ("GS201", lambda: setup(loss_fn=lambda m, b: shifted_loss(m, b, by=0)), setup),
    "labels shifted twice": ("GS202", lambda: setup(loss_fn=lambda m, b: shifted_loss(m, b, by=2)), setup),
    "a masked model that sees its targets": ("GS203", lambda: masked_model(False), lambda: masked_model(True)),
    "PAD in the loss": ("GS204", lambda: setup(with_labels(lambda b: b["input_ids"])), setup),
    "the prompt in the loss": ("GS205", lambda: prompted(True), lambda: prompted(False)),
    "a mean of means": ("GS206", lambda: setup(loss_fn=mean_of_means), setup),
    "means over micro-batches": ("GS206", lambda: window(False), lambda: window(True)),
    "nothing supervised": ("GS207", lambda: setup(with_labels(lambda b: torch.full_like(b["labels"], -100))), setup),
    "PAD is EOS and masked by id": (
        "GS208",
        lambda: setup(
            with_labels(lambda b: b["input_ids"].masked_fill(b["input_ids"] == EOS, -100), pad=EOS), tokenizer=Words(pad=EOS)
        ),
        lambda: setup(texts(pad=EOS), tokenizer=Words(pad=EOS)),
    ),
    "BOS twice": ("GS209", lambda: doubled_bos(True), lambda: doubled_bos(False)),
    "answers cut off": ("GS210", lambda: cut(False), lambda: cut(True)),
    "targets across documents": ("GS211", lambda: packed(False), lambda: packed(True)),
    "garbage in padded rows": ("GS003", lambda: setup(model=garbage(3.0)), lambda: setup(model=garbage(0.1))),
    "smoothing over masked classes": (
        "GS010",
        lambda: setup(loss_fn=masked_and_smoothed(0.1), model=garbage(0.1)),
        lambda: setup(loss_fn=masked_and_smoothed(0.0), model=garbage(0.1)),
    ),
}
MINE = ("GS2", "GS003", "GS010")


@cache
def registry() -> Registry:
    return load(plugins=False)


def verdicts(given: dict[str, Any]) -> tuple[Verdict, ...]:
    case = Case([make_setup(given)], registry().instruments)
    checks = [c for c in registry().checks if c.code.startswith((*MINE, "GS1"))]
    return diagnose([ask(case, c) for c in checks], checks)


def loud(said: tuple[Verdict, ...]) -> dict[str, str | None]:
    assert not [v.reason for v in said if v.outcome is Outcome.BROKEN]
    worse = (Severity.ERROR, Severity.WARNING)
    return {v.code: v.findings[0].message for v in said if v.outcome is Outcome.FOUND and v.severity in worse}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_alone_and_its_twin_is_silent(name: str) -> None:
    code, broken, healthy = FAULTS[name]
    assert loud(verdicts({**broken()})).keys() == {code}
    assert loud(verdicts({**healthy()})) == {}


def two_ahead(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Multi-token prediction: the same head once more on a further layer."""
    assert isinstance(m, Ahead)
    first, second = m(b["input_ids"], b["attention_mask"])
    labels = b["labels"]
    return functional.cross_entropy(first[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 0.3 * functional.cross_entropy(
        second[:, :-2].flatten(0, 1), labels[:, 2:].flatten()
    )


class Ahead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Decoder()
        self.deeper = nn.Linear(D, D)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states: list[torch.Tensor] = []
        handle = self.trunk.norm.register_forward_hook(lambda m, a, o: states.append(o))
        logits = self.trunk(input_ids, attention_mask)
        handle.remove()
        return logits, self.trunk.out(self.trunk.norm(states[0] + self.deeper(states[0]).tanh()))


def prefix(b: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The first five tokens see one another; what follows is causal, and only that is trained."""

    class Prefix(Decoder):
        def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            x = self.tokens(input_ids) + self.positions(torch.arange(T))
            q, k, v = self.query_key_value(x).chunk(3, -1)
            allowed = torch.ones(T, T).bool().tril()
            allowed[:5, :5] = True
            x = x + self.back((q @ k.transpose(1, 2) / D**0.5).masked_fill(~allowed, -1e9).softmax(-1) @ v)
            logits: torch.Tensor = self.out(self.norm(x))
            return logits

    return setup({**b, "labels": b["labels"].masked_fill(torch.arange(T) < 6, -100)}, model=Prefix(), intent="prefix")


def summed(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = m(b["input_ids"], b["attention_mask"])[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), reduction="sum")


def equal_rewards(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    logp = m(b["input_ids"], b["attention_mask"])[:, :-1].log_softmax(-1)
    chosen = logp.gather(-1, b["input_ids"][:, 1:, None])[..., 0]
    advantage = torch.zeros(B, 1)
    loss: torch.Tensor = -(advantage * chosen * b["attention_mask"][:, 1:]).sum() / B
    return loss


def backward(m: nn.Module, _: Any, b: dict[str, torch.Tensor]) -> None:
    shifted_loss(m, b).backward()  # type: ignore[no-untyped-call]


LOOK_ALIKES: dict[str, Callable[[], dict[str, Any]]] = {
    "multi-token prediction": lambda: setup(loss_fn=two_ahead, model=Ahead()),
    "a prefix that is seen": lambda: prefix(texts(lengths=(T,) * B)),
    "a sum over tokens": lambda: setup(loss_fn=summed),
    "groups of equal reward": lambda: setup(loss_fn=equal_rewards, intent="rl"),
    "micro-batches of equal counts": lambda: setup(batches=[texts(1), texts(2)], accumulation_steps=2),
    "a smaller vocabulary than table": lambda: setup(model=garbage(0.1)),
    "texts without an end token": lambda: setup(texts(lengths=(T,) * B, end=40)),
    "left padding": lambda: setup({k: v.flip(1) for k, v in texts().items()}, tokenizer=Words()),
    "a train step alone": lambda: setup(loss_fn=None, train_step=backward),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay_silent(name: str) -> None:
    checks = [c for c in registry().checks if c.code.startswith(MINE)]
    case = Case([make_setup({k: v for k, v in LOOK_ALIKES[name]().items() if v is not None})], registry().instruments)
    assert loud(tuple(ask(case, c) for c in checks)) == {}
