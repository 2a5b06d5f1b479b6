"""How the checks on a run put it: rows and places named, what became of a row, what lost steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ghoststep.evidence.steps import RunRecord
from ghoststep.finding import Where
from ghoststep.step_findings import Place, steps_at
from ghoststep.text import printable


def place_where(run: RunRecord, place: Place) -> Where:
    """The `Where` of a row's gradient."""
    row = place.row
    return Where(
        parameter=row.table,
        table_row=row.token_id,
        token_id=row.token_id,
        token=token_of(run, row.token_id),
        example=row.example,
        position=row.position,
        micro_batch=row.micro_batch,
        step=place.step.number,
        rank=place.rank,
    )


def token_of(run: RunRecord, token_id: int) -> str | None:
    """Its decoded text, not escaped; None where no tokenizer was known."""
    return next((text for r in run.ranks if (text := r.facts.tokens.get(token_id)) is not None), None)


def row_text(run: RunRecord, place: Place) -> str:
    """ "table row 17 of embed.weight (token ' foo', norm 1e-30)"."""
    row = place.row
    text = token_of(run, row.token_id)
    parts = [] if text is None else [f"token {printable(text)}"]
    parts += [] if row.row_norm_before is None else [f"norm {row.row_norm_before:.3g}"]
    return f"table row {row.token_id} of {row.table}" + (f" ({', '.join(parts)})" if parts else "")


def place_text(place: Place) -> str:
    """ "position 8 of example 0 (micro-batch 0) in step 41 on rank 1"."""
    row = place.row
    at = f"position {row.position} of example {row.example} (micro-batch {row.micro_batch})"
    return f"{at} in step {place.step.number} on rank {place.rank}"


def fate_text(places: Sequence[Place]) -> str:
    """Whether the row stays as it is at each of its triggers (locked), or grows out of it. "" where its norm was not seen."""
    pairs = [(p.row.row_norm_before, p.row.row_norm_after) for p in places]
    seen = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not seen:
        return ""
    if all(after <= before * (1 + 1e-6) for before, after in seen):
        times = "this time" if len(seen) == 1 else f"any of these {len(seen)} times"
        return f" The row is locked: it did not grow {times}, so every batch with this token is lost."
    return f" The row is healing: its norm went from {seen[0][0]:.3g} to {seen[-1][1]:.3g}."


def cost_text(run: RunRecord, numbers: Sequence[int], *, movers: str = "momentum and decay alone") -> str:
    """How far the weights moved meanwhile and what the lost steps cost in tokens."""
    num_tokens, moved = 0, [0.0]
    for number in numbers:
        here = [step for _, step in steps_at(run, number)]
        num_tokens += sum(step.num_tokens for step in here)
        moved.append(max((s.moved for s in here if s.moved is not None and math.isfinite(s.moved)), default=0.0))
    still = "the weights stood still"
    went = f"{movers} moved the weights by {sum(moved):.2g} of their norm" if max(moved) > 0 else still
    cost = f"; {num_tokens:,} tokens were spent for nothing" if num_tokens else ""
    return f" Meanwhile {went}{cost}."
