"""What watching costs a training step, beside what other monitors cost.

    python benchmarks/watch_overhead.py                      # 100 pairs an arm on the 6-layer model; about 20 minutes
    python benchmarks/watch_overhead.py --model modules      # 3,000 small modules
    python benchmarks/watch_overhead.py --others             # with wandb.watch(log="all") offline, guardtower, traintools
    python benchmarks/watch_overhead.py --pairs 20 --arms default

Every arm is a copy of one model (6 layers, d = 256, T = 128, B = 8, vocabulary 1000; AdamW; torch's clip at 1.0) that trains on the
same batches in the same process. Arms take turns, in a new random order each round, a block of a few steps at a time; the bare arm is
there twice, and what the second one differs by is the control. The figure of an arm is the median over rounds of
its time over the bare arm's, less the control's median, with a bootstrap interval. Steps are flushed, judged and
written to a record once a block: eight times as often as by default, so that no block is spared that cost.
`run` finds the model as `ghoststep run` does (and flushes every 32 steps, as it does). The physical limit beside it: reading
all gradients once.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

D, T, B, V, LAYERS, HEADS = 256, 128, 8, 1000, 6, 8
LINES = {"default": 0.02, "full": 0.10, "clip": 0.02, "run": 0.03}
MODULES_LINE = 0.10


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(B, T, D))
        result: torch.Tensor = x_BTD + self.down(nn.functional.gelu(self.up(self.norm2(x_BTD))))
        return result


class Decoder(nn.Module):
    """The model of most arms."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(ids_BT) + self.places(torch.arange(T)[None])
        logits: torch.Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


class Small(nn.Module):
    """Three modules: a norm, a linear and what holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return moved


class Modules(nn.Module):
    """3,000 small modules after one table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 16), nn.Linear(16, V)
        self.blocks = nn.Sequential(*(Small() for _ in range(1000)))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.tokens(ids_BT)))
        return logits


class Arm:
    """One copy of the model, its optimizer and what watches it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = kind()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.clip: Callable[..., Any] = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.after_step: Callable[[], Any] = lambda: None

    def block(self, batches: list[torch.Tensor]) -> float:
        """Seconds of CPU for one step each; one thread, so that other users of the machine hardly count."""
        with self.around():
            start = time.process_time()
            for ids_BT in batches:
                logits = self.model(ids_BT)
                loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                self.clip(self.model)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.after_step()
            return time.process_time() - start


def watched(kind: type[nn.Module], folder: Path, steps: int, **how: Any) -> Arm:
    """An arm under `ghoststep.watch`. Its process-wide wrappers are there only while its own blocks run."""
    import ghoststep
    from ghoststep.watching import patches

    arm = Arm(kind)
    own_clip = how.pop("own_clip", False)
    watch = ghoststep.watch(arm.model, arm.optimizer, run_dir=folder, flush_steps=steps, **how).start()
    patches.leave(watch)
    if own_clip:
        arm.clip = lambda model: ghoststep.clip_grad_norm_(model, 1.0)

    @contextlib.contextmanager
    def listening() -> Iterator[None]:
        patches.listen(watch)
        try:
            yield
        finally:
            patches.leave(watch)
            if watch.faults:
                raise SystemExit(f"a hook failed: {watch.faults.lines()}")

    arm.around = listening
    return arm


def run_arm(kind: type[nn.Module], folder: Path) -> Arm:
    """An arm whose model was found as `ghoststep run` finds it; its wrappers are there only while its own blocks run."""
    from ghoststep.launch.discover import Discovery
    from ghoststep.launch.plan import Plan
    from ghoststep.launch.session import Session
    from ghoststep.watching import patches

    session = Session(Plan(run_dir=str(folder)), False)
    discovery = Discovery(session)
    discovery.install()
    arm = Arm(kind)
    with torch.enable_grad():  # the first call of its model opens the watch
        arm.model(torch.zeros((B, T) if kind is Decoder else (2, 16), dtype=torch.long))
    discovery.remove()
    (seat,) = session.seats
    patches.leave(seat.watch)

    @contextlib.contextmanager
    def discovering() -> Iterator[None]:
        discovery.install()
        patches.listen(seat.watch)
        try:
            yield
        finally:
            patches.leave(seat.watch)
            discovery.remove()
            if session.fault or seat.watch.faults:
                raise SystemExit(f"a hook failed: {session.fault} {seat.watch.faults.lines()}")

    arm.around = discovering
    return arm


def wandb_arm(kind: type[nn.Module]) -> Arm:
    """wandb.watch(log="all"), offline, every step (its default is every 1000th)."""
    import wandb  # type: ignore[import-not-found, unused-ignore]

    arm = Arm(kind)
    run = wandb.init(mode="offline", project="overhead", dir=tempfile.mkdtemp(), settings=wandb.Settings(silent=True))
    wandb.watch(arm.model, log="all", log_freq=1)
    arm.after_step = lambda: run.log({"x": 0})
    return arm


def guardtower_arm(kind: type[nn.Module]) -> Arm:
    """guardtower.monitor, which looks for NaN and inf in every module's output."""
    import guardtower  # type: ignore[import-not-found, unused-ignore]

    arm = Arm(kind)
    arm.around = lambda: guardtower.monitor(arm.model)
    return arm


