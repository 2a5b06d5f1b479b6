"""Wrong input to `ghoststep check` on a setup: what the user did is said once, in their words, with exit code 2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghoststep
from ghoststep.errors import SubjectError, UsageError
from ghoststep.finding import COULD_NOT_RUN, FindingsError, Outcome, Report
from ghoststep.report import render
from ghoststep.subjects.setup import make_setup, open_setup

V, D = 40, 16
FEW = ("GS001", "GS005", "GS2", "GS4", "GS601", "GS616")


class Model(nn.Module):
    """Two layers over an embedding, positions from a table of 24."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(24, D)
        self.drop = nn.Dropout(dropout)
        self.mix = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.mix(self.drop(x))[0])
        return logits if labels is None else (logits, loss_of(logits, labels))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model(batch["ids"]), batch["labels"])


def batch(time: int = 10, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, V, (4, time), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.clone()}


def setup(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model().train()
    given = {"model": model, "batch": batch(), "loss_fn": loss_fn, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    return {k: v for k, v in {**given, **changed}.items() if v is not None}


def look(given: dict[str, Any], select: tuple[str, ...] = FEW) -> Report:
    return ghoststep.check(given, select=select)


def failure(report: Report) -> str:
    """The line that leads a report of a setup that cannot run; nothing is broken, and the exit code is 2."""
    assert report.exit_code == 2
    assert report.summary.broken == 0
    return str(report.subjects[0].facts[COULD_NOT_RUN])


class TestUsersCodeRaises:
    def test_healthy_setup_has_no_such_line(self) -> None:
        report = look(setup())
        assert report.exit_code == 0
        assert COULD_NOT_RUN not in report.subjects[0].facts
        assert "could not run" not in render(report, "terminal")

    def test_loss_fn(self) -> None:
        def bad(model: Any, given: Any) -> torch.Tensor:
            raise RuntimeError("no such column")

        report = look(setup(loss_fn=bad))
        said = failure(report)
        assert "your loss_fn raised RuntimeError" in said
        assert "no such column" in said
        assert "ids int64 [4, 10]" in said
        text = render(report, "terminal")
        assert text.count("no such column") == 1  # once, above; "(as above)" at the verdicts that follow from it
        assert text.index("could not run") < text.index("could not look")

    def test_model(self) -> None:
        class Raising(Model):
            def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
                raise ValueError("shapes do not fit")

        said = failure(look(setup(model=Raising(), optimizer=None)))
        assert said.startswith("your model, called by loss_fn, raised ValueError")

    def test_wrong_keys_name_what_forward_takes(self) -> None:
        given = setup(loss_fn=None)
        given["batch"] = {"tokens": given["batch"]["ids"].float(), "mask": given["batch"]["labels"].float()}
        said = failure(look(given))
        assert "tokens float32 [4, 10]" in said
        assert "forward, which takes ids, labels" in said

    def test_backward(self) -> None:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("no derivative")

        apply: Callable[[torch.Tensor], torch.Tensor] = Fails.apply
        said = failure(look(setup(loss_fn=lambda m, b: apply(loss_fn(m, b)))))
        assert said.startswith("backward() of your loss raised RuntimeError")

    def test_loss_that_calls_autograd_itself_is_healthy(self) -> None:
        """A gradient penalty raises under no_grad, where nothing of the user's is wrong."""

        def penalised(model: Any, given: Any) -> torch.Tensor:
            loss = loss_fn(model, given)
            (g,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
            total: torch.Tensor = loss + g.pow(2).sum()
            return total

        report = look(setup(loss_fn=penalised))
        assert report.exit_code == 0
        assert COULD_NOT_RUN not in report.subjects[0].facts

    @pytest.mark.parametrize("with_loss", [True, False])
    def test_train_step(self, with_loss: bool) -> None:
        def step(model: Any, optimizer: Any, given: Any) -> None:
            raise KeyError("lr")

        report = look(setup(train_step=step, loss_fn=loss_fn if with_loss else None))
        assert "your train_step (call 1) raised KeyError" in failure(report)

    def test_optimizer(self) -> None:
        class Stuck(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                raise RuntimeError("state is lost")

        given = setup()
        given["optimizer"] = Stuck(given["model"].parameters(), lr=0.1)
        assert "Stuck.step raised RuntimeError" in failure(look(given))

    def test_optimizer_that_wants_a_closure_can_run(self) -> None:
        given = setup()
        given["optimizer"] = torch.optim.LBFGS(given["model"].parameters())
        report = look(given)
        assert report.exit_code == 0
        assert "closure" in (report.verdict("GS406").reason or "")

    def test_scheduler_that_watches_a_metric_is_stepped_with_the_loss(self) -> None:
        given = setup()
        given["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(given["optimizer"])
        assert look(given).verdict("GS406").outcome is Outcome.CLEAR

    def test_own_tests_get_the_line(self) -> None:
        def bad(model: Any, given: Any) -> torch.Tensor:
            raise RuntimeError("no such column")

        with pytest.raises(FindingsError, match="could not run: your loss_fn raised RuntimeError"):
            look(setup(loss_fn=bad)).raise_for("error")


class TestLoss:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda loss: loss.item(), "without .item()"),
            (lambda loss: (loss, 1), "a tuple of 2 (Tensor, int)"),
            (lambda loss: loss.expand(4), "a tensor of shape (4,)"),
            (lambda loss: loss.long(), "a tensor of int64"),
            (lambda loss: None, "returned None"),
        ],
    )
    def test_no_scalar_tensor(self, wrong: Callable[[Any], Any], said: str) -> None:
        line = failure(look(setup(loss_fn=lambda m, b: wrong(loss_fn(m, b)))))
        assert said in line
        assert "expected a scalar floating-point tensor" in line

    def test_one_element_is_a_scalar(self) -> None:
        assert look(setup(loss_fn=lambda m, b: loss_fn(m, b)[None])).exit_code == 0


class TestIds:
    def test_beyond_the_table(self) -> None:
        given = setup()
        given["batch"]["ids"][1, 3] = 10**6
        report = look(given)
        assert "looks up id 1000000 (example 1, position 3) in tokens" in failure(report)
        (finding,) = report.verdict("GS001").findings
        assert (finding.where.token_id, finding.where.example, finding.where.position) == (10**6, 1, 3)
        assert finding.where.tensor == "tokens.weight"
        assert "resize_token_embeddings" not in finding.message  # a plain module has no such method

    def test_label_filler_as_input(self) -> None:
        given = setup()
        given["batch"]["ids"][0, 9] = -100
        (finding,) = look(given).verdict("GS001").findings
        assert finding.where.token_id == -100
        assert "labels that are left out" in finding.message

    def test_in_a_later_batch(self) -> None:
        later = batch(seed=2)
        later["ids"][2, 5] = V
        (finding,) = look(setup(batch=None, batches=[batch(), later])).verdict("GS001").findings
        assert (finding.where.token_id, finding.where.micro_batch, finding.where.example) == (V, 1, 2)

    def test_ids_that_the_model_maps_are_no_flaw(self) -> None:
        class Mapping(Model):
            def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
                return super().forward(ids.clamp(min=0), labels)

        later = batch(seed=2)
        later["ids"][2, 5] = -100
        report = look(setup(model=Mapping(), optimizer=None, batch=None, batches=[batch(), later]))
        assert report.exit_code == 0
        assert not report.verdict("GS001").findings

    def test_last_row_is_no_flaw(self) -> None:
        given = setup()
        given["batch"]["ids"][1, 3] = V - 1
        report = look(given)
        assert report.exit_code == 0
        assert not report.verdict("GS001").findings

    def test_more_positions_than_the_position_table(self) -> None:
        """The line says so; the vocabulary is not blamed."""
        report = look(setup(batch=batch(time=30)))
        assert "looks up id 29" in failure(report)
        assert "in positions, whose table has 24 rows" in failure(report)
        assert not report.verdict("GS001").findings


class TestBatches:
    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"batch": {}}, "`batch` has no entry"),
            ({"batch": None, "batches": []}, "`batches` is empty"),
            ({"batch": {"ids": torch.zeros(0, 8, dtype=torch.long)}}, r"holds no example \(ids int64 \[0, 8\]\)"),
            ({"batch": {"ids": torch.zeros(2, 8, dtype=torch.long, device="meta")}}, "ids is on the meta device"),
            ({"batch": "data.json"}, "`batch` is a str"),
            ({"batch": [1, 2]}, "`batch` is a list"),
            ({"batch": None, "batches": {"ids": torch.zeros(2, 8)}}, "one mapping"),
            ({"batch": torch.utils.data.TensorDataset(torch.zeros(4, 8))}, r"next\(iter\(loader\)\)"),
            ({"batch": None, "batches": torch.utils.data.TensorDataset(torch.zeros(4, 8))}, "dataset of examples"),
            ({"batch": None, "batches": 3}, "`batches` is a int"),
        ],
    )
    def test_no_batch(self, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            make_setup(setup(**changed))

    def test_lists_of_numbers(self) -> None:
        given = setup()
        given["batch"] = {k: v.tolist() for k, v in given["batch"].items()}
        assert "(ids list, labels list)" in failure(look(given))

    def test_without_a_batch_the_model_is_still_looked_at(self) -> None:
        report = look(setup(batch=None))
        assert COULD_NOT_RUN not in report.subjects[0].facts
        assert report.verdict("GS601").outcome is Outcome.CLEAR

    @pytest.mark.parametrize("kind", [tuple, list])
    def test_tuple(self, kind: Callable[[Any], Any]) -> None:
        """The user's function gets what it was given; ids, labels and their weights are found by measuring."""

        def by_place(model: Any, given: Any) -> torch.Tensor:
            assert type(given) is kind
            ids, labels = given
            return loss_of(model(ids), labels)

        report = look(setup(batch=kind(batch().values()), loss_fn=by_place))
        assert report.exit_code == 0
        for code in ("GS201", "GS202", "GS203", "GS207", "GS406"):
            assert report.verdict(code).outcome is Outcome.CLEAR, code

    def test_tuple_with_a_flaw(self) -> None:
        given = setup(batch=tuple(batch().values()))
        given["loss_fn"] = lambda m, b: functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())
        assert look(given).verdict("GS201").outcome is Outcome.FOUND

    def test_tuple_for_the_model_itself(self) -> None:
        assert look(setup(batch=tuple(batch().values()), loss_fn=None)).verdict("GS207").outcome is Outcome.CLEAR

    def test_named_tuple_keeps_its_names(self) -> None:
        class Pair(NamedTuple):
            ids: torch.Tensor
            labels: torch.Tensor

        made = make_setup(setup(batch=Pair(**batch()), loss_fn=None))
        assert list(made.batches[0]) == ["ids", "labels"]

    def test_a_stream_is_taken_as_far_as_it_is_needed(self) -> None:
        def endless() -> Iterator[dict[str, torch.Tensor]]:
            yield from (batch(seed=i) for i in itertools.count())

        assert len(make_setup(setup(batch=None, batches=endless())).batches) == 16
        assert len(make_setup(setup(batch=None, batches=endless(), accumulation_steps=10)).batches) == 20
        assert len(make_setup(setup(batch=None, batches=[batch(seed=i) for i in range(18)])).batches) == 18

    def test_a_loader_is_read_without_a_trace(self) -> None:
        data = torch.utils.data.TensorDataset(*batch().values())
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        given = setup(batch=None, batches=loader)
        before = torch.get_rng_state()
        made = make_setup(given)
        assert len(made.batches) == 2
        assert torch.equal(before, torch.get_rng_state())


