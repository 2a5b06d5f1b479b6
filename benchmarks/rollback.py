"""Rolling back: healthy, poisoned and recovered runs, five seeds each.

    python benchmarks/rollback.py [--seeds 5] [--steps 300] [--output benchmarks/rollback.md]

A tiny untied Mamba-2 (6 layers, as in benchmarks/lost_steps.py) learns two Markov languages. One batch, at half of the run, differs:

- nan: it holds a token whose input row has norm 1e-30, and the loop clips as a trainer with `max_grad_norm=0` does, by
  `clip_grad_norm_(parameters, inf)`: every weight becomes NaN.
- scale: its loss is 1e6 times too large (a corrupted sample weight) and nothing clips. AdamW's second moments are spoilt, and the run
  stalls without a NaN anywhere.

healthy: an ordinary batch in its place. poisoned: the loop as it is. recovered: the same loop over `w.guard(loader)` with the policy
"rollback". The loss is taken on held-out text when the loader is used up. Asked for: |recovered - healthy| is
within two standard deviations of the healthy runs over the seeds, and poisoned is not.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs_clip

import ghoststep

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.lost_steps import BATCH, RARE, build, text

HERE = Path(__file__).resolve().parent
RATE, DECAY, SHARE_B = 2e-3, 0.1, 0.3
TINY, HUGE = 1e-30, 1e6
EVERY, GOOD_AFTER = 16, 32
KINDS, ARMS = ("nan", "scale"), ("healthy", "poisoned", "recovered")
POLICY = {"nan": {"nan-by-infinite-clip": "rollback", "hidden-nan-loss": "rollback"}, "scale": {"GS4": "rollback"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run. loss: on held-out text. rollbacks: how often it went back; lost_steps: from the good state to the way back."""

    kind: str
    arm: str
    seed: int
    loss: float
    rollbacks: int = 0
    lost_steps: int = 0
    seconds: float = 0.0


def batches(kind: str, seed: int, steps: int, *, poisoned: bool) -> list[dict[str, torch.Tensor]]:
    """The loader. Without the rare tokens, but for the one batch."""
    generator = torch.Generator().manual_seed(1000 + seed)
    made = []
    for i in range(steps):
        ids = text(BATCH, SHARE_B, generator, rare=False)
        weight = 1.0
        if poisoned and i == steps // 2:
            if kind == "nan":
                ids[3, 10] = RARE[0]
            else:
                weight = HUGE
        made.append({"input_ids": ids, "labels": ids.clone(), "weight": torch.tensor(weight)})
    return made


def prepared(seed: int) -> nn.Module:
    """The model with one row that nothing trains, near zero in every arm."""
    model = build("mamba2", seed)
    with torch.no_grad():
        row = model.get_input_embeddings().weight[RARE[0]]  # type: ignore[operator]
        row.mul_(TINY / row.norm())
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[dict[str, torch.Tensor]], kind: str) -> None:
    """The user's loop."""
    for batch in loader:
        output = model(input_ids=batch["input_ids"], labels=batch["labels"])
        loss: torch.Tensor = output.loss * batch["weight"]
        loss.backward()  # type: ignore[no-untyped-call]
        if kind == "nan":
            torchs_clip(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Loss on text that no arm trains on."""
    ids = text(64, SHARE_B, torch.Generator().manual_seed(77), rare=False)
    model.eval()
    return float(model(input_ids=ids, labels=ids).loss)


def run(kind: str, arm: str, seed: int, steps: int) -> Result:
    """One arm."""
    start = time.process_time()
    model = prepared(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    loader = batches(kind, seed, steps, poisoned=arm != "healthy")
    events: list[dict[str, Any]] = []
    if arm != "recovered":
        train(model, optimizer, loader, kind)
    else:
        with tempfile.TemporaryDirectory() as folder:
            with ghoststep.watch(model, optimizer, run_dir=folder, policy=POLICY[kind]) as w:
                train(model, optimizer, w.guard(loader, every=EVERY, good_after=GOOD_AFTER), kind)
            events = list(rollbacks(Path(folder)))
    return Result(
        kind=kind, arm=arm, seed=seed, loss=held_out(model), rollbacks=len(events),
        lost_steps=sum(e["at_step"] - e["to_step"] for e in events), seconds=time.process_time() - start,
    )  # fmt: skip


def rollbacks(folder: Path) -> Iterator[dict[str, Any]]:
    """What the record of a run says about going back."""
    from ghoststep.run_folder import rank_folder
    from ghoststep.subjects.run_ranks import read_events

    for event in read_events(rank_folder(folder, 0)):
        if event.kind == "rollback":
            yield dict(event.payload)


def table(results: list[Result]) -> str:
    """The report."""
    lines = [
        "| fault | seed | healthy | poisoned | recovered | rollbacks | steps undone |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    for kind in dict.fromkeys(r.kind for r in results):
        of = {(r.arm, r.seed): r for r in results if r.kind == kind}
        seeds = sorted({s for _, s in of})
        for seed in seeds:
            h, p, r = (of[arm, seed] for arm in ARMS)
            lines.append(f"| {kind} | {seed} | {h.loss:.4f} | {p.loss:.4f} | {r.loss:.4f} | {r.rollbacks} | {r.lost_steps} |")
        notes.append(_verdict(kind, of, seeds))
    return "\n".join([*lines, "", *notes]) + "\n"


def _verdict(kind: str, of: dict[tuple[str, int], Result], seeds: list[int]) -> str:
    healthy = [of["healthy", s].loss for s in seeds]
    deviation = statistics.stdev(healthy) if len(seeds) > 1 else math.nan
    worst = max(abs(of["recovered", s].loss - of["healthy", s].loss) for s in seeds)
    # NaN is not within anything
    num_close = sum(abs(of["poisoned", s].loss - of["healthy", s].loss) <= 2 * deviation for s in seeds)
    passed = worst <= 2 * deviation and num_close == 0
    return (
        f"{kind}: two standard deviations of the healthy runs are {2 * deviation:.4f}; the largest |recovered - healthy| is "
        f"{worst:.4f}; poisoned is that close in {num_close} of {len(seeds)} seeds. {'Met' if passed else 'NOT met'}.\n"
    )


def main() -> int:
    """Run everything, print and write the table; 1 if the line is not met."""
    parser = argparse.ArgumentParser(description="Rolling back: healthy, poisoned and recovered runs.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--output", type=Path, default=HERE / "rollback.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ghoststep").setLevel(logging.CRITICAL)
    results = []
    for kind in given.kinds.split(","):
        for seed in range(given.seeds):
            for arm in ARMS:
                results.append(run(kind, arm, seed, given.steps))
                print(results[-1], file=sys.stderr)
    said = f"# Rolling back\n\n`python benchmarks/rollback.py --seeds {given.seeds} --steps {given.steps}`\n\n{table(results)}"
    print(said)
    given.output.write_text(said, encoding="utf-8")
    return 1 if "NOT met" in said else 0


if __name__ == "__main__":
    sys.exit(main())
