"""Lost steps end to end: continued training with near-zero input rows, under each treatment.

    python benchmarks/lost_steps.py [--seeds 5] [--steps 250] [--jobs 1] [--results benchmarks/lost_steps.jsonl]
    python benchmarks/lost_steps.py --only-report

A tiny untied Mamba-2 (6 layers) and MiniMax (4 layers, linear attention only) are pre-trained without 6 rare tokens; then the
input rows of these are set to norm r = 1e-30 or 1e-12, and training goes on with text in which they occur in about four of ten
batches. A seed fixes initial weights, data order and the directions of the six rows. Treatments:

- healthy: the rows have the median norm; torch's clip. twin: the same with other directions of the six rows, for the noise.
- plain: torch's clip. group, row: ghoststep's. oracle: the tokens left out of inputs and labels (`ghoststep.oracle_mask`).
- repaired: the rows at a tenth of the median norm before training; torch's clip.

The text: two Markov languages, A (ids 3 to 89) and B (60 to 127, with the rare tokens), each sequence of one of them behind a
BOS. Every run appends one line to the results, so an interrupted run goes on where it stopped; delete the results after a change
of the recipe. The report is benchmarks/lost_steps.md with lost_steps.svg.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import clip_grad_norm_ as torchs_clip

import ghoststep
from ghoststep.remedies import clip_events
from ghoststep.remedies.rows import TARGET_SHARE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import _lost_steps_report as report

HERE = Path(__file__).resolve().parent
VOCABULARY, WIDTH, LENGTH, BATCH = 128, 64, 24, 8
BOS, HARMLESS = 1, 60
"""HARMLESS: a frequent token of both languages, the oracle's replacement."""
RARE = tuple(range(100, 106))
RARE_SHARE = 0.006
"""Of the tokens of language B, all six together."""
NUM_PRETRAINING, PRETRAINING_RATE, RATE, DECAY, WARM_UP, MAX_NORM = 250, 2e-3, 1e-3, 0.1, 10, 1.0
CRUSHED = 1e-3
"""Below this share of its gradient the trunk counts as crushed."""
MODELS = ("mamba2", "minimax")
Treated = tuple[str, float | None]
# (treatment, norm of the rare rows); None: set by the treatment. The oracle reads those rows on the held-out text only.
RUNS: tuple[Treated, ...] = (
    ("healthy", None), ("twin", None), ("repaired", None),
    *((t, r) for r in (1e-30, 1e-12) for t in ("plain", "group", "row", "oracle")),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run. triggers: batches with a rare token before the last position; zeroed: steps whose clipped gradient was all
    zero outside the tables; crushed: below a thousandth, but not zero; zeroed_elsewhere: zeroed without being a trigger batch.
    engaged: steps in which our clip did more than torch's. rows: the six norms at the end; met: which of them were in a trigger.
    loss: on held-out text; loss_others: without the labels that are rare tokens."""

    model: str
    seed: int
    treatment: str
    r: float | None
    steps: int
    triggers: int = 0
    touched: int = 0
    zeroed: int = 0
    zeroed_elsewhere: int = 0
    crushed: int = 0
    engaged: int = 0
    loss: float = 0.0
    loss_others: float = 0.0
    median_row: float = 0.0
    rows: tuple[float, ...] = ()
    met: tuple[bool, ...] = ()
    cpu_seconds: float = 0.0


class Language:
    """A Markov chain over some ids: each token has six likely successors, and a tenth goes anywhere."""

    def __init__(self, ids: Sequence[int], rare: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        common = torch.tensor([i for i in ids if i not in rare])
        weights = torch.tensor([1 / (k + 1) for k in range(6)])
        step_VV = torch.zeros(VOCABULARY, VOCABULARY)
        step_VV[:, common] = 0.1 / len(common)
        for token in range(VOCABULARY):
            successors = common[torch.randperm(len(common), generator=generator)[:6]]
            step_VV[token, successors] += 0.9 * weights / weights.sum()
        self.without_rare_VV = step_VV
        self.step_VV = step_VV.clone()
        if rare:
            self.step_VV *= 1 - RARE_SHARE
            self.step_VV[:, list(rare)] = RARE_SHARE / len(rare)


A, B = Language(range(3, 90), (), seed=1), Language(range(60, 128), RARE, seed=2)


def text(count: int, share_b: float, generator: torch.Generator, *, rare: bool) -> torch.Tensor:
    """[count, LENGTH] ids."""
    is_b_N1 = (torch.rand(count, generator=generator) < share_b)[:, None]
    step_VV = B.step_VV if rare else B.without_rare_VV
    ids = [torch.full((count,), BOS)]
    for _ in range(LENGTH - 1):
        probability_NV = torch.where(is_b_N1, step_VV[ids[-1]], A.step_VV[ids[-1]])
        ids.append(torch.multinomial(probability_NV, 1, generator=generator)[:, 0])
    return torch.stack(ids, 1)


def build(name: str, seed: int) -> nn.Module:
    """The untrained model in training mode; its initial weights are set by the seed."""
    import transformers

    torch.manual_seed(seed)
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "tie_word_embeddings": False, "use_cache": False, "bos_token_id": BOS,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if name == "mamba2":
        config: Any = transformers.Mamba2Config(
            **shared, num_hidden_layers=6, state_size=16, num_heads=4, head_dim=WIDTH // 2, n_groups=1, chunk_size=8
        )
        model: nn.Module = transformers.Mamba2ForCausalLM(config)
    else:
        config = transformers.MiniMaxConfig(
            **shared, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=WIDTH // 4,
            intermediate_size=2 * WIDTH, max_position_embeddings=64, num_local_experts=2, num_experts_per_tok=1, block_size=8,
            layer_types=["linear_attention"] * 4,
        )  # fmt: skip
        model = transformers.MiniMaxForCausalLM(config)
    return model.train()


def table_of(model: nn.Module) -> torch.Tensor:
    """The input table."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return weight


def pretrained(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights after training on language A with a little of B, without the rare tokens."""
    model, generator = build(name, seed), torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, weight_decay=DECAY)
    for _ in range(NUM_PRETRAINING):
        ids = text(BATCH, 0.1, generator, rare=False)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torchs_clip(model.parameters(), MAX_NORM)
        optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


def set_rows(model: nn.Module, treatment: str, r: float | None, seed: int) -> float:
    """Give the rare rows the norm of the treatment; the median norm of the trained rows."""
    generator = torch.Generator().manual_seed(2000 + seed + (500 if treatment == "twin" else 0))
    table = table_of(model)
    with torch.no_grad():
        median = float(table[[i for i in range(3, VOCABULARY) if i not in RARE]].norm(dim=1).median())
        norm = r if r is not None else TARGET_SHARE * median if treatment == "repaired" else median
        table[list(RARE)] = norm * normalize(torch.randn(len(RARE), WIDTH, generator=generator), dim=1)
    return median


def trunk_size(model: nn.Module, table: torch.Tensor) -> float:
    """Largest gradient entry outside the input table."""
    return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None and p is not table)


def clip(model: nn.Module, treatment: str) -> None:
    """The treatment's clip."""
    if treatment in ("group", "row"):
        ghoststep.clip_grad_norm_(model, MAX_NORM, mode=treatment)
    else:
        torchs_clip(model.parameters(), MAX_NORM)


def train(name: str, weights: dict[str, torch.Tensor], treatment: str, r: float | None, seed: int, steps: int) -> Run:
    """One run from the pre-trained weights."""
    start, model = time.process_time(), build(name, seed)
    model.load_state_dict(weights)
    run = Run(model=name, seed=seed, treatment=treatment, r=r, steps=steps, median_row=set_rows(model, treatment, r, seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    generator, table, rare_K, met = torch.Generator().manual_seed(3000 + seed), table_of(model), torch.tensor(RARE), set[int]()
    events: list[clip_events.ClipEvent] = []
    with clip_events.listening(events.append):
        for _ in range(steps):
            ids = text(BATCH, 0.5, generator, rare=True)
            hit_BT = torch.isin(ids, rare_K)
            is_trigger = bool(hit_BT[:, :-1].any())
            met |= set(ids[:, :-1][hit_BT[:, :-1]].tolist())
            batch = {"input_ids": ids, "labels": ids}
            if treatment == "oracle":
                batch = ghoststep.oracle_mask(batch, RARE, replacement=HARMLESS)
            optimizer.zero_grad()
            model(**batch).loss.backward()
            before = trunk_size(model, table)
            clip(model, treatment)
            after = trunk_size(model, table)
            optimizer.step()
            schedule.step()
            run.triggers += is_trigger
            run.touched += bool(hit_BT.any())
            run.zeroed += after == 0
            run.zeroed_elsewhere += after == 0 and not is_trigger
            run.crushed += 0 < after < CRUSHED * before
    run.engaged = sum(e.action is not clip_events.ClipAction.AS_TORCH for e in events)
    run.loss, run.loss_others = evaluate(model)
    run.rows = tuple(table[list(RARE)].double().norm(dim=1).tolist())
    run.met = tuple(i in met for i in RARE)
    run.cpu_seconds = round(time.process_time() - start, 2)
    return run


@torch.no_grad()
def evaluate(model: nn.Module) -> tuple[float, float]:
    """Mean loss of 512 held-out sequences, the same for all seeds: of all labels, and without those that are rare tokens."""
    ids = text(512, 0.5, torch.Generator().manual_seed(99), rare=True)
    model.eval()
    logits = torch.cat([model(input_ids=part).logits for part in torch.split(ids, 128)])[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    loss = cross_entropy(logits, labels, reduction="none")
    return float(loss.mean()), float(loss[~torch.isin(labels, torch.tensor(RARE))].mean())


def done_in(results: Path, steps: int) -> list[dict[str, Any]]:
    """Recorded runs of this length."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [run for line in lines if (run := json.loads(line))["steps"] == steps]


def missing_of(job: tuple[str, int, int, list[Treated]]) -> Iterator[Run]:
    """The runs of one model and seed that are not recorded yet."""
    name, seed, steps, missing = job
    torch.set_num_threads(1)
    clip_events.logger.disabled = True
    weights = pretrained(name, seed)
    for treatment, r in missing:
        yield train(name, weights, treatment, r, seed, steps)


def all_of(job: tuple[str, int, int, list[Treated]]) -> list[Run]:
    """For a worker process."""
    return list(missing_of(job))


def finished(jobs: list[tuple[str, int, int, list[Treated]]], processes: int) -> Iterator[Run]:
    """Every run of the jobs as it ends."""
    if processes == 1:
        for job in jobs:
            yield from missing_of(job)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for runs in pool.imap_unordered(all_of, jobs):
            yield from runs


def main() -> None:
    """Train what is missing, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one model and seed each")
    parser.add_argument("--results", type=Path, default=HERE / "lost_steps.jsonl")
    parser.add_argument("--only-report", action="store_true")
    given = parser.parse_args()
    os.nice(5)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    recorded = {(run["model"], run["seed"], run["treatment"], run["r"]) for run in done_in(given.results, given.steps)}
    jobs = []
    for seed in range(given.seeds if not given.only_report else 0):
        for name in MODELS:
            if missing := [(t, r) for t, r in RUNS if (name, seed, t, r) not in recorded]:
                jobs.append((name, seed, given.steps, missing))
    for run in finished(jobs, given.jobs):
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        print(f"{run.model} seed {run.seed} {run.treatment} {run.r or ''}: {run.triggers} triggers, {run.zeroed} zeroed, "
              f"{run.crushed} crushed, loss {run.loss:.4f}, {run.cpu_seconds} s", flush=True)  # fmt: skip
    report.write(done_in(given.results, given.steps), HERE / "lost_steps.md", HERE / "lost_steps.svg")


if __name__ == "__main__":
    main()
