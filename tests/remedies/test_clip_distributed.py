"""Several gloo processes, the guilty token on the last rank only, a decoy on rank 0: everything as in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tests.local_hub import need_loopback
from tests.remedies.clip_worker import GUILTY, run

Run = list[dict[str, Any]]


def started(world: int, folder: str) -> Run:
    need_loopback()
    spawn(run, args=(world, folder), nprocs=world)  # type: ignore[no-untyped-call]
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return started(2, str(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return started(4, str(tmp_path_factory.mktemp("four")))


def assert_same(ranks: Run, name: str, wanted: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """On every rank the same norm and gradients as wanted, to fp32 rounding."""
    for found in ranks:
        got, want = found[name], wanted(found)
        assert got["norm"] == pytest.approx(want["norm"], rel=2e-5, nan_ok=True)
        for key, g in want["grads"].items():
            if g is None:
                assert got["grads"][key] is None
            else:
                torch.testing.assert_close(got["grads"][key], g, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp 1x2"])
@pytest.mark.parametrize("route", ["model", "list", "device"])
def test_training_step_with_the_guilty_token_on_one_rank(two: Run, kind: str, route: str) -> None:
    assert_same(two, f"{kind} {route}", lambda f: f["alone"])
    assert_same(two, f"{kind} {route} healthy", lambda f: f["alone healthy"])
    found = two[0][f"{kind} {route}"]
    assert 1e20 < found["norm"] < math.inf
    assert found["grads"]["table.weight"][GUILTY].norm() > 0.05
    assert found["grads"]["mix.weight"].norm() > 1e-3


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp 1x2"])
@pytest.mark.parametrize("route", ["model", "list", "device"])
def test_a_healthy_step_has_the_bits_of_torchs_own_distributed_clip(two: Run, kind: str, route: str) -> None:
    for found in two:
        got, want = found[f"{kind} {route} healthy"], found[f"{kind} torch healthy"]
        assert got["norm"] == want["norm"]
        assert all(torch.equal(got["grads"][k], g) for k, g in want["grads"].items())


@pytest.mark.parametrize("route", ["host", "device"])
@pytest.mark.parametrize("name", ["rows spikes", "columns spikes", "rows nan row", "columns nan row", "one row", "replicated"])
def test_distributed_gradients(two: Run, name: str, route: str) -> None:
    """Tables split by rows (a rank without a single row too) or by columns, or whole on every rank."""
    assert_same(two, f"placed {name} {route}", lambda f: f[f"placed {name} {route}"]["alone"])


def test_nan_in_the_trunk_of_one_rank_stops_the_step_on_all(two: Run) -> None:
    for found in two:
        for where in ("rows", "columns"):
            got = found[f"placed {where} nan trunk host"]
            assert math.isnan(got["norm"])
            assert set(got["grads"].values()) == {None}
            zeroed = found[f"placed {where} nan trunk device"]["grads"].values()
            assert all((g == 0).all() for g in zeroed)


@pytest.mark.parametrize("route", ["model", "device"])
@pytest.mark.parametrize("kind", ["hsdp 2x2", "fsdp2 4"])
def test_four_processes(four: Run, kind: str, route: str) -> None:
    assert_same(four, f"{kind} {route}", lambda f: f["alone"])
    assert 1e20 < four[3][f"{kind} {route}"]["norm"] < math.inf


@pytest.mark.parametrize("route", ["model", "device"])
@pytest.mark.parametrize("name", ["fsdp x columns", "rows x replicas", "twice", "three rows"])
def test_distributed_gradients_on_a_square_mesh(four: Run, name: str, route: str) -> None:
    assert_same(four, f"placed {name} {route}", lambda f: f[f"placed {name} {route}"]["alone"])


@pytest.mark.parametrize("route", ["model", "device"])
def test_a_table_split_twice_along_its_rows(four: Run, route: str) -> None:
    """FSDP over tensor parallelism."""
    assert_same(four, f"fsdp over tp {route}", lambda f: f["alone of two"])
