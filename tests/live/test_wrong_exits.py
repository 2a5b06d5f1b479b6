"""A setup whose code exits, or whose loss goes round the model's forward: no success, and no failure of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghoststep.errors import SubjectError
from ghoststep.finding import COULD_NOT_RUN, Outcome
from ghoststep.subjects.setup import make_setup, open_setup

from .test_wrong_input import Model, batch, failure, look, setup


class TestExit:
    """`sys.exit()` of the user's code must not end ghoststep as if everything were in order."""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                "import sys\ndef setup(): return {}\nsys.exit()\n",
                r"mine\.py called sys\.exit\(\) while being imported.*__main__",
            ),
            ("def setup(): raise SystemExit(0)\n", r"mine\.py called sys\.exit\(0\) in setup\(\)"),
            ("import sys\ndef setup(): sys.exit('bye')\n", r"sys\.exit\('bye'\) in setup\(\)"),
        ],
    )
    def test_while_opened(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SubjectError, match=said):
            open_setup(f"{path}:setup")

    def test_while_batches_are_read(self) -> None:
        def exiting() -> Iterator[dict[str, torch.Tensor]]:
            yield batch()
            raise SystemExit(0)

        with pytest.raises(SubjectError, match=r"sys\.exit\(0\) while its `batches` were read"):
            make_setup(setup(batch=None, batches=exiting()))

    @pytest.mark.parametrize("key", ["loss_fn", "train_step"])
    def test_while_checked(self, key: str) -> None:
        def exiting(*given: Any) -> Any:
            raise SystemExit(0)

        assert "called sys.exit(0)" in failure(look(setup(**{key: exiting})))


def test_a_loss_that_calls_parts_of_the_model_is_no_failure() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.document = Model(), Model()

    def pull(model: Any, given: Any) -> torch.Tensor:
        return functional.mse_loss(model.query(given["ids"]), model.document(given["labels"]))

    model = Towers()
    report = look(setup(model=model, loss_fn=pull, optimizer=torch.optim.AdamW(model.parameters())))
    assert COULD_NOT_RUN not in report.subjects[0].facts
    assert "calls parts of it (document, query)" in (report.verdict("GS201").reason or "")
    assert report.verdict("GS406").outcome is Outcome.CLEAR
