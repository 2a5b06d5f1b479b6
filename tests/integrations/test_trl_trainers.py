"""TRL's trainers take the Trainer's callback as it is. Needs trl, which the project does not install, or the tests skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ghoststep.finding import Outcome
from ghoststep.integrations.transformers import GhoststepCallback
from tests.integrations.runs import POSITION, TOKEN, batches, healthy, poisoned
from tests.integrations.test_every_trainer import STEPS, bad

trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
torch.set_num_threads(1)


def tokenizer(size: int = 160) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(4, size))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)  # type: ignore[no-untyped-call]


def text(ids: torch.Tensor) -> str:
    return " ".join(f"w{i}" for i in ids.tolist())


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=2, **more,
    )  # fmt: skip


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_sft(is_poisoned: bool, tmp_path: Path) -> None:
    seen = GhoststepCallback()
    rows = [{"input_ids": ids.tolist()} for batch in batches(8, guilty=[3]) for ids in batch["input_ids"]]
    model = poisoned() if is_poisoned else healthy()
    more = {"activation_checkpointing": False} if is_poisoned else {}
    trl.SFTTrainer(
        model=model, args=arguments(trl.SFTConfig, tmp_path, max_steps=8, **more), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows), callbacks=[seen],
    ).train()  # fmt: skip
    report = seen.report()
    assert report.subjects[0].facts["steps"] == 8
    if not is_poisoned:
        assert not bad(report)
        return
    (finding,) = report.verdict("zeroed-step").findings
    assert (finding.where.token_id, finding.where.token, finding.where.position) == (TOKEN, "w17", POSITION)
    assert [line.split()[0] for line in bad(report)] == ["GS401"]


@pytest.mark.parametrize("are_equal", [False, True])
def test_grpo_also_where_every_group_has_equal_rewards(are_equal: bool, tmp_path: Path) -> None:
    seen = GhoststepCallback()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if are_equal else len(set(c.split())) + 0.1 * i for i, c in enumerate(completions)]

    prompts = [{"prompt": text(ids[:4])} for batch in batches(6) for ids in batch["input_ids"]]
    trl.GRPOTrainer(
        model=healthy(), processing_class=tokenizer(), reward_funcs=reward, train_dataset=datasets.Dataset.from_list(prompts),
        args=arguments(trl.GRPOConfig, tmp_path, max_steps=6, num_generations=2, max_completion_length=6, beta=0.0),
        callbacks=[seen],
    ).train()  # fmt: skip
    report = seen.report()
    assert not bad(report)
    assert report.subjects[0].facts["steps"] == 6
    assert report.verdict("zeroed-step").outcome in (Outcome.CLEAR, Outcome.NOT_APPLICABLE, Outcome.UNKNOWN)


def test_dpo(tmp_path: Path) -> None:
    seen = GhoststepCallback()
    pairs = [
        {"prompt": text(ids[:4]), "chosen": text(ids[4:10]), "rejected": text(ids[10:])}
        for batch in batches(6)
        for ids in batch["input_ids"]
    ]
    trl.DPOTrainer(
        model=healthy(), ref_model=healthy(), args=arguments(trl.DPOConfig, tmp_path, max_steps=6), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(pairs), callbacks=[seen],
    ).train()  # fmt: skip
    assert not bad(seen.report())
    assert seen.report().subjects[0].facts["steps"] == 6


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(c.split()))) for c in completions]


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_losses_and_weights_keep_their_bits(kind: str, tmp_path: Path) -> None:
    given = batches(STEPS)
    ends = []
    for callbacks in ([], [GhoststepCallback(run_dir=tmp_path / "run")]):
        torch.manual_seed(3)
        model, words = healthy(), tokenizer()
        if kind == "sft":
            rows = [{"input_ids": ids.tolist()} for batch in given for ids in batch["input_ids"]]
            config = arguments(trl.SFTConfig, tmp_path, max_steps=STEPS, logging_steps=1)
            made = trl.SFTTrainer(
                model=model,
                args=config,
                processing_class=words,
                train_dataset=datasets.Dataset.from_list(rows),
                callbacks=callbacks,
            )
        else:
            prompts = [{"prompt": text(ids[:4])} for batch in given for ids in batch["input_ids"]]
            more = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0}
            config = arguments(trl.GRPOConfig, tmp_path, max_steps=STEPS, logging_steps=1, **more)
            made = trl.GRPOTrainer(
                model=model, processing_class=words, reward_funcs=different_words,
                train_dataset=datasets.Dataset.from_list(prompts), args=config, callbacks=callbacks,
            )  # fmt: skip
        made.train()
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        ends.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert len(ends[0][0]) == STEPS
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
