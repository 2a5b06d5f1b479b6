"""A fixed sample of the planted faults: each fault on one architecture, harmful, found first, its healthy twin silent.

The whole table: `python -m tests.mutations.score --output benchmarks/mutation_table.md`.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.mutations.architectures import ARCHITECTURES, BY_NAME
from tests.mutations.faults import BY_NAME as FAULTS
from tests.mutations.score import FIRST, Cell, Heard, cell, outcome_of

SAMPLE = {
    "unshifted": "gpt2",
    "shifted_twice": "mamba",
    "shifted_by_the_collator": "gemma2",
    "decoder_gets_labels": "t5",
    "masking_forgotten": "bert",
    "example_means": "plain_tuple",
    "means_of_micro_batches": "llama",
    "smoothed_masked_columns": "qwen2_tied",
    "pads_supervised": "bart",
    "pad_is_eos": "neox",
    "prompt_supervised": "lora_by_hand",
    "answers_truncated": "plain_dict",
    "all_ignored": "bloom",
    "doubled_bos": "mamba2",
    "target_across_documents": "plain_tensor",
    "no_causal": "gpt2",
    "inverted": "bart",
    "inverted_for_sdpa": "qwen3",
    "zero_one_added": "gemma2",
    "soft_5": "mixtral",
    "soft_10": "prefix_lm",
    "soft_15_large_scores": "opt",
    "minus_1e4_reached": "bloom",
    "window_edge": "neox",
    "chunk": "t5",
    "in_train_only": "plain_dict",
    "with_padding_only": "plain_tuple",
    "zero_projections": "llama",
    "keys_inverted": "bert",
    "keys_inverted_left": "olmoe",
    "keys_inverted_right": "peft",
    "over_queries": "sentence_mean",
    "over_queries_left": "qwen2_tied",
    "only_self": "bert",
    "late_queries_blind": "opt",
    "both_ways": "mamba",
    "shifted_ahead": "mamba2",
    "pads_in_the_state": "jamba",
    "expert_choice": "mixtral",
    "reversed_priority": "olmoe",
    "packs_not_honoured": "llama",
    "reshape": "plain_tensor",
    "norm_over_batch": "mamba",
    "batch_norm": "qwen2_tied",
    "left_pads_absolute": "plain_tensor",
    "order_blind": "bert",
    "garbage_padded_rows": "llama",
    "new_rows_take_mass": "neox",
    "broken_tie": "opt",
    "padding_idx_on_bos": "gemma2",
    "decay_on_frozen_rows": "plain_dict",
    "pads_pooled": "bert_mean",
    "pad_is_last_token": "llama_last",
    "scale_too_low": "sentence_last",
    "duplicate_positives": "sentence_mean",
    "stale_optimizer": "olmoe",
    "embedding_forgotten": "t5",
    "head_frozen": "jamba",
    "base_without_grad": "gpt2",
    "reentrant_checkpoints": "peft",
    "grad_mode_off": "plain_tuple",
    "bf16_small_rate": "llama",
    "embedding_not_saved": "plain_tensor",
    "rate_zero": "lora_by_hand",
    "gradients_not_cleared": "bart",
    "gradients_cleared_first": "neox",
    "clip_bound_zero": "falcon_h1",
    "scheduler_not_stepped": "gemma2",
    "scheduler_per_micro_batch": "bert",
    "scheduler_per_call": "olmoe",
    "no_warm_up": "mixtral",
    "scaler_skips_all": "plain_dict",
    "root_at_zero": "bloom",
}

OPEN: dict[str, str] = {}
"""Known misses of the sample. Strict: take the line out when the fault is found."""


def _cell(fault: str, arch: str) -> Cell:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = cell(FAULTS[fault], BY_NAME[arch], {}, "train")
    finally:
        torch.set_num_threads(threads)
    assert found is not None, f"{fault} does not apply to {arch}"
    return found


def _parameters() -> list[object]:
    marks = {
        name: [pytest.mark.xfail(strict=True, raises=AssertionError, reason=OPEN[name])] if name in OPEN else []
        for name in SAMPLE
    }
    return [pytest.param(name, arch, marks=marks[name], id=f"{name}-{arch}") for name, arch in SAMPLE.items()]


@pytest.mark.parametrize(("fault", "arch"), _parameters())
def test_fault_is_harmful_and_found_first_and_its_twin_is_silent(fault: str, arch: str) -> None:
    found = _cell(fault, arch)
    assert found.harm >= FAULTS[fault].bound, f"harm {found.harm:.2g} {FAULTS[fault].unit}"
    assert found.outcome == FIRST, (found.outcome, found.heard[:2], found.reason)
    assert found.alarms == ()


def test_every_fault_is_in_the_sample_and_every_architecture_too() -> None:
    assert set(SAMPLE) == set(FAULTS)
    assert set(SAMPLE.values()) == {a.name for a in ARCHITECTURES}


def test_there_are_enough_faults_and_architectures() -> None:
    assert len(FAULTS) >= 36
    assert len(ARCHITECTURES) >= 12


def _heard(code: str, severity: str = "error") -> Heard:
    return Heard(code=code, severity=severity, message="")


@pytest.mark.parametrize(
    ("heard", "asked", "expected"),
    [
        ((_heard("GS201"),), (("found", ""),), "first"),
        ((_heard("GS204"), _heard("GS201")), (("found", ""),), "later"),
        ((_heard("GS204"),), (("clear", ""),), "wrong"),
        ((_heard("GS201", "warning"),), (("found", ""),), "weak"),
        ((_heard("GS204", "warning"), _heard("GS201", "warning")), (("found", ""),), "weak"),
        ((), (("clear", ""),), "missed"),
        ((), (("unknown", "no batch"),), "unknown"),
        ((_heard("GS201", "broken"),), (("broken", ""),), "broken"),
    ],
)
def test_score_counts_only_the_right_code_first(
    heard: tuple[Heard, ...], asked: tuple[tuple[str, str], ...], expected: str
) -> None:
    assert outcome_of(FAULTS["unshifted"], heard, asked) == expected


@pytest.mark.parametrize(
    ("heard", "asked", "expected"),
    [
        ((), (("found", ""),), "first"),
        ((_heard("GS406"),), (("found", ""),), "wrong"),
        ((), (("clear", ""),), "missed"),
    ],
)
def test_a_note_is_found_only_with_nothing_worse_beside_it(
    heard: tuple[Heard, ...], asked: tuple[tuple[str, str], ...], expected: str
) -> None:
    assert outcome_of(FAULTS["no_warm_up"], heard, asked) == expected


def test_a_clear_verdict_about_zero_projections_is_a_miss_and_unknown_is_not() -> None:
    fault = FAULTS["zero_projections"]
    assert outcome_of(fault, (), (("clear", ""),)) == "missed"
    assert outcome_of(fault, (), (("unknown", ""),)) == FIRST


@pytest.mark.parametrize("fault", ["unshifted", "no_causal", "rate_zero"])
def test_harm_of_a_healthy_setup_stays_below_the_bound(fault: str) -> None:
    arch, planted = BY_NAME["llama"], FAULTS[fault]
    healthy, again = planted.healthy(arch), planted.healthy(arch)
    assert planted.measure(arch, healthy, again) < planted.bound
