"""Setups for one small model that is fed in many ways, for `check RUN --step N --setup` and the tests of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Scored(nn.Module):
    """Returns its own loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.linear(features)
        return {"out": out} if labels is None else {"out": out, "loss": nn.functional.mse_loss(out, labels)}


class ByPlace(nn.Module):
    """Gives its arguments no names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scored()

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args)


def data(i: int, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Features and targets of step i; bad: with one NaN."""
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
    if bad:
        x[1, 2] = float("nan")
    return x, y


X, Y = data(99)


def plain_renamed() -> dict[str, Any]:
    return {"model": Scored(), "batch": {"x": X}, "loss_fn": lambda m, b: m(b["x"])["out"].pow(2).mean()}


def plain_tuple() -> dict[str, Any]:
    return {"model": Scored(), "batch": (X,), "loss_fn": lambda m, b: m(b[0])["out"].pow(2).mean()}


def own_loss() -> dict[str, Any]:
    return {"model": Scored(), "batch": {"features": X, "labels": Y}}


def own_loss_tuple() -> dict[str, Any]:
    return {"model": Scored(), "batch": (X, Y)}


def renamed() -> dict[str, Any]:
    return {"model": Scored(), "batch": {"x": X, "y": Y}, "loss_fn": lambda m, b: m(b["x"], labels=b["y"])["loss"]}


def nested() -> dict[str, Any]:
    return {"model": Scored(), "batch": {"in": {"x": X}, "y": Y}, "loss_fn": lambda m, b: m(b["in"]["x"], b["y"])["loss"]}


def whole() -> dict[str, Any]:
    return {"model": Scored(), "batch": (X, Y), "loss_fn": lambda m, b: nn.functional.mse_loss(m(b[0])["out"], b[1])}


def by_train_step() -> dict[str, Any]:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch["x"], batch["y"])["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "batch": {"x": X, "y": Y}, "train_step": train_step, "optimizer": optimizer}


def by_place() -> dict[str, Any]:
    return {"model": ByPlace(), "batch": (X, Y)}
