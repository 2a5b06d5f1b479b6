"""TRL's trainers with their default fused head, which never calls the model's own: labels, signed weights and kinds.

Needs trl, which the project does not install: `pip install trl`, or the tests skip. The slow twin is the definition of each loss
from explicit log-probabilities; at what the X-ray feeds, each token has probability 1/V.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ghoststep.engine import Case, ask
from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.finding import Outcome, Severity
from ghoststep.registry import load
from ghoststep.subjects.setup import make_setup

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

V, BETA = 64, 0.1
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w50 {% generation %}{{ m['content'] }} <eos>{% endgeneration %}"
    "{% else %}w51 {{ m['content'] }} {% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(V - 4))]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made: Any = PreTrainedTokenizerFast(tokenizer_object=plain, **special)  # type: ignore[no-untyped-call]
    made.chat_template = TEMPLATE
    return made


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def text(num: int, seed: int) -> str:
    ids = torch.randint(0, 50, (num,), generator=torch.Generator().manual_seed(100 * num + seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, **more)


PLAIN = [{"text": text(n, 0)} for n in (5, 9, 12)]
COMPLETION = [{"prompt": text(4, 1), "completion": text(n, 2)} for n in (3, 6, 8)]
CHAT = [
    {
        "messages": [
            {"role": "user", "content": text(3, n)}, {"role": "assistant", "content": text(n, 3)},
            {"role": "user", "content": text(2, n)}, {"role": "assistant", "content": text(4, n)},
        ]
    }
    for n in (3, 6, 8)
]  # fmt: skip
PAIRS = [{"prompt": text(4, 4), "chosen": text(n, 5), "rejected": text(m, 6)} for n, m in ((3, 5), (6, 2), (4, 4))]


def given_by(trainer: Any, batch: Any = None) -> dict[str, Any]:
    """A setup as a user would write it: the trainer's model, a collated batch, its compute_loss."""
    batch = next(iter(trainer.get_train_dataloader())) if batch is None else batch
    return {"model": trainer.model, "batch": dict(batch), "loss_fn": trainer.compute_loss}


def xray(given: dict[str, Any]) -> LossXray:
    found = Case([make_setup(given)], load(plugins=False).instruments).fact(LossXray)
    assert isinstance(found, LossXray), found
    return found


