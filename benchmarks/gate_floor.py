"""`ghoststep.GateFloor`: what it does to a near-zero row, what it costs, and what it does to a loss.

    python benchmarks/gate_floor.py [--out benchmarks/gate_floor.md] [--steps 200] [--seeds 5] [--pairs 21] [--depth 24]

Prints and writes four things: the gradient of one row of norm 1e-30 for several delta, with zero and non-zero convolution biases; the
message where it refuses; the time of a training step with and without, in interleaved pairs; and the loss of short runs from
scratch, with ordinary rows and with six rare rows at 1e-30. One thread, about four CPU minutes.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import ghoststep

DELTAS = (1e-4, 1e-3, 1e-2, 1e-1)
BIASES = (0.0, 0.1)
DELTA, RARE, WIDTH, BATCH, TOKENS = 1e-2, tuple(range(100, 106)), 24, 8, 128
LOST_COEFFICIENT = 1e-3


def build(kind: str, depth: int, hidden: int, bias: float, seed: int = 0) -> nn.Module:
    """An untied model as transformers initialises it; bias: standard deviation of the convolutions' biases."""
    torch.manual_seed(seed)
    base: dict[str, Any] = {
        "vocab_size": 160, "hidden_size": hidden, "num_hidden_layers": depth, "tie_word_embeddings": False, "use_cache": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config: Any
    if kind == "Mamba":
        config = transformers.MambaConfig(**base, state_size=8, time_step_rank=4)
    else:
        config = transformers.Mamba2Config(**base, state_size=16, num_heads=4, head_dim=hidden // 2, n_groups=1, chunk_size=16)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("conv1d.bias"):
                p.copy_(bias * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + 1)))
    return model.train()


def delta_table(depth: int) -> Iterator[str]:
    """Rows of the table: gradient at the middle and at the first position."""
    yield "| model | convolution bias | delta | middle | first position | installed? |"
    yield "|---|---|---|---|---|---|"
    for kind in ("Mamba2", "Mamba"):
        for bias in BIASES:
            named = f"| {kind}, {depth} layers, d = 64 | {'0' if bias == 0 else f'{bias:g} x N(0, 1)'} |"
            model = build(kind, depth, 64, bias)
            for number, delta in enumerate(DELTAS):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    with ghoststep.GateFloor(model, delta, on_risk="warn") as floor:
                        by_place = {r.place: r for r in floor.readings}
                middle, first = by_place["middle"], by_place["first position"]
                if number == 0:
                    yield f"{named} 0 | {middle.before:.1e} | {first.before:.1e} | |"
                refused = any("rises from" in str(w.message) for w in told)
                yield f"{named} {delta:g} | {middle.after:.1e} | {first.after:.1e} | {'**refused**' if refused else 'yes'} |"


def refusal(depth: int) -> str:
    """What is said where the floor would create the failure."""
    try:
        ghoststep.GateFloor(build("Mamba2", depth, 64, 0.0), DELTA)
    except ghoststep.UsageError as error:
        return str(error)
    return "NOT REFUSED"


def interval(values: Sequence[float]) -> str:
    """Median with a 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):.3f} ({medians[50]:.3f} to {medians[1949]:.3f})"


def step_times(kind: str, depth: int, hidden: int, length: int, pairs: int) -> str:
    """A row of the table of step times: forward, backward and AdamW, with the floor over without."""
    plain = build(kind, depth, hidden, 0.1)
    floored = copy.deepcopy(plain)
    ghoststep.GateFloor(floored, DELTA)
    ids = torch.randint(3, TOKENS, (4, length), generator=torch.Generator().manual_seed(0))
    optimizers = {id(m): torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (plain, floored)}

    def timed(model: nn.Module) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        optimizers[id(model)].zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizers[id(model)].step()
        return time.perf_counter() - wall, time.process_time() - cpu

    taken: dict[int, list[tuple[float, float]]] = {id(plain): [], id(floored): []}
    for number in range(pairs + 2):
        for model in (plain, floored) if number % 2 else (floored, plain):
            elapsed = timed(model)
            if number >= 2:
                taken[id(model)].append(elapsed)
    both = list(zip(taken[id(floored)], taken[id(plain)], strict=True))
    wall, cpu = (interval([a[i] / b[i] for a, b in both]) for i in (0, 1))
    median = statistics.median(b[1] for _, b in both) * 1e3
    return f"| {kind}, {depth} layers, d = {hidden}, 4 x {length} tokens | {median:.0f} ms | {cpu} | {wall} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A kind of run."""

    name: str
    bias: float
    floor: bool
    near_zero: bool


