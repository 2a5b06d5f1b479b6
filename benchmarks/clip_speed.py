"""`ghoststep.clip_grad_norm_` against `torch.nn.utils.clip_grad_norm_`: time and memory, on healthy and on spike steps.

    python benchmarks/clip_speed.py [--pairs 31] [--threads 1]

Two sets of gradients in fp32: 68M parameters in many small tensors, and the shapes of GPT-2 (124M). Interleaved pairs in one
process, the order alternating; medians of the pairwise ratios with a bootstrap interval, by the wall clock and by CPU time
(which says more on a busy machine). Peak memory is VmHWM of fresh
processes. The physical limit beside it: one read and one read-and-write of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs

import ghoststep
from ghoststep.remedies import clip_events

LINE_TIME, LINE_MEMORY = 1.05, 1.02
Clip = Callable[[nn.Module], object]
CLIPS: dict[str, Clip] = {
    "torch": lambda model: torchs(model.parameters(), 1.0),
    "ghoststep": lambda model: ghoststep.clip_grad_norm_(model, 1.0),
    "ghoststep, bare list": lambda model: ghoststep.clip_grad_norm_(list(model.parameters()), 1.0),
}


def many_tensors() -> nn.Module:
    """68M parameters in about 1000 tensors."""
    layers: list[nn.Module] = [nn.Embedding(32000, 256)]
    for _ in range(250):
        layers += [nn.Linear(256, 920), nn.LayerNorm(256)]
    layers.append(nn.Linear(256, 256))
    return nn.Sequential(*layers)


def gpt2() -> nn.Module:
    """The tensors of GPT-2 small."""
    d = 768
    layers: list[nn.Module] = [nn.Embedding(50257, d), nn.Embedding(1024, d)]
    for _ in range(12):
        layers += [
            nn.LayerNorm(d),
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
        ]
    layers.append(nn.LayerNorm(d))
    return nn.Sequential(*layers)


MODELS = {"68M, many tensors": many_tensors, "GPT-2, 124M": gpt2}


def built(name: str) -> nn.Module:
    """The model with random gradients of norm 5, one tensor a parameter; weights stay unset."""
    with torch.device("meta"):
        model = MODELS[name]()
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    size = sum(p.numel() for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad = torch.empty_like(p).normal_(0, 5 / size, generator=generator)
    return model


def spike(model: nn.Module) -> None:
    """Ordinary gradients again, and one row of the first table at 1e25."""
    with torch.no_grad():
        for p in model.parameters():
            p.grad.fill_(1e-4)  # type: ignore[union-attr]
        model[0].weight.grad[17].fill_(1e25)  # type: ignore[index]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median with a 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Wall time and this process's CPU time of one call."""
    start, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu


def compare(name: str, pairs: int, prepare: Callable[[nn.Module], None] | None, what: str) -> None:
    """Print the times of each clip and the ratio to torch's."""
    model = built(name)
    times: dict[str, list[tuple[float, float]]] = {clip: [] for clip in CLIPS}
    order = list(CLIPS.items())
    for number in range(pairs + 3):
        for clip, call in order if number % 2 else order[::-1]:
            if prepare is not None:
                prepare(model)
            elapsed = seconds(lambda call=call: call(model))  # type: ignore[misc]
            if number >= 3:  # warm
                times[clip].append(elapsed)
    count = sum(p.numel() for p in model.parameters())
    print(f"{name} ({count / 1e6:.0f}M in {len(list(model.parameters()))} tensors), {what} step")
    for clip, values in times.items():
        text = f"  {clip:<22}"
        for index, clock in enumerate(("wall", "CPU")):
            ratio, low, high = interval([a[index] / b[index] for a, b in zip(values, times["torch"], strict=True)])
            median = statistics.median(v[index] for v in values) * 1e3
            text += f" {clock} {median:7.2f} ms, ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
        print(text)
    if prepare is None:
        flat = torch.ones(count)
        read = statistics.median(seconds(flat.sum)[0] for _ in range(9))
        write = statistics.median(seconds(lambda: flat.mul_(1.0001))[0] for _ in range(9))
        print(f"  limit: one read {read * 1e3:.2f} ms + one read-and-write {write * 1e3:.2f} ms; line: {LINE_TIME} x torch")


def peak(name: str, clip: str, spiking: bool) -> int:
    """VmHWM in kB of a fresh process that clips five times."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, clip, str(int(spiking))], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def one(name: str, clip: str, spiking: bool) -> None:
    """What a fresh process does for `peak`."""
    torch.set_num_threads(1)
    model = built(name)
    for _ in range(5):
        if spiking:
            spike(model)
        CLIPS[clip](model)
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "CLIP", "SPIKE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    clip_events.logger.disabled = True
    if given.one:
        one(given.one[0], given.one[1], given.one[2] == "1")
        return
    torch.set_num_threads(given.threads)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    print(f"{given.pairs} pairs, {given.threads} threads, {load}, torch {torch.__version__}")
    for name in MODELS:
        compare(name, given.pairs, None, "healthy")
        compare(name, max(given.pairs // 3, 3), spike, "spike")
        for spiking in (False, True):
            sizes = {clip: peak(name, clip, spiking) for clip in ("torch", "ghoststep")}
            ratio = sizes["ghoststep"] / sizes["torch"]
            line = f"   line {LINE_MEMORY}" if not spiking else ""
            print(
                f"  peak memory, {'spike' if spiking else 'healthy'}: {sizes['torch'] / 1024:.0f} MB, ours {ratio:.4f} x{line}"
            )


if __name__ == "__main__":
    main()