def targets(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next token at each position, -1 where none is trained."""
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return torch.where(following >= 0, following, -1)


def assert_weights(found: LossXray, target: torch.Tensor, weight: torch.Tensor) -> None:
    num = target.shape[0]
    assert found.target_BT[:num].tolist() == target.tolist()
    torch.testing.assert_close(torch.from_numpy(found.weight_BT[:num]), weight, rtol=1e-5, atol=1e-12)
    assert not found.weight_BT[num:].any()  # a second call of the model, for metrics or the reference
    assert not found.ambiguous_BT.any()


def alarms(given: dict[str, Any], *codes: str) -> dict[str, str]:
    registry = load(plugins=False)
    case = Case([make_setup(given)], registry.instruments)
    answers = {c.code: ask(case, c) for c in registry.select(codes)}
    return {
        code: v.reason or v.findings[0].message
        for code, v in answers.items()
        if v.outcome is Outcome.BROKEN or (v.outcome is Outcome.FOUND and v.severity.rank >= Severity.WARNING.rank)
    }


def sft(folder: Path, rows: list[dict[str, Any]], *, peft_config: Any = None, **more: Any) -> Any:
    args = arguments(trl.SFTConfig, folder, per_device_train_batch_size=3, gradient_checkpointing=False,
                     **{"max_length": 32, **more})  # fmt: skip
    return trl.SFTTrainer(
        model=llama(), args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip


class TestSFT:
    @pytest.mark.parametrize(
        ("rows", "more"),
        [
            (PLAIN, {}),
            (COMPLETION, {}),
            (CHAT, {"assistant_only_loss": True}),
            (PLAIN, {"packing": True, "max_length": 16}),
            (PLAIN, {"peft": True}),
        ],
        ids=["text", "completion", "assistant", "packing", "peft"],
    )
    def test_likelihood(self, tmp_path: Path, rows: list[dict[str, Any]], more: dict[str, Any]) -> None:
        more = dict(more)
        if more.pop("peft", False):
            peft = pytest.importorskip("peft")
            more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        given = given_by(sft(tmp_path, rows, **more))
        target = targets(given["batch"]["labels"])
        found = xray(given)
        assert found.kind is LossKind.HARD
        assert found.num_head_calls == 0
        assert_weights(found, target, (target >= 0).double() / (target >= 0).sum())
        assert alarms(given, "GS1", "GS2") == {}

    def test_smoothing_calls_the_head(self, tmp_path: Path) -> None:
        given = given_by(sft(tmp_path, PLAIN, label_smoothing_factor=0.1))
        found = xray(given)
        assert found.kind is LossKind.SMOOTHED
        assert found.target_probability_BT[found.weight_BT > 0] == pytest.approx(0.9 + 0.1 / V, rel=1e-5)
        assert alarms(given, "GS1", "GS2") == {}

    def test_dynamic_fine_tuning_is_no_plain_likelihood(self, tmp_path: Path) -> None:
        given = given_by(sft(tmp_path, PLAIN, loss_type="dft"))
        target = targets(given["batch"]["labels"])
        found = xray(given)
        assert found.kind is LossKind.OTHER
        assert_weights(found, target, (target >= 0).double() / (target >= 0).sum() / V)  # each times its own probability
        assert alarms(given, "GS1", "GS2") == {}

    def test_labels_shifted_by_the_collator_too_are_found(self, tmp_path: Path) -> None:
        given = given_by(sft(tmp_path, PLAIN))
        labels = given["batch"]["labels"]
        given["batch"]["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        assert "GS202" in alarms(given, "GS2")


def dpo(folder: Path, *, peft_config: Any = None, **more: Any) -> Any:
    args = arguments(trl.DPOConfig, folder, per_device_train_batch_size=3, gradient_checkpointing=False, max_length=32,
                     beta=BETA, **more)  # fmt: skip
    return trl.DPOTrainer(
        model=llama(), ref_model=None if peft_config else llama(5), args=args, peft_config=peft_config,
        train_dataset=datasets.Dataset.from_list(PAIRS), processing_class=tokenizer(),
    )  # fmt: skip


def dpo_twin(batch: dict[str, torch.Tensor], target: torch.Tensor, reference: Any, loss_type: str) -> torch.Tensor:
    """d loss / d log-probability of each token with the sign turned, at log-probabilities of -ln V; [chosen, rejected]."""
    trained = (target >= 0).double()
    token = torch.full(target.shape, -math.log(V), dtype=torch.float64, requires_grad=True)
    policy = (token * trained).sum(1)
    if reference is None:  # the adapters are switched off in the same model, which is fed the same
        refs = policy.detach()
    else:
        with torch.no_grad():
            log_p = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
        refs = (log_p.gather(-1, target.clamp_min(0)[..., None])[..., 0] * trained).sum(1)
    ratio = policy - refs
    if loss_type == "ipo":
        ratio = ratio / trained.sum(1)
    chosen, rejected = ratio.chunk(2)
    difference = chosen - rejected
    loss = (
        (difference - 1 / (2 * BETA)).square().mean()
        if loss_type == "ipo"
        else -functional.logsigmoid(BETA * difference).mean()
    )
    (gradient,) = torch.autograd.grad(loss, token)
    return -gradient


class TestDPO:
    @pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
    def test_preference(self, tmp_path: Path, loss_type: str) -> None:
        trainer = dpo(tmp_path, loss_type=loss_type)
        self.check(given_by(trainer), trainer.ref_model, loss_type)

    def test_with_adapters_the_model_is_its_own_reference(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        trainer = dpo(tmp_path, peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        self.check(given_by(trainer), None, "sigmoid")

    def check(self, given: dict[str, Any], reference: Any, loss_type: str) -> None:
        batch = given["batch"]
        target = targets(batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100))
        found = xray(given)
        assert found.kind is LossKind.POLICY
        weight = dpo_twin(batch, target, reference, loss_type)
        assert_weights(found, target, weight)
        half = len(target) // 2
        assert (found.weight_BT[:half].sum(1) > 0).all()
        assert (found.weight_BT[half : 2 * half].sum(1) < 0).all()
        assert alarms(given, "GS1", "GS2") == {}


class TestGRPO:
    def test_advantages_are_the_weights(self, tmp_path: Path) -> None:
        args = arguments(trl.GRPOConfig, tmp_path, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
                         gradient_checkpointing=False, loss_type="grpo", beta=0.0)  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=llama(), args=args, processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(set(c.split()))) + 0.1 * i for i, c in enumerate(completions)],
            train_dataset=datasets.Dataset.from_list([{"prompt": text(4, 7)} for _ in range(4)]),
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1  # set by train()
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        found = xray(given_by(trainer, batch))
        assert found.kind is LossKind.POLICY
        mask, advantages = batch["completion_mask"], batch["advantages"].double()
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        kept = torch.cat([torch.zeros_like(batch["prompt_ids"]), mask], 1)
        target = targets(ids.masked_fill(kept == 0, -100))
        weight = (target >= 0) * (advantages / mask.sum(1) / len(mask))[:, None]
        assert_weights(found, torch.where(weight != 0, target, -1), weight)
