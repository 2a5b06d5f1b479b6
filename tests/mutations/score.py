"""Score ghoststep on planted faults: `python -m tests.mutations.score [--fault NAME] [--arch NAME] [--jobs 2] [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.mutations.architectures import ARCHITECTURES, BY_NAME, Arch, Setup
from tests.mutations.fault import Fault
from tests.mutations.faults import BY_NAME as FAULTS_BY_NAME
from tests.mutations.faults import FAULTS

FIRST, LATER, WEAK, WRONG, MISSED, UNKNOWN, BROKEN, HARMLESS = (
    "first", "later", "weak", "wrong", "missed", "unknown", "broken", "harmless"
)  # fmt: skip
VARIANTS = ("train", "eval", "bf16", "fp16", "fast", "ddp")
VARIED = frozenset({"labels", "mask", "recurrent", "routing", "documents", "examples", "positions", "encoders"})
"""Families that a variant other than "train" is run on: what they do does not depend on the mode or dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One finding at warning or error, or a broken or unknown verdict."""

    code: str
    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault on one architecture. `alarms` are errors and warnings about the healthy twin."""

    fault: str
    arch: str
    outcome: str
    harm: float
    heard: tuple[Heard, ...] = ()
    reason: str = ""
    alarms: tuple[Heard, ...] = ()
    seconds: float = 0.0


def judge(setup: Setup, codes: Sequence[str], variant: str = "train") -> tuple[tuple[Heard, ...], tuple[tuple[str, str], ...]]:
    """Findings from warning on in reading order, broken checks last; and (outcome, reason) of the verdicts of `codes`."""
    import ghoststep

    report = ghoststep.check(**setup, fast=variant == "fast")
    heard = [
        Heard(code=v.code, severity=(f.severity or v.severity).value, message=f.message)
        for v, f in report.findings
        if (f.severity or v.severity).rank > 0
    ]
    heard += [
        Heard(code=v.code, severity="broken", message=v.reason or "") for v in report.verdicts if v.outcome.value == "broken"
    ]
    asked = [report.verdict(c) for c in codes if any(v.code == c for v in report.verdicts)]
    return tuple(heard), tuple((v.outcome.value, v.reason or "") for v in asked)


def outcome_of(fault: Fault, heard: Sequence[Heard], asked: Sequence[tuple[str, str]]) -> str:
    """The cell's word; see the module's constants."""
    if fault.unknown_is_right and asked and asked[0][0] == "unknown" and not any(h.severity == "error" for h in heard):
        return FIRST
    if fault.severity == "note" and any(o == "found" for o, _ in asked):
        return WRONG if heard else FIRST
    wanted = [h for h in heard if h.code in fault.codes and h.severity != "broken"]
    errors = [h for h in heard if h.severity == "error" or (fault.severity == "warning" and h.severity == "warning")]
    if errors and errors[0].code in fault.codes:
        return FIRST
    if wanted:
        return LATER if any(h in errors for h in wanted) else (WRONG if errors else WEAK)
    if errors:
        return WRONG
    if any(h.severity == "broken" for h in heard):
        return BROKEN
    return UNKNOWN if asked and all(o == "unknown" for o, _ in asked) else MISSED


def cell(fault: Fault, arch: Arch, healthy_seen: dict[object, tuple[Heard, ...]], variant: str) -> Cell | None:
    """Harm, the broken twin, the healthy twin. None where the fault does not apply."""
    fresh()
    broken = fault.make(arch)
    if broken is None or (variant != "train" and fault.family not in VARIED):
        return None
    if variant == "ddp" and arch.intent == "contrastive":  # its loss reads an attribute that the wrapper does not hand on
        return None
    fresh()
    twin = vary(fault.healthy(arch), variant)
    fresh()
    harm = fault.measure(arch, vary(broken, variant), twin)
    fresh()
    broken = vary(fault.make(arch) or broken, variant)
    started = time.perf_counter()
    try:
        heard, asked = judge(broken, fault.codes, variant)
    except Exception as error:
        heard, asked = (Heard(code="raised", severity="broken", message=f"{type(error).__name__}: {error}"),), ()
    seconds = time.perf_counter() - started
    fresh()
    if fault.healthy not in healthy_seen:
        try:
            healthy_seen[fault.healthy] = judge(vary(fault.healthy(arch), variant), (), variant)[0]
        except Exception as error:
            healthy_seen[fault.healthy] = (Heard(code="raised", severity="broken", message=f"{type(error).__name__}: {error}"),)
    fresh()
    outcome = outcome_of(fault, heard, asked) if harm >= fault.bound else HARMLESS
    reason = "; ".join(f"{o}: {r}" if r else o for o, r in asked)
    alarms = healthy_seen[fault.healthy]
    return Cell(
        fault=fault.name, arch=arch.name, outcome=outcome, harm=harm, heard=heard, reason=reason, alarms=alarms, seconds=seconds
    )


def vary(setup: Setup, variant: str) -> Setup:
    """The same setup in eval mode, with weights of half the precision (and an optimizer over them), or wrapped for one process."""
    if variant == "eval":
        setup["model"].eval()
    if variant in ("bf16", "fp16"):
        setup["model"].to(torch.bfloat16 if variant == "bf16" else torch.float16)
    if variant == "ddp":
        setup["model"] = distributed(setup["model"])
    return setup


def distributed(model: torch.nn.Module) -> torch.nn.Module:
    """The model in DistributedDataParallel of one process (gloo)."""
    from torch import distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fresh() -> None:
    """Undo what a fault may leave behind in this process."""
    torch.set_grad_enabled(True)
    torch.manual_seed(0)


def on_arch(arch_name: str, fault_names: Sequence[str], variant: str = "train") -> list[Cell]:
    """All given faults on one architecture."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seen: dict[object, tuple[Heard, ...]] = {}
    found = (cell(FAULTS_BY_NAME[name], BY_NAME[arch_name], seen, variant) for name in fault_names)
    return [c for c in found if c is not None]


def run(arch_names: Sequence[str], fault_names: Sequence[str], jobs: int, variant: str = "train") -> list[Cell]:
    """All given cells, one architecture a task."""
    if jobs == 1:
        return [c for name in arch_names for c in on_arch(name, fault_names, variant)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = pool.map(on_arch, arch_names, [fault_names] * len(arch_names), [variant] * len(arch_names))
        return [c for part in parts for c in part]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write the table where asked; 1 if something was not found first or a healthy twin was not silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="append", choices=list(FAULTS_BY_NAME))
    parser.add_argument("--arch", action="append", choices=list(BY_NAME))
    parser.add_argument("--variant", choices=VARIANTS, default="train")
    parser.add_argument("--every-variant", action="store_true", help="run the other variants too and add their totals")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    from tests.mutations.table import table

    started = time.perf_counter()
    archs, faults = chosen.arch or [a.name for a in ARCHITECTURES], chosen.fault or [f.name for f in FAULTS]
    cells = run(archs, faults, chosen.jobs, chosen.variant)
    seconds = time.perf_counter() - started
    others = [v for v in VARIANTS if v != chosen.variant] if chosen.every_variant else []
    text = table(cells, seconds, {v: run(archs, faults, chosen.jobs, v) for v in others})
    if chosen.output:
        chosen.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(any(c.outcome not in (FIRST, HARMLESS) or c.alarms for c in cells))


if __name__ == "__main__":
    sys.exit(main())
