"""GateFloor: what it finds, what it computes, what it leaves behind, and where it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import ghoststep
from ghoststep.errors import UsageError
from ghoststep.remedies.gate_floor_hooks import Enter, GateMovedError
from tests.remedies.gate_models import Beside, NearMisses, Net, build, hand_written, logits, next_token_loss, num_hooks, tokens


@pytest.mark.parametrize(
    ("name", "modules", "kind", "order"),
    [
        ("mamba", [f"backbone.layers.{i}.mixer" for i in range(3)], "silu", 1),
        ("falcon_mamba", [f"backbone.layers.{i}.mixer" for i in range(3)], "silu", 1),
        ("mamba2", [f"backbone.layers.{i}.mixer.norm" for i in range(6)], "silu", 0),
        ("bamba", ["model.layers.0.mamba.norm", "model.layers.2.mamba.norm"], "silu", 0),
        ("qwen3_next", ["model.layers.0.linear_attn.norm", "model.layers.1.linear_attn.norm"], "silu", 0),
        ("olmo_hybrid", ["model.layers.0.linear_attn.o_norm", "model.layers.1.linear_attn.o_norm"], "silu", 0),
        ("xlstm", [f"backbone.blocks.{i}.mlstm_layer.ogate_act_fn" for i in range(2)], "sigmoid", 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gates_are_found(name: str, modules: list[str], kind: str, order: int, dtype: torch.dtype) -> None:
    model = build(name, 0.1).to(dtype)
    floor = ghoststep.GateFloor(model, 1e-2, on_risk="warn")
    assert [(g.module, g.kind, g.order) for g in floor.gates] == [(m, kind, order) for m in modules]
    assert {r.place for r in floor.readings} == {"first position", "middle"}


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_attention_and_feed_forward_are_left_alone(name: str) -> None:
    model = build(name)
    with pytest.raises(UsageError, match="no gate of a recurrent mixer"):
        ghoststep.GateFloor(model)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("gate", ["silu", "module", "by hand", "fused", ""])
def test_only_the_gate_of_a_plain_module(gate: str) -> None:
    torch.manual_seed(0)
    model, batch = Net(NearMisses(gate)), {"ids": torch.randint(0, 50, (2, 12))}
    if gate not in ("silu", "module"):  # what is hidden in a kernel or written out is refused, not half floored
        with pytest.raises(UsageError, match="no gate of a recurrent mixer"):
            ghoststep.GateFloor(model, batch=batch, loss_fn=next_token_loss)
        return
    plain = model(batch["ids"])
    floor = ghoststep.GateFloor(model, 0.05, batch=batch, loss_fn=next_token_loss)
    assert [(g.module, g.kind, g.order) for g in floor.gates] == [("mixer", "silu", 3)]
    mixer, x = cast(NearMisses, model.mixer), model.table(batch["ids"])
    value, beta, *_ = mixer.inner(x).chunk(4, -1)
    state = (nn.functional.silu(mixer.conv(value.mT)[..., :12].mT) * torch.sigmoid(beta)).cumsum(1)
    added = nn.functional.linear(nn.functional.linear(0.05 * state, mixer.out.weight), model.head.weight)
    assert torch.allclose(model(batch["ids"]), plain + added, atol=1e-5)


def test_a_feed_forward_layer_beside_a_mixer_is_left_alone() -> None:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 50, (2, 12))}
    floor = ghoststep.GateFloor(Net(Beside()), batch=batch, loss_fn=next_token_loss)
    assert [(g.module, g.order) for g in floor.gates] == [("mixer.mixer", 3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_a_hand_written_floor_in_the_norm(dtype: torch.dtype, tolerance: float) -> None:
    model = build("mamba2", 0.1).to(dtype)
    twin = copy.deepcopy(model)
    for norm in (m for n, m in twin.named_modules() if n.endswith("mixer.norm")):
        norm.forward = hand_written(0.05).__get__(norm)
    plain = logits(model).float()
    ghoststep.GateFloor(model, 0.05)
    floored, wanted = logits(model).float(), logits(twin).float()
    assert (floored - wanted).norm() <= tolerance * wanted.norm()
    assert (floored - plain).norm() > 10 * tolerance * wanted.norm()


def test_equals_a_hand_written_floor_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")

    class Functions:
        def __getattr__(self, name: str) -> Any:
            return getattr(nn.functional, name)

        def silu(self, z: torch.Tensor) -> torch.Tensor:
            return z * torch.sigmoid(z) + 0.05

    model = build("mamba", 0.1)
    plain = logits(model)
    with ghoststep.GateFloor(model, 0.05):
        floored = logits(model)
    monkeypatch.setattr(modeling, "F", Functions())  # the convolution's activation is looked up elsewhere
    wanted = logits(model)
    assert (floored - wanted).norm() <= 2e-6 * wanted.norm()
    assert (floored - plain).norm() > 1e-3 * wanted.norm()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_removal_is_exact_and_nothing_else_changes(name: str) -> None:
    model = build(name, 0.1)
    before, state, keys, hooks = logits(model), copy.deepcopy(model.state_dict()), list(model.state_dict()), num_hooks(model)
    torch.manual_seed(7)
    random = torch.get_rng_state()
    with ghoststep.GateFloor(model, 1e-2) as floor:
        assert torch.equal(torch.get_rng_state(), random)
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        assert list(model.state_dict()) == keys
        assert not torch.equal(logits(model), before)
        assert "gates=" in repr(floor)
    assert torch.equal(logits(model), before)
    assert num_hooks(model) == hooks
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    floor.remove()  # does nothing
    ghoststep.GateFloor(model, 1e-2).remove()  # can be installed again


def test_other_hooks_stay_and_an_error_in_the_forward_leaves_no_mode() -> None:
    model = build("mamba2", 0.1)
    calls: list[str] = []
    norm = model.get_submodule("backbone.layers.0.mixer.norm")
    handle = norm.register_forward_hook(lambda m, a, o: calls.append("forward"))
    floor = ghoststep.GateFloor(model, 1e-2)
    count = len(calls)
    with pytest.raises(RuntimeError):
        norm(torch.zeros(1, 3, 64), torch.zeros(1, 3, 63))
    assert float(torch.nn.functional.silu(torch.zeros(1))) == 0.0
    logits(model)
    assert len(calls) == count + 1
    floor.remove()
    assert num_hooks(model) == 1
    handle.remove()


def test_gradient_falls_by_orders_of_magnitude() -> None:
    after = {}
    for delta in (1e-4, 1e-2, 1e-1):
        with ghoststep.GateFloor(build("mamba2", 0.1), delta) as floor:
            for reading in floor.readings:
                assert reading.before > 1e12
                after[delta, reading.place] = reading.after
    for place in ("first position", "middle"):
        assert after[1e-1, place] < 1e3
        assert after[1e-2, place] < 1e4
        assert after[1e-4, place] < 1e6
        assert after[1e-1, place] < after[1e-2, place] < after[1e-4, place]


def test_refuses_where_it_creates_the_failure() -> None:
    model = build("mamba2", 0.0)
    before = logits(model)
    with pytest.raises(UsageError, match=r"first position.*rises from .*removed again.*convolutions' biases.*BOS"):
        ghoststep.GateFloor(model, 1e-2)
    assert torch.equal(logits(model), before)
    assert num_hooks(model) == 0
    with pytest.warns(UserWarning, match="rises from"):
        floor = ghoststep.GateFloor(model, 1e-2, on_risk="warn")
    first = next(r for r in floor.readings if r.place == "first position")
    assert first.before < 1e3
    assert first.after > 1e6
    assert not torch.equal(logits(model), before)


def test_what_cannot_be_measured_is_refused() -> None:
    model = build("mamba2", 0.1)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # type: ignore[operator]
    with pytest.raises(UsageError, match="cannot be measured: the median row of the input table is zero"):
        ghoststep.GateFloor(model)
    assert num_hooks(model) == 0
    with pytest.warns(UserWarning, match="The floor stays"):
        floor = ghoststep.GateFloor(model, on_risk="warn")
    assert len(floor.gates) == 6
    assert floor.readings == ()


def test_healthy_install_is_silent_and_a_useless_one_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ghoststep.GateFloor(build("mamba2", 0.1), 1e-2)
        ghoststep.GateFloor(build("olmo_hybrid", 0.1), 1e-2)
    with pytest.warns(UserWarning, match=r"does not help at the middle.*sigmoid gates"):
        ghoststep.GateFloor(build("xlstm", num_hidden_layers=4), 1e-2)


def test_copies_carry_the_floor(tmp_path: Path) -> None:
    model = build("mamba2", 0.1)
    plain = logits(model)
    floor = ghoststep.GateFloor(model, 1e-2)
    floored = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), floored)
        held = ghoststep.GateFloor.of(twin)
        assert (held.gates, held.delta) == (floor.gates, 1e-2)
        held.remove()
        assert torch.equal(logits(twin), plain)
    assert torch.equal(logits(model), floored)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(model).from_pretrained(tmp_path).train()  # type: ignore[attr-defined]
    assert torch.equal(logits(loaded), plain)
    ghoststep.GateFloor(loaded, 1e-2)
    assert torch.equal(logits(loaded), floored)
    with pytest.raises(UsageError, match="no gate floor"):
        ghoststep.GateFloor.of(build("mamba2"))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_cached_decoding_equals_the_full_forward(name: str) -> None:
    model = build(name, 0.1)
    ghoststep.GateFloor(model, 0.05)
    model.eval()
    ids = tokens()
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        made = model.generate(ids[:, :8], max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)  # type: ignore[operator]
        again = model(input_ids=made.sequences, use_cache=False).logits
    assert torch.allclose(torch.stack(made.logits, 1), again[:, 7:11], atol=1e-5)
    model.train()
    assert torch.allclose(logits(model), full, atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = build("mamba2", 0.1)
    ghoststep.GateFloor(model, 1e-2)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_afterwards_computes_the_same() -> None:
    model = build("mamba2", 0.1, num_hidden_layers=1)
    ghoststep.GateFloor(model, 0.05)
    floored = logits(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(input_ids=tokens(), use_cache=False).logits, floored, atol=1e-5)
    with pytest.raises(UsageError, match=r"before torch\.compile"):
        ghoststep.GateFloor(torch.compile(build("mamba2", 0.1), backend="eager"))  # type: ignore[arg-type]


def test_another_way_through_the_forward_is_an_error() -> None:
    model = build("mamba2", 0.1)
    ghoststep.GateFloor(model, 1e-2)
    norm = model.get_submodule("backbone.layers.0.mixer.norm")
    with pytest.raises(GateMovedError, match="0 activations in this forward and 1"):
        norm(torch.ones(1, 3, 64))


def test_wrong_calls() -> None:
    model = build("mamba2", 0.1)
    for arguments, message in [
        ((model, 0), "above 0"),
        ((model, float("nan")), "above 0"),
        (("x",), "expected a torch.nn.Module"),
    ]:
        with pytest.raises(UsageError, match=message):
            ghoststep.GateFloor(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'refuse' or 'warn'"):
        ghoststep.GateFloor(model, on_risk="no")
    with pytest.raises(UsageError, match="does not run on random tokens"):
        ghoststep.GateFloor(Net(nn.Conv1d(3, 3, 1)))
    with pytest.raises(UsageError, match="returns no loss for this batch"):
        ghoststep.GateFloor(Net(NearMisses("silu")))
    ghoststep.GateFloor(model)
    with pytest.raises(UsageError, match="installed already"):
        ghoststep.GateFloor(model)
    assert sum(isinstance(h, Enter) for m in model.modules() for h in m._forward_pre_hooks.values()) == 6
