"""Real encoders of sentences, pooled by the user's loss: GS110 and GS111 both ways, pads at either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ghoststep.finding import Outcome

from .training_setups import alarms, verdicts

Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NUM = 8


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48), False
    )


def modernbert() -> Any:
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    return ModernBertModel(
        ModernBertConfig(
            vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )
    )  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    return LlamaModel(
        LlamaConfig(
            vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=48, pad_token_id=0,
        )
    )  # fmt: skip


def columns(side: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {}
    for name in ("query", "positive"):
        ids, mask = torch.zeros(NUM, 10, dtype=torch.long), torch.zeros(NUM, 10, dtype=torch.long)
        for i in range(NUM):
            length = int(torch.randint(4, 11, (1,), generator=g)) if i else 10
            where = slice(0, length) if side == "right" else slice(10 - length, 10)
            ids[i, where] = torch.randint(3, 200, (length,), generator=g)
            mask[i, where] = 1
        made[f"{name}_ids"], made[f"{name}_mask"] = ids, mask
    return made


def mean_of_real(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def mean_of_all(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.mean(1)


def last_real(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    place = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return h[torch.arange(len(h)), place]


def last_column(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[:, -1]


def by_length(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Right only where pads stand at the right."""
    return h[torch.arange(len(h)), mask.sum(1) - 1]


def first_column(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[:, 0]


def before_the_last(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h[torch.arange(len(h)), mask.sum(1) - 2]


def setup(model: Any, side: str, pool: Pool) -> dict[str, Any]:
    def loss(model: Any, given: Any) -> torch.Tensor:
        a, p = (
            functional.normalize(
                pool(
                    model(input_ids=given[f"{k}_ids"], attention_mask=given[f"{k}_mask"]).last_hidden_state, given[f"{k}_mask"]
                ),
                dim=-1,
            )
            for k in ("query", "positive")
        )
        return functional.cross_entropy(a @ p.T / 0.05, torch.arange(len(a)))

    return {"model": model, "batch": columns(side), "loss_fn": loss, "pad_token_id": 0}


HEALTHY = [
    (bert, "right", mean_of_real), (bert, "right", first_column), (bert, "left", mean_of_real),
    (modernbert, "right", mean_of_real), (modernbert, "right", first_column),
    (llama, "right", last_real), (llama, "right", by_length), (llama, "right", mean_of_real),
    (llama, "left", last_column), (llama, "left", last_real),
]  # fmt: skip
BROKEN = [
    (bert, "right", mean_of_all, "GS110"), (modernbert, "right", mean_of_all, "GS110"), (bert, "left", mean_of_all, "GS110"),
    (bert, "left", first_column, "GS111"), (llama, "right", last_column, "GS111"), (llama, "right", mean_of_all, "GS110"),
    (llama, "left", by_length, "GS111"), (llama, "right", first_column, "GS111"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "side", "pool"), HEALTHY)
def test_silent(model: Callable[[], Any], side: str, pool: Pool) -> None:
    given = setup(model(), side, pool)
    assert alarms(given, "GS110", "GS111", "GS201", "GS204", "GS508", "GS510") == {}
    found = verdicts(given, "GS110", "GS111")
    assert found["GS110"].outcome is Outcome.CLEAR


def test_one_closing_token_behind_the_vector_is_silent() -> None:
    given = setup(llama(), "right", before_the_last)
    assert set(alarms(given, "GS110", "GS111")) == {"GS111"}
    for name in ("query", "positive"):
        ids, mask = given["batch"][f"{name}_ids"], given["batch"][f"{name}_mask"]
        ids[torch.arange(NUM), mask.sum(1) - 1] = 2
    assert alarms(given, "GS110", "GS111") == {}


@pytest.mark.parametrize(("model", "side", "pool", "code"), BROKEN)
def test_found(model: Callable[[], Any], side: str, pool: Pool, code: str) -> None:
    found = alarms(setup(model(), side, pool), "GS110", "GS111")
    assert found
    assert all(c.startswith(code) for c in found), found


class TwoTables(torch.nn.Module):
    """An encoder of its own for each side, in one forward."""

    def __init__(self, pool_query: Pool, shared: bool) -> None:
        super().__init__()
        self.query, self.positive = bert(), bert()
        if shared:
            self.positive.embeddings.word_embeddings.weight = self.query.embeddings.word_embeddings.weight
        self.pools = {"query": pool_query, "positive": mean_of_real}

    def forward(self, **batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            self.pools[side](getattr(self, side)(batch[f"{side}_ids"], batch[f"{side}_mask"])[0], batch[f"{side}_mask"])
            for side in ("query", "positive")
        )


def compared(model: Any, batch: Any) -> torch.Tensor:
    q, p = (functional.normalize(v, dim=-1) for v in model(**batch))
    return functional.cross_entropy(20 * q @ p.T, torch.arange(len(q)))


@pytest.mark.parametrize("shared", [True, False])
def test_towers_of_two_tables(shared: bool) -> None:
    """The texts of one tower say nothing about where the other's padding stands."""

    def given(pool: Pool) -> dict[str, Any]:
        return {
            "model": TwoTables(pool, shared).train(), "batch": columns("right"), "loss_fn": compared, "intent": "contrastive",
            "pad_token_id": 0,
        }  # fmt: skip

    assert alarms(given(mean_of_real), "GS110", "GS111") == {}
    assert verdicts(given(mean_of_real), "GS110")["GS110"].outcome is Outcome.CLEAR
    assert {c[:5] for c in alarms(given(mean_of_all), "GS110", "GS111")} == {"GS110"}
    other = given(mean_of_real)
    other["model"].pools["positive"] = mean_of_all
    assert {c[:5] for c in alarms(other, "GS110", "GS111")} == {"GS110"}
    unsaid = verdicts({k: v for k, v in given(mean_of_real).items() if k != "pad_token_id"}, "GS110")["GS110"]
    assert unsaid.outcome is not Outcome.FOUND
