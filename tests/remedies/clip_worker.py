"""What each process of a distributed test runs. Every scenario returns the norm and all gradients, gathered."""

from __future__ import annotations

import copy
import datetime
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ghoststep import clip_grad_norm_
from tests.remedies.clip_models import on_device

GUILTY, TINY = 13, 1e-27
Found = dict[str, Any]
Clip = Callable[[nn.Module, float], torch.Tensor]


class Net(nn.Module):
    """Directions of table rows, averaged: the gradient of a row is the inverse of its size, as behind a norm without eps.
    19 rows never split evenly."""

    def __init__(self, rows: int = 19) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x / (x.abs().amax(dim=-1, keepdim=True) + 1e-38)
        out: torch.Tensor = self.head(torch.tanh(self.mix(x)))
        return out


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Position 0 carries no loss: a token there is harmless."""
    out: torch.Tensor = model(ids)[:, 1:].square().mean()
    return out


def batch(rank: int | None, world: int, guilty: bool) -> torch.Tensor:
    """[2, 6] token ids of one rank, or all of them; the guilty token on the last rank, a decoy on rank 0."""
    ids = torch.randint(0, 12, (2 * world, 6), generator=torch.Generator().manual_seed(3))
    if guilty:
        ids[0, 0] = GUILTY
        ids[-1, 3] = GUILTY
    return ids if rank is None else ids[2 * rank : 2 * rank + 2]


def built(guilty: bool) -> Net:
    model = Net()
    if guilty:
        with torch.no_grad():
            model.table.weight[GUILTY] *= TINY
    return model


def result(model: nn.Module, norm: torch.Tensor) -> Found:
    """Gathered on every rank."""
    grads = {}
    for name, p in model.named_parameters():
        g = p.grad
        grads[name.removeprefix("module.")] = None if g is None else (g.full_tensor() if isinstance(g, DTensor) else g).clone()
    return {"norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm), "grads": grads}


def trained(wrap: Callable[[nn.Module], nn.Module], clip: Clip, bound: float = 1.0, guilty: bool = True) -> Found:
    model = wrap(built(guilty))
    loss_of(model, batch(dist.get_rank(), dist.get_world_size(), guilty)).backward()  # type: ignore[no-untyped-call]
    return result(model, clip(model, bound))


def alone(world: int, clip: Clip = clip_grad_norm_, bound: float = 1.0, guilty: bool = True) -> Found:
    """One process on the whole batch."""
    model = built(guilty)
    loss_of(model, batch(None, world, guilty)).backward()  # type: ignore[no-untyped-call]
    return result(model, clip(model, bound))


def sharded(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for part in (model.table, model.mix, model):
            fully_shard(part, mesh=mesh)  # type: ignore[arg-type]
        return model

    return wrap


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def placed(
    mesh: DeviceMesh, table: list[Any], rest: list[Any], change: Callable[[Net], None], clip: Clip, rows: int = 19
) -> Found:
    """Made-up gradients, distributed; beside them the same in one process."""
    model = Net(rows)
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 0.05
    with torch.no_grad():
        change(model)
    twin = copy.deepcopy(model)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    for module, name in ((m, n) for m in (model.table, model.mix, model.head) for n, _ in list(m.named_parameters())):
        p = getattr(module, name)
        where = table if module is model.table else rest
        new = nn.Parameter(distribute_tensor(p.detach(), mesh, where))
        new.grad = distribute_tensor(p.grad, mesh, where)
        setattr(module, name, new)
    found = result(model, clip(model, 1.0))
    found["alone"] = result(twin, clip_grad_norm_(twin, 1.0))
    return found


def spikes(model: Net) -> None:
    grad = model.table.weight.grad
    assert grad is not None
    grad[-1] *= 1e26
    grad[0] *= 1e12


def nan_row(model: Net) -> None:
    grad = model.table.weight.grad
    assert grad is not None
    grad[-1, 2] = math.nan


def nan_trunk(model: Net) -> None:
    grad = model.mix.weight.grad
    assert grad is not None
    grad[-1, 2] = math.nan  # on the last rank's shard only


def torchs(model: nn.Module, bound: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), bound)


def list_clip(model: nn.Module, bound: float) -> torch.Tensor:
    return clip_grad_norm_(list(model.parameters()), bound)


def tensor_parallel(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    """FSDP over tensor parallelism: the table's rows are split twice."""

    def wrap(model: nn.Module) -> nn.Module:
        parallelize_module(model.table, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))  # type: ignore[arg-type]
        for part in (model.table, model.mix, model.head):
            fully_shard(part, mesh=mesh["dp"])  # type: ignore[arg-type]
        return model

    return wrap


