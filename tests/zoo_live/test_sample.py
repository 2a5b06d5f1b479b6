"""A sample of the zoo, one class a kind: the right setup silent, each plant found. All classes: `python -m tests.zoo_live.survey`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests.zoo_live.judge import Said, Seen, judge
from tests.zoo_live.pool import each
from tests.zoo_live.table import alarms, found, is_silent, missed, own_fault_found, table

tr = pytest.importorskip("transformers")

SAMPLE = (
    ("causal", "LlamaForCausalLM"),
    ("causal", "GPT2LMHeadModel"),  # learned positions
    ("causal", "BloomForCausalLM"),  # alibi
    ("causal", "Gemma3ForCausalLM"),  # sliding window
    ("causal", "GptOssForCausalLM"),  # sinks and experts
    ("causal", "Qwen3MoeForCausalLM"),
    ("causal", "DeepseekV3ForCausalLM"),  # latent attention
    ("causal", "Qwen3NextForCausalLM"),  # linear attention beside softmax
    ("causal", "JambaForCausalLM"),
    ("causal", "MambaForCausalLM"),
    ("causal", "RecurrentGemmaForCausalLM"),
    ("causal", "BertLMHeadModel"),
    ("causal", "BartForCausalLM"),  # labels shifted by the user
    ("masked", "BertForMaskedLM"),
    ("masked", "AlbertForMaskedLM"),  # one layer used again and again
    ("masked", "ModernBertForMaskedLM"),
    ("masked", "DebertaV2ForMaskedLM"),
    ("masked", "EsmForMaskedLM"),  # pads come in as zeros
    ("masked", "FNetForMaskedLM"),  # sees pads by construction
    ("seq2seq", "T5ForConditionalGeneration"),
    ("seq2seq", "BartForConditionalGeneration"),
    ("seq2seq", "MarianMTModel"),
    ("seq2seq", "EncoderDecoderModel"),  # a table each for encoder and decoder
    ("seq2seq", "FSMTForConditionalGeneration"),  # the decoder's tensors have time first
)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    torch.set_num_threads(1)
    before = tr.utils.logging.get_verbosity()
    tr.utils.logging.set_verbosity_error()
    yield
    tr.utils.logging.set_verbosity(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), SAMPLE)
def test_right_setup_is_silent_and_plants_are_found(family: str, name: str) -> None:
    seen = judge(name, family, every=True)
    assert not seen.failure, seen.failure
    assert alarms(seen) == []
    assert is_silent(seen)
    assert seen.num_clear >= 25
    assert found(seen), seen.plants


@pytest.mark.filterwarnings("ignore")
def test_a_class_that_shows_the_future_by_itself_is_found() -> None:
    seen = judge("CpmAntForCausalLM", "causal")
    assert own_fault_found(seen), seen.modes


def work(name: str, how: str) -> str:
    if how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(60)
    return f"{name} done"


def test_a_class_that_dies_or_hangs_stops_no_other() -> None:
    told: list[str] = []
    tasks = [("a", "dies"), ("b", "works"), ("c", "hangs"), ("d", "works")]
    got = each(work, tasks, jobs=2, failed=lambda task, why: f"{task[0]} {why}", done=told.append, timeout_seconds=2)
    assert got == ["a its process ended with code 3", "b done", "c took more than 2 s", "d done"]
    assert sorted(told) == sorted(got)


def example(name: str, *said: Said, plant: str = "first", failure: str = "") -> Seen:
    modes = {} if failure else {"eval": said, "train": said}
    return Seen(name=name, family="causal", kind="causal", modes=modes, plants={"future": plant}, failure=failure)


def test_the_table_counts_what_went_wrong() -> None:
    allowed = Said(code="GS616", outcome="note", text="the model is in evaluation mode")
    warning = Said(code="GS106", outcome="warning", text="breaks")
    blind = [Said(code=c, outcome="unknown", text="no place to look") for c in ("GS101", "GS102", "GS103", "GS105")]
    seen = [
        example("Good", allowed), example("Loud", warning), example("Blind", *blind), example("Missed", plant="missed: nothing"),
        example("Nowhere", plant="no place: no layers"), example("Unbuilt", failure="not built: ValueError: too big"),
    ]  # fmt: skip
    assert [s.name for s in seen if is_silent(s)] == ["Good", "Missed", "Nowhere"]
    assert [s.name for s in seen if missed(s)] == ["Missed"]
    page = table(seen, 1.0)
    assert "| causal | 6 | 5 | 3 | 0 | 3 | 1 | 1 | 1 | 1 |" in page
    assert "- Unbuilt (causal): not built: ValueError: too big" in page
    assert "- Loud (causal), eval: GS106 warning: breaks" in page
