"""`ghoststep fix MODEL --out NEW`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ghoststep.errors import UsageError


def fix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The folder of a checkpoint in safetensors. It is only read.")],
    out: Annotated[Path | None, typer.Option(metavar="NEW", help="The new folder; it must not exist.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="Only these table rows: 5,17,100-120. \\[those that are dangers]")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="BASE", help="The model it was made from: rows that differ from it are left alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the directions of the new rows.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and write nothing.")] = False,
    no_probe: Annotated[
        bool,
        typer.Option("--no-probe", help="Do not build the model to prove that logits stay; bytes are compared all the same."),
    ] = False,
) -> None:
    """Give near-zero input rows a small random value, in a new checkpoint that is otherwise the same, byte for byte."""
    from ghoststep.remedies.rows import plan_repair
    from ghoststep.remedies.rows_proof import prove_repair
    from ghoststep.remedies.rows_write import check_place, write_repair
    from ghoststep.subjects.checkpoint import open_checkpoint
    from ghoststep.text import counted, printable

    if out is None and not dry_run:
        raise UsageError("--out NEW is missing: the checkpoint itself is never changed (--dry-run writes nothing)")
    source = Path(model).expanduser()
    target = None if out is None else out.expanduser()
    asked = parse_rows(rows) if rows else ()
    base_checkpoint = open_checkpoint(base) if base is not None else None
    repair = plan_repair(open_checkpoint(model), rows=asked, base=base_checkpoint, seed=seed)
    for table_row, why in repair.left:
        _say(f"left     row {table_row}: {why}")
    if not repair.rows:
        left = counted(len(repair.left), "near-zero row was", "near-zero rows were")
        typer.echo(f"nothing to fix: {left} left, each with its reason above" if repair.left else "nothing to fix")
        return
    if target is not None:
        check_place(source, target)
    for row in repair.rows:
        token = f" {printable(row.token)}" if row.token else ""
        typer.echo(f"row {row.table_row}{token}: norm {row.old_norm:.3g} -> {row.new_norm:.3g} ({row.why})")
    if dry_run or target is None:
        typer.echo(f"{counted(len(repair.rows), 'row', 'rows')} would be repaired; nothing was written")
        return

    def prove(stage: Path) -> dict[str, object]:
        if no_probe:
            return {"logits": "not proved on the model (--no-probe); every byte outside the rows is the same"}
        return prove_repair(source, stage, repair)

    manifest = write_repair(source, target, repair, prove)
    for key, value in manifest["proof"].items():
        _say(f"{key.replace('_', ' ')}: {value}")
    typer.echo(f"{counted(len(repair.rows), 'row', 'rows')} repaired in {out} ({manifest['num_files_copied']} files copied)")


def parse_rows(given: Sequence[str]) -> list[int]:
    """Row numbers of "5", "7-9" and "1,2"; `UsageError` for anything else."""
    rows: set[int] = set()
    for part in ",".join(given).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"--rows {part!r}: expected numbers and ranges, such as 5,17,100-120")
        low, high = int(first), int(last or first)
        if high - low > 1_000_000 or high < low:
            raise UsageError(f"--rows {part!r}: expected an ascending range of at most a million rows")
        rows.update(range(low, high + 1))
    return sorted(rows)


def _say(text: str) -> None:
    from ghoststep.text import visible

    sys.stderr.write(f"ghoststep: {visible(text)}\n")
