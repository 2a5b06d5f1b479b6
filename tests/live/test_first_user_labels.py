"""What a first user planted in setups of their own: each fault is found by its cause, and what looks like it stays silent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.diagnosis import diagnose
from ghoststep.engine import Case, ask
from ghoststep.finding import Outcome, Severity, Verdict
from ghoststep.instruments.live.loss_xray import _one_answer_an_example
from ghoststep.subjects.setup import make_setup

from .test_xray_faults import BOS, EOS, PAD, B, Decoder, T, V, Words, registry, setup, texts

Given = dict[str, Any]
MASK = 3
CE = functional.cross_entropy


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def said(given: Given) -> dict[str, Verdict]:
    case = Case([make_setup(given)], registry().instruments)
    checks = registry().checks
    found = diagnose([ask(case, c) for c in checks if c.code < "GS9"], checks)
    assert not [v.reason for v in found if v.outcome is Outcome.BROKEN]
    return {v.code: v for v in found}


def loud(found: dict[str, Verdict]) -> set[str]:
    worse = (Severity.ERROR, Severity.WARNING)
    return {c for c, v in found.items() if v.outcome is Outcome.FOUND and v.severity in worse and c != "GS607"}


def logits_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Next-token loss on what `change` makes of the logits."""

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return CE(change(m(b["input_ids"], b["attention_mask"]))[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    return loss


def backwards(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    return CE(m(b["input_ids"], b["attention_mask"])[:, 1:].flatten(0, 1), b["labels"][:, :-1].flatten())


def transposed(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = m(b["input_ids"], b["attention_mask"])[:, :-1]
    return CE(logits.transpose(1, 2).reshape(-1, V), b["labels"][:, 1:].flatten())


def pooled(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A healthy loss that averages logits over positions: each row of its softmax comes from all of them."""
    return CE(m(b["input_ids"], b["attention_mask"]).mean(1), b["input_ids"][:, 3])


def without_end(
    seed: int = 0, *, tail: tuple[int, ...] = (), lengths: tuple[int, ...] = (14, 11, 9, 7)
) -> dict[str, torch.Tensor]:
    b = texts(seed, lengths, end=40)
    for row, n in zip(b["input_ids"], lengths, strict=True):
        row[n - 1] = 20 + n
        for k, token in enumerate(tail):
            row[n - len(tail) + k] = token
    return {**b, "labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)}


def only(found: dict[str, Verdict], code: str) -> str:
    assert loud(found) == {code}, {c: found[c].findings[0].message for c in loud(found)}
    return found[code].findings[0].message


class TestShift:
    def test_the_token_before(self) -> None:
        assert "shifted the wrong way" in only(said(setup(loss_fn=backwards)), "GS201")


def masked(kind: str, **more: Any) -> Given:
    """A masked model on 3 of 10 tokens; `kind` names what is wrong with its batch."""
    b = texts(lengths=(14, 13, 12, 11))
    chosen = (torch.arange(T) % 3 == 1) & (b["attention_mask"] == 1) & (b["input_ids"] > 3)
    hidden = torch.where(chosen, MASK, b["input_ids"])
    labels = torch.where(chosen, b["input_ids"], -100)
    if kind == "labels beside":
        labels = torch.cat([labels[:, 1:], torch.full((B, 1), -100)], dim=1)
    if kind == "not replaced":
        hidden = b["input_ids"]
    if kind == "labels after masking":
        labels = torch.where(chosen, hidden, -100)
    if kind == "labels everywhere":
        labels = torch.where(b["attention_mask"] == 1, b["input_ids"], -100)
    if kind == "mask inverted":
        b["attention_mask"] = 1 - b["attention_mask"]

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return CE(m(b["input_ids"], b["attention_mask"]).flatten(0, 1), b["labels"].flatten())

    model = Decoder(causal=kind == "causal")
    return setup({**b, "input_ids": hidden, "labels": labels}, loss, model=model, intent="masked", **more)


class TestMasked:
    @pytest.mark.parametrize(
        ("kind", "code", "text"),
        [
            ("labels beside", "GS202", "stand beside the masked tokens"),
            ("not replaced", "GS203", "put the mask token into the input"),
            ("labels after masking", "GS203", "from the ids before they are masked"),
            ("labels everywhere", "GS203", "not masked to -100"),
            ("mask inverted", "GS116", "the attention mask is inverted"),
            ("causal", "GS103", "sees only what comes before"),
        ],
    )
    def test_each_by_its_cause(self, kind: str, code: str, text: str) -> None:
        assert text in only(said(masked(kind)), code)

    def test_the_right_one(self) -> None:
        found = said(masked(""))
        assert loud(found) == set()
        for code in ("GS205", "GS208", "GS210"):
            assert found[code].outcome is Outcome.NOT_APPLICABLE

    def test_a_model_that_means_the_mask_the_other_way_round(self) -> None:
        class Hides(Decoder):
            def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> torch.Tensor:
                return super().forward(input_ids, 1 - attention_mask, position_ids)

        given = masked("mask inverted")
        assert "GS116" not in loud(said({**given, "model": Hides(causal=False)}))

    def test_a_one_sided_model_is_fine_for_embeddings(self) -> None:
        assert "GS103" not in loud(said({**masked("causal"), "intent": "contrastive"}))


class TestStopToken:
    def test_never_appended(self) -> None:
        assert "end without an end token" in only(said(setup(without_end())), "GS208")

    @pytest.mark.parametrize(
        ("name", "make"),
        [
            ("chunks that fill the width", lambda: setup(without_end(lengths=(T,) * B))),
            ("a stop string", lambda: setup(without_end(tail=(44, 45)))),
            ("too few to say", lambda: setup(without_end(lengths=(T, T, 9, 8)))),
        ],
    )
    def test_look_alikes(self, name: str, make: Callable[[], Given]) -> None:
        assert "GS208" not in loud(said(make())), name

    def test_without_an_end_token_nothing_is_said(self) -> None:
        words = Words()
        words.eos_token_id, words.all_special_ids = None, [PAD, BOS]  # type: ignore[assignment]
        assert said(setup(without_end(), tokenizer=words))["GS208"].outcome is Outcome.UNKNOWN

    def test_a_marker_of_the_template(self) -> None:
        words = Words()
        words.all_special_ids = [PAD, BOS, EOS, 45]
        assert "GS208" not in loud(said(setup(without_end(tail=(45,)), tokenizer=words)))


class TestExamplesWithoutLoss:
    @pytest.mark.parametrize(("num", "severity"), [(3, Severity.WARNING), (1, Severity.NOTE), (0, None)])
    def test_by_their_share(self, num: int, severity: Severity | None) -> None:
        b = texts()
        b["labels"][B - num :] = -100
        found = said(setup(b))["GS207"]
        assert (found.severity if found.outcome is Outcome.FOUND else None) is severity
        if num:
            assert f"{num} of {B} examples" in found.findings[0].message

    def test_weights_that_leave_examples_out_on_purpose(self) -> None:
        def weighted(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
            logits, labels = m(b["input_ids"], b["attention_mask"])[:, :-1], b["labels"][:, 1:]
            each = CE(logits.flatten(0, 1), labels.flatten(), reduction="none").reshape(labels.shape)
            return (each.sum(1) * torch.tensor([0.0, 0.0, 1.0, 0.5])).sum()

        assert said(setup(loss_fn=weighted))["GS207"].outcome is Outcome.CLEAR


class TestRoles:
    def test_the_prompt_is_trained_and_the_answer_is_not(self) -> None:
        roles = torch.cat([torch.zeros(B, 5), torch.ones(B, T - 5)], dim=1).long()
        b = texts()
        b["labels"][roles == 1] = -100
        found = said(setup(b, token_roles=roles))["GS205"]
        assert found.findings[0].severity is Severity.ERROR
        assert "wrong way round" in found.findings[0].message

    def test_without_roles_there_is_no_question(self) -> None:
        assert said(setup())["GS205"].outcome is Outcome.NOT_APPLICABLE


class TestLogits:
    def test_softmax_twice(self) -> None:
        assert "softmax is applied twice" in only(said(setup(loss_fn=logits_loss(lambda z: z.softmax(-1)))), "GS212")

    @pytest.mark.parametrize(
        "change",
        [lambda z: z.log_softmax(-1), lambda z: (z.softmax(-1) + 1e-9).log(), lambda z: 5 * (z / 5).tanh(), lambda z: z / 16],
        ids=["log-probabilities", "their logarithm", "capped", "scaled"],
    )
    def test_what_may_stand_there(self, change: Any) -> None:
        found = said(setup(loss_fn=logits_loss(change)))
        assert found["GS212"].outcome is Outcome.CLEAR
        assert "GS213" not in loud(found)

    def test_smoothing_leaves_a_floor_of_its_own(self) -> None:
        def smoothed(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = m(b["input_ids"], b["attention_mask"])[:, :-1]
            return CE(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), label_smoothing=0.1)

        assert said(setup(loss_fn=smoothed))["GS212"].outcome is Outcome.CLEAR

    def test_scrambled_and_averaged(self) -> None:
        found = said(setup(loss_fn=transposed))
        assert "scrambled before the loss" in found["GS213"].findings[0].message
        assert {"GS213", "GS606"} & loud(found) == {"GS213"}  # rows that it leaves without gradient are its symptom
        assert "GS213" not in loud(said(setup(loss_fn=pooled)))
        assert said(setup())["GS213"].outcome is Outcome.CLEAR


class TestSeveralCalls:
    def test_a_second_pass_over_the_same_texts_for_a_metric_is_no_example_without_loss(self) -> None:
        def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                m(b["input_ids"], b["attention_mask"])  # entropy for a log, as trainers of fused losses compute it
            found: torch.Tensor = logits_loss(lambda z: z)(m, b)
            return found

        found = said(setup(texts(), loss))
        assert loud(found) == set()

    @pytest.mark.parametrize(("width", "expected"), [(2, True), (T, False), (T - 1, False)])
    def test_numbers_of_positions_are_not_classes_of_examples(self, width: int, expected: bool) -> None:
        """A fused loss returns log-probabilities [B, T] or [B, T - 1]; a classifier returns a few scores an example."""
        ids = texts()["input_ids"]
        call: Any = SimpleNamespace(head=None, embedding=nn.Embedding(V, 64), logits=torch.zeros(len(ids), width), ids=(ids,))
        assert _one_answer_an_example(call) is expected
