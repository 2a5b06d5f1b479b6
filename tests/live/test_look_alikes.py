"""Look-alikes: healthy setups that must stay silent, each with a broken neighbour (where cheap) that is found.

Every case runs the whole `ghoststep.check`: no error, no warning, nothing broken; notes only where they are named. `answered`
are checks that must have looked and said clear: silence by blindness does not count.

Elsewhere, since they concern files, many steps or a loop: zero rows that nothing reaches, flat norms and partial UTF-8 ids
(tests/checks/test_row_severity.py), anisotropy by a common vector (tests/instruments), CLIP's rising scale as a run (tests of
runs), a flat loss over steps, micro-batches' counts over a whole schedule. DPO through a trainer: tests/live/test_xray_hidden.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ghoststep
from ghoststep.finding import Outcome, Report, Severity
from tests.live import look_alike_losses as losses
from tests.live import look_alike_pairs as pairs
from tests.live import look_alike_setups as s

Make = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class LookAlike:
    """`make` is healthy; `twin` (make, code) is its broken neighbour; `notes` may be said; `answered` must not be unknown."""

    make: Make
    answered: tuple[str, ...] = ()
    notes: frozenset[str] = frozenset()
    twin: tuple[Make, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


USUAL = frozenset({"GS004", "GS106"})
"""Notes that are true of most models here: 60 table rows are no multiple of 64, and with left pads, which nothing here uses,
learned positions by index would break. A case that is about the second names GS106 in `answered`, where only clear counts."""

MASKS = ("GS101", "GS102")

CASES: dict[str, LookAlike] = {
    "more rows than tokens": LookAlike(
        make=lambda: s.setup(s.Wide(0.1), loss_fn=s.plain_loss),
        answered=("GS003",),
        twin=(lambda: s.setup(s.Wide(30.0), loss_fn=s.plain_loss), "GS003"),
    ),
    "right pads in a causal model": LookAlike(make=lambda: s.setup(s.hf("Llama")), answered=(*MASKS, "GS204")),
    "right pads, GPT-2 with dropout": LookAlike(make=lambda: s.setup(s.hf("GPT2")), answered=MASKS),
    "right pads without a mask": LookAlike(
        make=lambda: s.setup(s.tiny(), {k: v for k, v in s.ids_of(0).items() if k != "attention_mask"}),
        answered=("GS101",),
    ),
    "left pads with relative positions": LookAlike(
        make=lambda: s.setup(s.hf("Llama"), s.ids_of(0, side="left")),
        answered=(*MASKS, "GS106"),
        twin=(lambda: s.setup(s.hf("GPT2"), s.ids_of(0, side="left")), "GS106"),
    ),
    "only the padding side that works": LookAlike(
        make=lambda: s.setup(s.hf("GPT2", n_positions=64), s.ids_of(0)),
        answered=MASKS,
        notes=frozenset({"GS106"}),
    ),
    "pads attending to pads": LookAlike(
        make=lambda: s.setup(s.tiny(s.over_pads)),
        answered=MASKS,
        twin=(lambda: s.setup(s.tiny(s.FAULTS.causal_only), s.ids_of(0, side="left")), "GS102"),
    ),
    "transformers' position_ids 1 1 1 0 1 2": LookAlike(
        make=lambda: s.setup(s.hf("GPT2"), s.counted(s.ids_of(0, side="left"), 1)),
        answered=(*MASKS, "GS106"),
    ),
    "transformers' position_ids, plain model": LookAlike(
        make=lambda: s.setup(s.tiny(), s.counted(s.ids_of(0, side="left"), 1)),
        answered=("GS101", "GS106"),
    ),
    "another stop token than EOS supervised": LookAlike(
        make=lambda: losses.stopping(supervised=True),
        answered=("GS208",),
        twin=(lambda: losses.stopping(supervised=False), "GS208"),
    ),
    "several stop ids": LookAlike(make=losses.several_stops, answered=("GS208",)),
    "micro-batches of equal counts": LookAlike(
        make=lambda: s.setup(s.tiny(), accumulation_steps=2),
        twin=(losses.uneven_micro_batches, "GS206"),
    ),
    "rows frozen on purpose": LookAlike(
        make=lambda: losses.frozen_rows(weight_decay=0.0),
        answered=("GS606",),
        twin=(lambda: losses.frozen_rows(weight_decay=0.1), "GS606"),
    ),
    "rows absent from the batch": LookAlike(
        make=lambda: s.setup(s.tiny(), optimizer=None),
        answered=("GS603",),
    ),
    "learning rate 0 on the first warm-up step": LookAlike(
        make=lambda: losses.scheduled(lambda n: min(1.0, n / 10)),
        answered=("GS406",),
        twin=(lambda: losses.scheduled(lambda n: 0.0), "GS406"),
    ),
    "early skips of a scaler": LookAlike(
        make=lambda: losses.scaled(2.0**18),
        answered=("GS407",),
        twin=(losses.always_skipped, "GS405"),
    ),
    "a pad row that is not zero, pads masked": LookAlike(
        make=lambda: s.setup(s.hf("Qwen2", num_key_value_heads=2)), answered=("GS102", "GS605")
    ),
    "lora_A without gradient at the first step": LookAlike(
        make=lambda: s.setup(s.lora()),
        answered=("GS603",),
        twin=(lambda: s.setup(s.lora(detach=True)), "GS603"),
    ),
    "experts without tokens": LookAlike(
        make=lambda: s.setup(s.tiny(mix=s.Experts())),
        answered=("GS603", "GS101"),
        twin=(lambda: s.setup(s.tiny(mix=s.Experts(cut=True))), "GS603"),
    ),
    "mixture of the library": LookAlike(
        make=lambda: s.setup(s.hf("Mixtral", num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=2)),
        answered=("GS101", "GS603"),
    ),
    "top-k that flips under rounding": LookAlike(
        make=lambda: s.setup(s.hf("Mixtral", num_local_experts=8, num_key_value_heads=2).bfloat16()),
        answered=("GS101",),
        notes=frozenset({"GS406"}),
    ),
    "capacity routing between examples": LookAlike(
        make=lambda: s.setup(s.tiny(mix=s.FAULTS.Capacity(last_first=False, per_example=False))),
        answered=("GS101",),
        notes=frozenset({"GS105"}),
        twin=(
            lambda: s.setup(s.tiny(mix=s.FAULTS.Capacity(last_first=True, per_example=True)), s.ids_of(0, lengths=(16,) * 4)),
            "GS101",
        ),
    ),
    "dropout noise": LookAlike(
        make=lambda: s.setup(s.tiny(dropout=0.3)),
        answered=MASKS,
        twin=(lambda: s.setup(s.tiny(s.FAULTS.no_causal, dropout=0.3)), "GS101"),
    ),
    "sliding window": LookAlike(
        make=lambda: s.setup(s.tiny(s.FAULTS.window)),
        answered=MASKS,
        twin=(lambda: s.setup(s.tiny(s.FAULTS.leaky_chunks(4))), "GS101"),
    ),
    "sliding window of the library": LookAlike(
        make=lambda: s.setup(s.hf("Mistral", sliding_window=4, num_key_value_heads=2)), answered=MASKS
    ),
    "chunked attention": LookAlike(make=lambda: s.setup(s.tiny(s.FAULTS.chunks)), answered=MASKS),
    "prefix language model": LookAlike(
        make=losses.prefix,
        twin=(losses.prefix_trained, "GS101"),
    ),
    "encoder": LookAlike(make=losses.bert, answered=("GS102", "GS203"), twin=(losses.bert_unmasked_labels, "GS203")),
    "encoder and decoder": LookAlike(make=losses.t5, answered=("GS101",)),
    "encoder and decoder, other family": LookAlike(make=losses.bart, answered=("GS101",)),
    "diffusion language model": LookAlike(make=losses.diffusion),
    "multi-token prediction": LookAlike(
        make=lambda: s.setup(s.made(lambda: {"m": s.TwoAhead(2)})["m"]),
        answered=("GS201", "GS202"),
    ),
    "a flat loss at a plateau": LookAlike(make=losses.memorised, answered=("GS406",)),
    "preference loss at ln 2": LookAlike(make=losses.preference, notes=frozenset({"GS109"})),
    "contrastive loss at ln B": LookAlike(make=pairs.untrained_pairs, answered=("GS508",), twin=(pairs.doubled_pairs, "GS508")),
    "groups of equal reward": LookAlike(make=losses.equal_rewards),
    "a sum over tokens": LookAlike(
        make=lambda: s.setup(s.tiny(), loss_fn=s.summed),
        answered=("GS206",),
        twin=(lambda: s.setup(s.tiny(), loss_fn=s.per_example), "GS206"),
    ),
    "textual inversion": LookAlike(make=losses.textual_inversion, answered=("GS604",)),
    "unnormalised dot products": LookAlike(make=lambda: pairs.pairs("dot"), answered=("GS507",)),
    "a scale that is learned": LookAlike(make=lambda: pairs.pairs("scale"), answered=("GS508",)),
    "a sigmoid with a bias": LookAlike(make=lambda: pairs.pairs("sigmoid")),
    "stochastic rounding": LookAlike(
        make=lambda: losses.low_precision("stochastic"),
        twin=(lambda: losses.low_precision("plain"), "GS406"),
    ),
    "compensated summation": LookAlike(
        make=lambda: losses.low_precision("kahan"),
        twin=(lambda: losses.low_precision("plain"), "GS406"),
    ),
    "flat norms": LookAlike(make=lambda: s.setup(s.hf("Gemma", num_key_value_heads=2, head_dim=8)), answered=MASKS),
    "anisotropy by a common vector": LookAlike(make=losses.common_vector, answered=MASKS),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def checked(make: Make) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ghoststep.check(**s.made(make))


def said(report: Report) -> dict[str, str]:
    """What was found at or above a warning, and what broke."""
    loud = {}
    for v in report.verdicts:
        if v.outcome is Outcome.BROKEN:
            loud[v.code] = f"BROKEN {v.reason}"
        elif v.outcome is Outcome.FOUND and v.severity.rank >= Severity.WARNING.rank:
            loud[v.code] = v.findings[0].message
    return loud


@pytest.mark.parametrize("name", CASES)
def test_stays_silent(name: str) -> None:
    case = CASES[name]
    report = checked(case.make)
    assert said(report) == {}
    notes = {v.code for v in report.verdicts if v.outcome is Outcome.FOUND}
    assert notes <= case.notes | USUAL, notes
    verdicts = {v.code: v for v in report.verdicts}
    blind = {c: verdicts[c].reason for c in case.answered if verdicts[c].outcome is not Outcome.CLEAR}
    assert blind == {}


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.twin is not None])
def test_its_broken_neighbour_is_found(name: str) -> None:
    twin = CASES[name].twin
    assert twin is not None
    loud = said(checked(twin[0]))
    assert twin[1] in loud, loud
    assert not any("BROKEN" in message for message in loud.values())