def over_tensor_parallel(mesh: DeviceMesh, clip: Clip) -> Found:
    model = tensor_parallel(mesh)(built(guilty=True))
    ids = batch(mesh["dp"].get_local_rank(), 2, guilty=True)
    loss_of(model, ids).backward()  # type: ignore[no-untyped-call]
    grad: Any = model.get_parameter("table.weight").grad
    assert type(grad.placements[0]) is not Shard
    return result(model, clip(model, 1.0))


def scenarios_of_two() -> dict[str, Found]:
    flat = init_device_mesh("cpu", (2,))
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    found = {"alone": alone(2), "alone healthy": alone(2, bound=0.01, guilty=False)}
    for kind, wrap in {"ddp": ddp, "fsdp2": sharded(flat), "hsdp 1x2": sharded(hybrid)}.items():
        for route, clip in {"model": clip_grad_norm_, "list": list_clip, "device": on_device}.items():
            found[f"{kind} {route}"] = trained(wrap, clip)  # type: ignore[arg-type]
            found[f"{kind} {route} healthy"] = trained(wrap, clip, 0.01, guilty=False)  # type: ignore[arg-type]
        found[f"{kind} torch healthy"] = trained(wrap, torchs, 0.01, guilty=False)
    for route, clip in {"host": clip_grad_norm_, "device": on_device}.items():
        for name, change in {"spikes": spikes, "nan row": nan_row, "nan trunk": nan_trunk}.items():
            rows, columns = [Shard(0)], [Shard(1)]
            found[f"placed rows {name} {route}"] = placed(flat, rows, rows, change, clip)  # type: ignore[arg-type]
            found[f"placed columns {name} {route}"] = placed(flat, columns, rows, change, clip)  # type: ignore[arg-type]
        found[f"placed one row {route}"] = placed(flat, [Shard(0)], [Shard(0)], spikes, clip, rows=1)  # type: ignore[arg-type]
        whole = [Replicate()]
        found[f"placed replicated {route}"] = placed(flat, whole, whole, spikes, clip)  # type: ignore[arg-type]
    return found


def scenarios_of_four() -> dict[str, Found]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {"alone": alone(4), "alone of two": alone(2)}
    for route, clip in {"model": clip_grad_norm_, "device": on_device}.items():
        found[f"hsdp 2x2 {route}"] = trained(sharded(square), clip)  # type: ignore[arg-type]
        found[f"fsdp2 4 {route}"] = trained(sharded(flat), clip)  # type: ignore[arg-type]
        found[f"fsdp over tp {route}"] = over_tensor_parallel(both, clip)  # type: ignore[arg-type]
        for name, table in {
            "fsdp x columns": [Shard(0), Shard(1)], "rows x replicas": [Replicate(), Shard(0)], "twice": [Shard(0), Shard(0)],
        }.items():  # fmt: skip
            found[f"placed {name} {route}"] = placed(square, table, [Shard(0), Replicate()], spikes, clip)  # type: ignore[arg-type]
        found[f"placed three rows {route}"] = placed(flat, [Shard(0)], [Shard(0)], spikes, clip, rows=3)  # type: ignore[arg-type]
    return found


def run(rank: int, world: int, folder: str) -> None:
    """One process; each leaves what it found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    found = scenarios_of_two() if world == 2 else scenarios_of_four()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