ARMS = (
    Arm(name="zero biases (as transformers initialises), no floor", bias=0.0, floor=False, near_zero=False),
    Arm(name="biases 0.1 x N(0, 1), no floor", bias=0.1, floor=False, near_zero=False),
    Arm(name="biases 0.1 x N(0, 1), floor 1e-2", bias=0.1, floor=True, near_zero=False),
    Arm(name="the same, six rare rows at 1e-30, no floor", bias=0.1, floor=False, near_zero=True),
    Arm(name="the same, six rare rows at 1e-30, floor 1e-2", bias=0.1, floor=True, near_zero=True),
)


def sampler() -> Callable[[int, torch.Generator], torch.Tensor]:
    """Sequences of a random first-order chain in which six tokens are rare."""
    chance = torch.softmax(3 * torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(5)), 1)
    chance[:, :3] = 0
    chance[:, list(RARE)] *= 0.05
    chance /= chance.sum(1, keepdim=True)

    def sample(number: int, generator: torch.Generator) -> torch.Tensor:
        tokens = [torch.randint(3, 100, (number,), generator=generator)]
        for _ in range(WIDTH - 1):
            tokens.append(torch.multinomial(chance[tokens[-1]], 1, generator=generator)[:, 0])
        return torch.stack(tokens, 1)

    return sample


def run(arm: Arm, seed: int, steps: int, sample: Callable[[int, torch.Generator], torch.Tensor]) -> tuple[float, int]:
    """Validation loss after training from scratch, and the number of lost steps (clip coefficient below 1e-3, or norm inf)."""
    model = build("Mamba2", 6, 64, arm.bias, seed)
    if arm.floor:
        ghoststep.GateFloor(model, DELTA)
    if arm.near_zero:
        with torch.no_grad():
            model.get_input_embeddings().weight[list(RARE)] = 1e-30 / 8  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    generator, lost = torch.Generator().manual_seed(1000 + seed), 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        ids = sample(BATCH, generator)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        lost += not math.isfinite(norm) or norm > 1.0 / LOST_COEFFICIENT
        optimizer.step()
    model.eval()
    with torch.no_grad():
        ids = sample(96, torch.Generator().manual_seed(99))
        return float(model(input_ids=ids, labels=ids).loss), lost


def losses(seeds: int, steps: int) -> Iterator[str]:
    """The table of runs."""
    sample = sampler()
    what = f"Mamba2, 6 layers, d = 64, {steps} steps of {BATCH} x {WIDTH} tokens"
    yield f"| {what} | validation loss by seed | mean | lost steps by seed |"
    yield "|---|---|---|---|"
    for arm in ARMS:
        found = [run(arm, seed, steps, sample) for seed in range(seeds)]
        mean = statistics.mean(loss for loss, _ in found)
        spread = statistics.stdev(loss for loss, _ in found) if seeds > 1 else 0.0
        by_seed = ", ".join(f"{loss:.4f}" for loss, _ in found)
        yield f"| {arm.name} | {by_seed} | {mean:.4f}, s.d. {spread:.4f} | {', '.join(str(n) for _, n in found)} |"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".md")))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--depth", type=int, default=24)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines: list[str] = []

    def tell(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)

    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    tell("# GateFloor, measured", "", f"`benchmarks/gate_floor.py`: {load}, one thread, torch {torch.__version__}, "
         f"transformers {transformers.__version__}, float32.", "")  # fmt: skip
    tell("## Gradient of one row of norm 1e-30", "")
    for line in delta_table(given.depth):
        tell(line)
    tell(
        "",
        "## The refusal",
        "",
        "```text",
        refusal(given.depth),
        "```",
        "",
        "## Time of a training step, with over without",
        "",
    )
    tell("| model | without, CPU time | ratio, CPU time | ratio, wall clock |", "|---|---|---|---|")
    for kind, depth, hidden, length in (("Mamba2", 6, 64, 24), ("Mamba2", 4, 256, 64), ("Mamba", 4, 128, 64)):
        tell(step_times(kind, depth, hidden, length, given.pairs))
    tell(
        "",
        f"Medians of {given.pairs} interleaved pairs, 95 % bootstrap intervals.",
        "",
        "## Loss of short runs from scratch",
        "",
    )
    for line in losses(given.seeds, given.steps):
        tell(line)
    tell("", f"Lost: the clip at 1 multiplies by less than {LOST_COEFFICIENT:g}, or the norm is not finite. CPU time of everything: "
         f"{time.process_time():.0f} s.")  # fmt: skip
    Path(given.out).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
