"""The loss X-ray on setups of every kind: wrapped, compiled, checkpointed, other architectures; and that it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ghoststep.evidence.loss import LossKind, LossXray
from ghoststep.instruments.live.batch_facts import batch_facts
from ghoststep.instruments.live.calling import live_call
from ghoststep.instruments.live.loss_xray import loss_xray
from ghoststep.instruments.live.xray_micro import weight_across_micro_batches
from ghoststep.label_shift import measure_shift
from ghoststep.subjects.setup import make_setup
from tests.live.test_xray_twin import BATCH, NEXT, assert_as_twin, hard, smoothed, xray
from tests.live.xray_models import D, Tiny, V, batch, setup_of
from tests.local_hub import need_loopback

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}


def own_loss(model: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    return hard(model(b["input_ids"]))


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=V, num_key_value_heads=2, **more))


def hugging(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, n_positions=32)
        )
    if name == "gemma2":
        config = transformers.Gemma2Config(
            **SIZES, intermediate_size=24, num_key_value_heads=2, head_dim=8, final_logit_softcapping=5.0
        )
        return transformers.Gemma2ForCausalLM(config)
    if name == "cohere":
        return transformers.CohereForCausalLM(
            transformers.CohereConfig(**SIZES, intermediate_size=24, num_key_value_heads=2, logit_scale=0.0625)
        )
    if name == "mixtral":
        config = transformers.MixtralConfig(
            **SIZES, intermediate_size=24, num_key_value_heads=2, num_local_experts=2, output_router_logits=True
        )
        return transformers.MixtralForCausalLM(config)
    if name == "mamba":
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=1, state_size=4)
        )
    return llama()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere", "mixtral", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_the_library_with_their_own_loss(name: str, dtype: torch.dtype) -> None:
    model = hugging(name).to(dtype).train()
    assert_as_twin(xray({"model": model, "batch": BATCH}), hard)


def test_the_head_is_told_from_feed_forward_layers_as_wide_as_the_vocabulary() -> None:
    found = xray({"model": llama(), "batch": BATCH})
    assert not found.further
    assert_as_twin(found, hard)


def test_masked_and_sequence_to_sequence_models() -> None:
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=24))
    chosen = torch.zeros_like(BATCH["input_ids"]).bool()
    chosen[:, 1:6:2] = True
    ids = torch.where(chosen, 2, BATCH["input_ids"])
    labels = torch.where(chosen, BATCH["input_ids"], -100)
    found = xray({"model": bert, "batch": {"input_ids": ids, "attention_mask": BATCH["attention_mask"], "labels": labels}})
    assert found.target_BT.tolist() == torch.where(chosen, BATCH["input_ids"], -1).tolist()
    config = transformers.T5Config(
        vocab_size=V, d_model=D, d_ff=24, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    t5 = transformers.T5ForConditionalGeneration(config)
    given = {
        "input_ids": BATCH["input_ids"],
        "attention_mask": BATCH["attention_mask"],
        "labels": BATCH["labels"][:, :9].contiguous(),
    }
    setup = make_setup({"model": t5, "batch": given})
    call = live_call.function(setup)
    facts, found = batch_facts.function(setup, call), loss_xray.function(setup, call)
    assert found.target_BT.tolist() == torch.where(given["labels"] >= 0, given["labels"], -1).tolist()
    assert facts.ids_BT.shape == (3, 9)
    assert measure_shift(found, facts).offset == 1


def test_adapters_checkpointing_and_a_wrapper() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert_as_twin(xray({"model": model.train(), "batch": BATCH}), hard)
    for target in (["q_proj"], ["q_proj", "lm_head"]):
        adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=target, r=2, task_type="CAUSAL_LM"))
        assert_as_twin(xray({"model": adapted, "batch": BATCH}), hard)


def test_a_warm_compiled_model_is_read_eagerly() -> None:
    model = Tiny()
    compiled = torch.compile(model, backend="eager")
    compiled(BATCH["input_ids"])
    assert_as_twin(xray(setup_of(compiled, BATCH, own_loss)), hard)  # type: ignore[arg-type]


def test_distributed_data_parallel_of_one_process(tmp_path: Any) -> None:
    need_loopback()  # gloo wants it even for one process
    import torch.distributed as dist

    # No rendezvous file that could be waited for.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = nn.parallel.DistributedDataParallel(Tiny())
        assert_as_twin(xray(setup_of(model, BATCH, own_loss)), hard)
        for _ in range(2):
            own_loss(model, BATCH).backward()  # type: ignore[no-untyped-call]
        assert next(model.parameters()).grad is not None
    finally:
        dist.destroy_process_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, b: dict[str, torch.Tensor]) -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = smoothed(model(b["input_ids"])) / 4
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def test_a_train_step_is_left_at_its_backward() -> None:
    model = Tiny(dropout=0.3).train()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step(model, optimizer, BATCH)
    before, own = copy.deepcopy((model.state_dict(), optimizer.state_dict())), optimizer.step
    found = xray({"model": model, "batch": {"input_ids": BATCH["input_ids"]}, "train_step": step, "optimizer": optimizer})
    assert found.kind is LossKind.SMOOTHED
    assert_as_twin(found, lambda z: smoothed(z) / 4)
    assert_same(before, (model.state_dict(), optimizer.state_dict()))
    assert optimizer.step == own
    assert "backward" not in vars(torch.Tensor) or torch.Tensor.backward.__name__ == "backward"
    assert torch.autograd.backward.__name__ == "backward"


def test_a_scaled_loss_of_a_train_step_is_read_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, b: dict[str, torch.Tensor]) -> None:
        scaler.scale(hard(model(b["input_ids"]))).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = xray({"model": model, "batch": BATCH, "train_step": scaled, "optimizer": optimizer, "scaler": scaler})
    assert_as_twin(found, hard)
    assert float(scaler.scale(torch.ones(()))) == 1024.0


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for k in one:
            assert_same(one[k], other[k])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


MAKERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "own, dropout": lambda: (Tiny(dropout=0.5).train(), own_loss),
    "own, tied": lambda: (Tiny(tied=True), own_loss),
    "llama": lambda: (llama(attention_dropout=0.2).train(), None),
    "mixtral": lambda: (hugging("mixtral").train(), None),
    "bfloat16": lambda: (llama().to(torch.bfloat16), None),
    "eval": lambda: (llama().eval(), None),
}


@pytest.mark.parametrize("name", MAKERS)
def test_observing_changes_nothing(name: str) -> None:
    def run(look: bool) -> Any:
        torch.manual_seed(5)
        model, loss_fn = MAKERS[name]()
        frozen = next(model.parameters())
        frozen.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        setup = make_setup(
            {"model": model, "batch": BATCH, "optimizer": optimizer, **({"loss_fn": loss_fn} if loss_fn else {})}
        )

        def loss() -> torch.Tensor:
            value: torch.Tensor = loss_fn(model, BATCH) if loss_fn else model(**BATCH).loss
            return value

        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        hooks = [len(m._forward_hooks) for m in model.modules()]
        torch.manual_seed(6)
        if look:
            call = live_call.function(setup)
            found = loss_xray.function(setup, call)
            assert isinstance(found, LossXray)
            assert found.kind is LossKind.HARD
        modes = [m.training for m in model.modules()]
        flags = [p.requires_grad for p in model.parameters()]
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        after = loss()
        after.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert hooks == [len(m._forward_hooks) for m in model.modules()]
        return [modes, flags, after.detach(), *[g for g in grads if g is not None]], model.state_dict(), optimizer.state_dict()

    assert_same(run(False), run(True))


def test_weights_across_the_micro_batches_of_a_window() -> None:
    window = [batch(1, (12, 9, 7)), batch(2, (4, 3, 3))]

    def mean(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(m(b["input_ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    def total(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        count = int((b["labels"][:, 1:] >= 0).sum())
        return mean(m, b) * count / 32

    for loss_fn, ratio in ((mean, 25 / 7), (total, 1.0)):
        setup = make_setup({"model": Tiny(), "batches": window, "loss_fn": loss_fn, "accumulation_steps": 2})
        found = weight_across_micro_batches.function(setup, live_call.function(setup))
        assert found.num_tokens == (25, 7)
        assert found.weights[1] / found.weights[0] == pytest.approx(ratio, rel=1e-5)


def test_fast_reads_the_same_in_one_forward_where_the_graph_proves_a_cross_entropy() -> None:
    setup = make_setup(setup_of(Tiny(), BATCH, own_loss), fast=True)
    found = loss_xray.function(setup, live_call.function(setup))
    assert_as_twin(found, hard)
    assert (found.num_forward, found.kind, found.residual) == (1, LossKind.HARD, 0.0)


def test_fast_looks_twice_where_factors_may_come_from_the_logits() -> None:
    def by_own_probability(model: Any, given: Any) -> torch.Tensor:
        logits, labels = model(given["input_ids"])[:, :-1], given["labels"][:, 1:].clamp_min(0)
        logp = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        loss: torch.Tensor = -(logp.exp().detach() * logp).mean()
        return loss

    setup = make_setup(setup_of(Tiny(), BATCH, by_own_probability), fast=True)
    found = loss_xray.function(setup, live_call.function(setup))
    assert (found.num_forward, found.kind) == (2, LossKind.OTHER)


def test_next_labels_are_one_ahead() -> None:
    setup = make_setup(setup_of(Tiny(), BATCH, own_loss))
    call = live_call.function(setup)
    facts = batch_facts.function(setup, call)
    assert measure_shift(loss_xray.function(setup, call), facts).offset == 1
    assert facts.sides == "right"
    assert int(NEXT.max()) < V


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "mixtral", "mamba", "llama", "bert", "t5"])
def test_healthy_models_of_the_library_are_silent(name: str) -> None:
    from ghoststep.engine import Case, ask
    from ghoststep.finding import Outcome, Severity
    from ghoststep.registry import load

    registry = load(plugins=False)
    given: dict[str, Any] = {"batch": BATCH}
    if name == "bert":
        chosen = (torch.arange(12) % 3 == 1) & (BATCH["attention_mask"] == 1)
        ids, labels = torch.where(chosen, 2, BATCH["input_ids"]), torch.where(chosen, BATCH["input_ids"], -100)
        given["batch"] = {**BATCH, "input_ids": ids, "labels": labels}
        given["model"] = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=24))
    elif name == "t5":
        config = transformers.T5Config(
            vocab_size=V, d_model=D, d_ff=24, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        given["model"] = transformers.T5ForConditionalGeneration(config)
    else:
        given["model"] = hugging(name)
    case = Case([make_setup(given)], registry.instruments)
    said = [ask(case, c) for c in registry.checks if c.code.startswith(("GS2", "GS003", "GS010"))]
    found = [v for v in said if v.outcome in (Outcome.FOUND, Outcome.BROKEN) and v.severity is not Severity.NOTE]
    assert not [(v.code, v.reason, [f.message for f in v.findings]) for v in found]
    assert case.fact(LossXray).kind is LossKind.HARD  # type: ignore[attr-defined]