def traintools_arm(kind: type[nn.Module]) -> Arm:
    """traintools.GradientHealthMonitor, asked after each backward."""
    import traintools  # type: ignore[import-not-found, unused-ignore]

    arm = Arm(kind)
    health = traintools.GradientHealthMonitor(max_grad_norm=1.0)
    clip = arm.clip

    def look_and_clip(model: nn.Module) -> None:
        health.inspect(model, step=0, lr=1e-3)
        clip(model)

    arm.clip = look_and_clip
    return arm


OTHERS = {"wandb.watch(all)": wandb_arm, "guardtower": guardtower_arm, "traintools": traintools_arm}


def interval(values: list[float], control: list[float]) -> tuple[float, float, float]:
    """Excess of the median ratio over the control's, and a 95 % bootstrap interval over rounds."""
    chance = random.Random(0)
    middle = statistics.median(values) - statistics.median(control)
    drawn = []
    for _ in range(2000):
        rounds = [chance.randrange(len(values)) for _ in values]
        drawn.append(statistics.median(values[i] for i in rounds) - statistics.median(control[i] for i in rounds))
    drawn.sort()
    return middle, drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))]


def main() -> None:
    """Builds the arms, lets them take turns, prints one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("decoder", "modules"), default="decoder")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--arms", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--others", action="store_true", help="also other monitors, as far as they are installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind: type[nn.Module] = Decoder if options.model == "decoder" else Modules
    with tempfile.TemporaryDirectory() as folder:
        arms: dict[str, Arm] = {"bare": Arm(kind), "control": Arm(kind)}
        for name in options.arms:
            place = Path(folder, name)
            if name == "run":
                arms[name] = run_arm(kind, place)
            else:
                how: dict[str, Any] = {"detail": "full"} if name == "full" else {"own_clip": True} if name == "clip" else {}
                arms[name] = watched(kind, place, options.steps, **how)
        if options.others:
            arms |= others(kind)
        measure(arms, kind, options.pairs, options.steps)
    print_limit(arms["bare"].model)


def others(kind: type[nn.Module]) -> dict[str, Arm]:
    """Arms of other monitors; one that is not installed is told and left out."""
    found: dict[str, Arm] = {}
    for name, build in OTHERS.items():
        try:
            found[name] = build(kind)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def measure(arms: dict[str, Arm], kind: type[nn.Module], pairs: int, steps: int) -> None:
    """All arms in turns; every arm sees the same batches, and ends with the same weights."""
    shape = (B, T) if kind is Decoder else (2, 16)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    chance, generator = random.Random(0), torch.Generator().manual_seed(1)
    for turn in range(pairs + 2):
        batches = [torch.randint(0, V, shape, generator=generator) for _ in range(steps)]
        order = list(arms)
        chance.shuffle(order)
        for name in order:
            used = arms[name].block(batches)
            if turn >= 2:  # the first rounds warm up
                seconds[name].append(used)
    ratios = {n: [a / b for a, b in zip(s, seconds["bare"], strict=True)] for n, s in seconds.items()}
    step_ms = 1000 * statistics.median(seconds["bare"]) / steps
    print(
        f"bare step {step_ms:.1f} ms CPU; control {statistics.median(ratios['control']):.4f}; {pairs} rounds of {steps} steps"
    )
    weights = [p.detach() for p in arms["bare"].model.parameters()]
    for name, arm in arms.items():
        same = all(torch.equal(p, q) for p, q in zip(arm.model.parameters(), weights, strict=True))
        if name == "bare":
            continue
        middle, low, high = interval(ratios[name], ratios["control"])
        line = MODULES_LINE if kind is Modules else LINES.get(name)
        target = f" (line {line:.0%})" if line is not None and name != "control" else ""
        print(
            f"{name}: excess {middle:+.2%}, 95 % from {low:+.2%} to {high:+.2%}{target}; weights {'identical' if same else 'DIFFER'}"
        )


def print_limit(model: nn.Module) -> None:
    """Time of one read of as many bytes as the gradients hold."""
    flat = torch.randn(sum(p.numel() for p in model.parameters()))
    times = []
    for _ in range(50):
        start = time.process_time()
        flat.sum()
        times.append(time.process_time() - start)
    print(f"limit: one read of all gradients {1000 * statistics.median(times):.2f} ms; a watch needs one")


if __name__ == "__main__":
    main()