class TestKeys:
    def test_mistyped(self) -> None:
        given = setup()
        given["optimiser"] = given.pop("optimizer")
        with pytest.raises(UsageError, match=r"unknown key 'optimiser' \(did you mean optimizer\?\)"):
            ghoststep.check(given)

    def test_mistyped_in_a_setup_function(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text("def setup():\n    return {'model': None, 'los_fn': None}\n")
        with pytest.raises(UsageError, match=r"'los_fn' \(did you mean loss_fn\?\)"):
            open_setup(f"{path}:setup")
        path.write_text("def setup():\n    return 3\n")
        with pytest.raises(SubjectError, match=r"returned a int \(3\)"):
            open_setup(f"{path}:setup")

    def test_mistyped_option_of_check(self) -> None:
        with pytest.raises(UsageError, match=r"'trainning' \(did you mean training\?\)"):
            ghoststep.check(**setup(), trainning="lora")

    def test_missing_model(self) -> None:
        given = setup()
        given.pop("model")
        with pytest.raises(UsageError, match="`model` is missing"):
            ghoststep.check(given)
        with pytest.raises(UsageError, match=r"`model` is a str \('gpt2'\)"):
            ghoststep.check(setup(model="gpt2"))

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"optimizer": torch.optim.AdamW}, "the class AdamW"),
            ({"loss_fn": torch.zeros(())}, "`loss_fn` is a Tensor"),
            ({"accumulation_steps": 0}, "accumulation_steps is 0"),
            ({"total_steps": "100"}, "total_steps is '100'"),
            ({"max_grad_norm": "1"}, "max_grad_norm is a str"),
            ({"optimizer": "adam"}, r"`optimizer` is a str \('adam'\)"),
            ({"scheduler": ["cosine"]}, "`scheduler` is a str"),
            ({"scaler": 1024}, r"`scaler` is a int \(1024\)"),
            ({"corpus": "one string"}, "`corpus` is one str"),
            ({"pad_token_id": 999}, "pad_token_id is 999, beyond every table"),
            ({"token_roles": "rolez"}, "'rolez', which is no entry of the first batch; it has ids, labels"),
            ({"token_roles": torch.zeros(2, 2, dtype=torch.long)}, r"token_roles has shape \[2, 2\]"),
            ({"token_roles": torch.zeros(4, 10)}, r"token_roles is float32 of shape \[4, 10\]"),
            ({"token_roles": torch.full((4, 10), 3)}, "token_roles holds 3"),
        ],
    )
    def test_values_of_a_wrong_kind(self, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            make_setup(setup(**changed))

    def test_values_that_only_look_wrong(self) -> None:
        """Wrappers and lists of optimizers, roles of joined texts, a padding id that batches hold and the model maps."""

        class Wrapper:
            def __init__(self, optimizer: Any) -> None:
                self.optimizer = optimizer

        one = setup()["optimizer"]
        padded = batch()
        padded["labels"][:, -1] = 999
        for changed in (
            {"optimizer": [one, one]},
            {"optimizer": Wrapper(one)},
            {"scaler": torch.amp.GradScaler("cpu")},
            {"corpus": iter(["a", "b"])},
            {"pad_token_id": V - 1},
            {"pad_token_id": 999, "batch": padded},
            {"token_roles": torch.ones(8, 10, dtype=torch.long)},
            {"token_roles": torch.ones(10, 4, dtype=torch.bool)},
            {"token_roles": [[0] * 5 + [1] * 5] * 4},
            {"token_roles": "labels", "batch": {"ids": batch()["ids"], "labels": torch.ones(4, 10, dtype=torch.long)}},
        ):
            taken = make_setup(setup(**changed))
            key = next(iter(changed))
            assert getattr(taken, key) is changed[key]

    def test_batch_and_batches(self) -> None:
        first, second = batch(seed=1), batch(seed=2)
        made = make_setup(setup(batch=first, batches=[second, batch(seed=1)]))
        assert [b["ids"].tolist() for b in made.batches] == [first["ids"].tolist(), second["ids"].tolist()]

    def test_roles_that_do_not_fit_what_is_looked_up(self) -> None:
        assert "token_roles has shape [4, 9]; expected [4, 10]" in failure(
            look(setup(token_roles=torch.ones(4, 9, dtype=torch.long)))
        )


class TestTokenizer:
    def test_file_and_folder(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        assert make_setup(setup(tokenizer=tmp_path / "tokenizer.json")).tokenizer.get_vocab_size() == V
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        pytest.importorskip("transformers")
        assert len(make_setup(setup(tokenizer=str(tmp_path))).tokenizer) == V
        assert look(setup(tokenizer=str(tmp_path))).verdict("GS001").outcome is Outcome.CLEAR

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be loaded from files on this machine"):
            make_setup(setup(tokenizer=str(tmp_path / "no-such-folder")))
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(UsageError, match=r"is not a tokenizer\.json"):
            make_setup(setup(tokenizer=tmp_path / "tokenizer.json"))


class TestNonfinite:
    def test_parameter(self) -> None:
        given = setup()
        with torch.no_grad():
            given["model"].mix.weight_hh_l0[2, 3:5] = torch.nan
            given["model"].mix.weight_hh_l0[3, 3] = torch.inf
        report = look(given)
        assert report.exit_code == 1
        (finding,) = report.verdict("GS416").findings
        assert finding.where.parameter == "mix.weight_hh_l0"
        assert "2 NaN and 1 infinite" in finding.message
        assert [s.code for s in finding.symptoms] == ["GS417"]
        assert [v.code for v, _ in report.findings] == ["GS416"]

    def test_mask_in_a_frozen_parameter_is_silent(self) -> None:
        given = setup()
        given["model"].mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
        assert look(given).verdict("GS416").outcome is Outcome.CLEAR

    def test_loss_alone(self) -> None:
        report = look(setup(loss_fn=lambda m, b: loss_fn(m, b) * torch.nan))
        assert report.verdict("GS417").findings
        assert report.verdict("GS416").outcome is Outcome.CLEAR

    def test_nothing_supervised_explains_it(self) -> None:
        given = setup()
        given["batch"]["labels"][:] = -100
        report = look(given)
        assert not report.verdict("GS417").findings
        assert "GS417" in [s.code for f in report.verdict("GS207").findings for s in f.symptoms]

    def test_healthy(self) -> None:
        report = look(setup(), ("GS416", "GS417"))
        assert [v.outcome for v in report.verdicts] == [Outcome.CLEAR, Outcome.CLEAR]


class TestMode:
    def outcome(self, **changed: Any) -> Outcome:
        torch.manual_seed(0)
        model = Model(changed.pop("dropout", 0.1)).train(changed.pop("train", False))
        given = setup(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        given.update(changed)
        return look({k: v for k, v in given.items() if v is not None}, ("GS616",)).verdicts[0].outcome

    def test_evaluation_mode_left_on(self) -> None:
        assert self.outcome() is Outcome.FOUND

    def test_look_alikes(self) -> None:
        assert self.outcome(train=True) is Outcome.CLEAR
        assert self.outcome(dropout=0.0) is Outcome.CLEAR
        assert self.outcome(optimizer=None) is Outcome.NOT_APPLICABLE
        assert self.outcome(loss_fn=lambda m, b: loss_fn(m.train(), b)) is Outcome.CLEAR
        assert self.outcome(train_step=lambda m, o, b: None) is Outcome.UNKNOWN


def test_model_without_an_embedding_is_looked_at_as_far_as_it_goes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    given = {
        "model": model,
        "batch": {"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 0])},
        "loss_fn": lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
    report = look(given)
    assert report.exit_code == 0
    assert COULD_NOT_RUN not in report.subjects[0].facts
    for code in ("GS405", "GS406", "GS416", "GS417", "GS601"):
        assert report.verdict(code).outcome is Outcome.CLEAR, code


def test_one_class_an_example_has_no_labels_at_positions() -> None:
    class Classifier(Model):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Linear(D, 3)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return self.classes(self.mix(self.tokens(ids))[0][:, -1])

    model = Classifier()
    given = {"ids": batch()["ids"], "y": torch.tensor([0, 1, 2, 0])}
    report = look(
        {"model": model, "batch": given, "loss_fn": lambda m, b: functional.cross_entropy(m(b["ids"]), b["y"])}, ("GS2",)
    )
    assert {v.outcome for v in report.verdicts} == {Outcome.NOT_APPLICABLE}
