"""The report of `lost_steps.py`: a table by treatment, the lines with their figures, and a plot. Needs only the recorded runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ghoststep.pictures.svg import box, number, path, picture, text

Runs = Sequence[dict[str, Any]]

TITLES = {"mamba2": "Mamba-2, 6 layers, untied", "minimax": "MiniMax, 4 layers, linear attention only, untied"}
NAMES = {
    "healthy": "healthy rows", "twin": "healthy twin", "plain": "plain: torch's clip", "group": "ghoststep, group",
    "row": "ghoststep, row", "oracle": "oracle mask", "repaired": "repaired rows, torch's clip",
}  # fmt: skip
ORDER = (
    ("healthy", None), ("twin", None), ("repaired", None),
    *((t, r) for r in (1e-30, 1e-12) for t in ("plain", "group", "row", "oracle")),
)  # fmt: skip
CURES = ("repaired", "group", "row")
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom."""
HEALED, SHARE_LINE, SD_LINE = 1e-3, 0.02, 2.0
"""HEALED: of the median norm. A row that ends below twice its start is locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One treatment of one model over all seeds. gaps: loss minus the healthy loss of the same seed."""

    treatment: str
    r: float | None
    triggers: int
    zeroed: int
    zeroed_elsewhere: int
    crushed: int
    engaged: int
    losses: tuple[float, ...]
    gaps: tuple[float, ...]
    gaps_others: tuple[float, ...]
    num_met: int
    num_healed: int
    num_locked: int
    row_range: tuple[float, float]

    @property
    def label(self) -> str:
        """The treatment in words."""
        return NAMES[self.treatment] + (f", r = {self.r:.0e}" if self.r is not None else "")

    @property
    def mean_gap(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.gaps)


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    quantile = T95[min(len(values) - 1, len(T95)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def summed(runs: Runs, model: str, treatment: str, r: float | None) -> Line | None:
    """The runs of one treatment that have a healthy run of the same seed."""
    healthy = {run["seed"]: run for run in runs if run["model"] == model and run["treatment"] == "healthy"}
    mine = [x for x in runs if (x["model"], x["treatment"], x["r"]) == (model, treatment, r) and x["seed"] in healthy]
    if not mine:
        return None
    rows = [(norm, x) for x in mine for norm, met in zip(x["rows"], x["met"], strict=True) if met]
    return Line(
        treatment=treatment, r=r, triggers=sum(x["triggers"] for x in mine), zeroed=sum(x["zeroed"] for x in mine),
        crushed=sum(x["crushed"] for x in mine), engaged=sum(x["engaged"] for x in mine),
        zeroed_elsewhere=sum(x["zeroed_elsewhere"] for x in mine), losses=tuple(x["loss"] for x in mine),
        gaps=tuple(x["loss"] - healthy[x["seed"]]["loss"] for x in mine),
        gaps_others=tuple(x["loss_others"] - healthy[x["seed"]]["loss_others"] for x in mine),
        num_met=len(rows), num_healed=sum(norm > HEALED * x["median_row"] for norm, x in rows),
        num_locked=sum(r is not None and norm < 2 * r for norm, _ in rows),
        row_range=(min((norm for norm, _ in rows), default=0.0), max((norm for norm, _ in rows), default=0.0)),
    )  # fmt: skip


def deviations(lines: Sequence[Line]) -> tuple[float, float]:
    """s.d. of the gap that a harmless change makes (the twin's; its true mean is 0), and of the healthy losses over seeds."""
    twin, healthy = next(x for x in lines if x.treatment == "twin"), next(x for x in lines if x.treatment == "healthy")
    return math.sqrt(statistics.fmean(g * g for g in twin.gaps)), statistics.stdev(healthy.losses)


def rows_in_words(line: Line) -> str:
    """What became of the rows that were met."""
    low, high = line.row_range
    norms = f"{low:.1e} to {high:.1e}"
    if line.treatment == "oracle":
        return f"not trained, {norms}"
    if line.num_locked:
        return f"**{line.num_locked} of {line.num_met} locked**, {norms}"
    return f"{line.num_healed} of {line.num_met} {'healed' if line.r is not None else 'healthy'}, {norms}"


def table(lines: Sequence[Line]) -> list[str]:
    """The table of one model."""
    twin_sd, seed_sd = deviations(lines)
    out = [
        "| treatment | steps zeroed, of trigger batches | crushed | clip engaged | loss | gap to healthy | gap, other labels "
        "| gap / s.d. of twins | gap / s.d. of seeds | rows at the end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        gap, gap_others = ("" if line.treatment == "healthy" else f"{statistics.fmean(g):+.4f} ± {interval(g):.4f}"
                           for g in (line.gaps, line.gaps_others))  # fmt: skip
        ratios = "| " if line.treatment == "healthy" else f"{line.mean_gap / twin_sd:+.1f} | {line.mean_gap / seed_sd:+.1f}"
        out.append(
            f"| {line.label} | {line.zeroed} of {line.triggers} ({line.zeroed / line.triggers:.1%}) | {line.crushed} | "
            f"{line.engaged} | {statistics.fmean(line.losses):.4f} ± {interval(line.losses):.4f} | {gap} | {gap_others} | {ratios} | "
            f"{rows_in_words(line)} |"
        )
    return [*out, "", f"s.d.: twins {twin_sd:.4f}, seeds {seed_sd:.4f}."]


def verdicts(lines: Sequence[Line]) -> list[str]:
    """Each line of the promise with its figures."""
    twin_sd, seed_sd = deviations(lines)
    plain = {line.r: line for line in lines if line.treatment == "plain"}
    deep, shallow = plain[1e-30], plain[1e-12]
    cures = [x for x in lines if x.treatment in CURES]
    share = deep.zeroed / deep.triggers
    out = [
        (abs(share - 1) <= SHARE_LINE, f"r = 1e-30, torch's clip: {deep.zeroed} of {deep.triggers} trigger batches zeroed "
         f"({share:.1%}), {deep.zeroed_elsewhere} zeroed steps in other batches; the line is 98 to 102 %"),
        (not any(x.zeroed or x.crushed for x in cures), "row, group and repair: "
         f"{sum(x.zeroed for x in cures)} zeroed and {sum(x.crushed for x in cures)} crushed steps; the line is 0"),
    ]  # fmt: skip
    for sd, name in ((twin_sd, "twins"), (seed_sd, "seeds")):
        worst = max(cures, key=lambda x: abs(x.mean_gap))
        out.append((abs(worst.mean_gap) <= SD_LINE * sd, f"row, group and repair: largest gap to healthy {worst.mean_gap:+.4f} "
                    f"({worst.label}), {abs(worst.mean_gap) / sd:.1f} s.d. of {name}; the line is 2"))  # fmt: skip
        out.append((deep.mean_gap > SD_LINE * sd, f"r = 1e-30, torch's clip: gap {deep.mean_gap:+.4f}, {deep.mean_gap / sd:.1f} s.d. "
                    f"of {name}; expected above 2"))  # fmt: skip
    healed = [x for x in lines if x.treatment in ("group", "row")]
    out += [
        (deep.num_locked == deep.num_met, f"r = 1e-30, torch's clip: {deep.num_locked} of {deep.num_met} rows locked"),
        (all(x.num_healed == x.num_met for x in healed), "row and group: "
         f"{sum(x.num_healed for x in healed)} of {sum(x.num_met for x in healed)} rows healed"),
    ]  # fmt: skip
    told = [f"- {'met' if good else '**not met**'}: {what}." for good, what in out]
    return [*told, f"- beside it: r = 1e-12, torch's clip: {shallow.zeroed} zeroed and {shallow.crushed} crushed of {shallow.triggers} "
            f"trigger batches, {shallow.num_healed} of {shallow.num_met} rows healed, gap {shallow.mean_gap:+.4f} ± "
            f"{interval(shallow.gaps):.4f}."]  # fmt: skip


def complete(runs: Runs) -> dict[str, list[Line]]:
    """The lines of each model that has all treatments and two seeds at least."""
    found = {m: [line for t, r in ORDER if (line := summed(runs, m, t, r)) is not None] for m in TITLES}
    return {m: lines for m, lines in found.items() if len(lines) == len(ORDER) and len(lines[0].losses) > 1}


def write(runs: Runs, page: Path, plot: Path) -> None:
    """Write both files, and print the page."""
    models = complete(runs)
    if not models:
        print("no model has every treatment in two seeds yet: no report")
        return
    seeds = len({run["seed"] for run in runs})
    text_of = [run for run in runs if run["treatment"] == "healthy" and run["model"] == next(iter(models))]  # the same for all
    touched, triggers = (sum(x[k] for x in text_of) for k in ("touched", "triggers"))
    minutes = sum(run["cpu_seconds"] for run in runs) / 60
    out = [
        "# Lost steps, end to end", "",
        f"Written by `benchmarks/lost_steps.py`, which says what each treatment is: {seeds} seeds (initial weights, data order and",
        f"row directions), {runs[0]['steps']} steps of continued training each, {minutes:.1f} CPU minutes;",
        f"torch {version('torch')} CPU, transformers {version('transformers')}, float32, one thread.", "",
        "- Trigger batch: a rare token stands before the last position. At the last position no label follows, so nothing reaches its",
        f"  row: {touched - triggers} of {touched} batches with a rare token have it only there.",
        "- Zeroed: every gradient outside the input table was exactly 0 after the clip. Crushed: below a thousandth of what it was.",
        "- Loss: 512 held-out sequences, the same for all. Gap: to the healthy run of the same seed; ± is the 95 % interval of the",
        "  mean over the seeds. Other labels: without the labels that are rare tokens, which the oracle never learns.",
        "  The two runs of the oracle differ only in how the untrained rows, as context, disturb the held-out text.",
        "- s.d. of twins: of the gap between two healthy runs of one seed that differ only in the six rows' directions (root mean",
        f"  square of {seeds} differences, so itself only known to {1 / math.sqrt(2 * seeds):.0%}).",
        "  s.d. of seeds: of the healthy losses over the seeds, unpaired.", "",
        "![Lost steps and loss gap by treatment](lost_steps.svg)",
    ]  # fmt: skip
    for model, lines in models.items():
        out += ["", f"## {TITLES[model]}", "", *table(lines), "", *verdicts(lines)]
    page.write_text("\n".join(out) + "\n", encoding="utf-8")
    plot.write_text(drawing(models, seeds), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


LEFT, BARS, GAPS, ROW, TOP = 250.0, 150.0, 360.0, 22.0, 92.0


def drawing(models: dict[str, list[Line]], seeds: int) -> str:
    """Both panels of every model as SVG: share of the trigger steps lost, and loss gap by seed."""
    lowest, highest = (choose(g for lines in models.values() for line in lines for g in line.gaps) for choose in (min, max))
    low, high = lowest - 0.1 * (highest - lowest), highest + 0.1 * (highest - lowest)
    parts = [
        text(12, 22, f"Continued training with near-zero input rows, {seeds} seeds", "head"),
        box(12, 35, 10, 10, "zeroed"), text(28, 44, "every gradient zero", "quiet"),
        box(180, 35, 10, 10, "crushed"), text(196, 44, "gradient below 1/1000", "quiet"),
        box(364, 35, 10, 10, "band"), text(380, 44, "2 s.d. of a harmless change", "quiet"),
        '<circle class="dot" cx="597" cy="40" r="3.5"/>', text(606, 44, "a seed", "quiet"),
        path(["M669 33v14"], "mean"), text(676, 44, "mean", "quiet"),
    ]  # fmt: skip
    y = TOP
    for model, lines in models.items():
        parts += panel(TITLES[model], [x for x in lines if x.treatment != "healthy"], y, (low, high), deviations(lines)[0])
        y += ROW * (len(lines) - 1) + 70
    rules = {
        ".zeroed": "fill:var(--bad)", ".inside": "fill:var(--paper)",
        ".crushed": "fill:var(--s2)", ".frame": "fill:var(--soft)", ".band": "fill:var(--s1)",
        ".dot": "fill:none;stroke:var(--s3);stroke-width:1.3", ".mean": "stroke:var(--ink);stroke-width:2",
        ".zero": "stroke:var(--quiet);stroke-width:1",
    }  # fmt: skip
    return picture(
        parts, LEFT + BARS + GAPS + 60, y - 40, title="Lost steps and loss gap by treatment",
        description="Left: share of trigger batches whose step was zeroed or crushed. Right: validation loss minus that of the "
        "healthy run of the same seed; the band is two standard deviations of a harmless change.", rules=rules,
    )  # fmt: skip


def panel(title: str, lines: Sequence[Line], top: float, span: tuple[float, float], sd: float) -> list[str]:
    """One model. span: of the gap's axis. sd: the band reaches two of it to both sides."""
    start = LEFT + BARS + 30

    def at(gap: float) -> float:
        return start + GAPS * (gap - span[0]) / (span[1] - span[0])

    height = ROW * len(lines)
    parts = [
        text(12, top - 24, title, "head"), text(LEFT, top - 6, "trigger steps lost", "quiet"),
        text(start, top - 6, "loss gap to healthy", "quiet"),
        box(LEFT, top, BARS, height, "frame"), box(start, top, GAPS, height, "frame"),
        box(at(-2 * sd), top, at(2 * sd) - at(-2 * sd), height, "band"),
        path([f"M{number(at(0))} {number(top)}v{number(height)}"], "zero"),
    ]  # fmt: skip
    for index, line in enumerate(lines):
        y = top + ROW * (index + 0.5)
        zeroed, crushed = line.zeroed / line.triggers, line.crushed / line.triggers
        parts.append(text(LEFT - 8, y + 4, line.label, anchor="end"))
        parts.append(box(LEFT, y - 7, BARS * zeroed, 14, "zeroed") if zeroed else "")
        parts.append(box(LEFT + BARS * zeroed, y - 7, BARS * crushed, 14, "crushed") if crushed else "")
        inside = zeroed + crushed > 0.5
        x = LEFT + (BARS - 40 if inside else BARS * (zeroed + crushed) + 5)
        parts.append(text(x, y + 4, f"{zeroed + crushed:.0%}", "inside" if inside else "quiet"))
        parts += [f'<circle class="dot" cx="{number(at(g))}" cy="{number(y)}" r="3.5"/>' for g in line.gaps]
        parts.append(path([f"M{number(at(line.mean_gap))} {number(y - 8)}v16"], "mean"))
    unit = 10 ** math.floor(math.log10(span[1] - span[0]))
    step = next(s for s in (unit, unit / 2, unit / 5) if (span[1] - span[0]) / s >= 4)
    ticks = [step * k for k in range(math.ceil(span[0] / step), math.floor(span[1] / step) + 1)]
    return parts + [text(at(t), top + height + 14, f"{t:+.3g}" if t else "0", "quiet small", "middle") for t in ticks]
