"""Survey of all classes: `python -m tests.zoo_live.survey [--family NAME] [--only CLASS...] [--jobs 2] [--output FILE]`.

`--store FILE` keeps each result as a line of JSON and leaves out, the next time, the classes that stand there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.zoo_live.allowed import AT_FAULT
from tests.zoo_live.judge import Said, Seen, judge_quietly
from tests.zoo_live.pool import TIMEOUT_SECONDS, each
from tests.zoo_live.tiny import FAMILIES, class_names


def read_store(path: Path | None) -> dict[tuple[str, str], Seen]:
    """Results by (family, class); a later line replaces an earlier one."""
    found: dict[tuple[str, str], Seen] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    for line in lines:
        given = json.loads(line)
        given["modes"] = {mode: tuple(Said(**s) for s in said) for mode, said in given["modes"].items()}
        found[given["family"], given["name"]] = Seen(**given)
    return found


def failed(task: tuple[Any, ...], why: str) -> Seen:
    """The result of a class whose process gave none."""
    return Seen(name=task[0], family=task[1], failure=f"not finished: {why}")


def survey(tasks: Sequence[tuple[str, str]], *, jobs: int, store: Path | None, timeout_seconds: float) -> list[Seen]:
    """Judge each (class, family); what `store` holds already is not judged again."""
    from tests.zoo_live.table import line_of
    from tests.zoo_live.warm import warm_up

    known = read_store(store)
    left = [t for t in tasks if (t[1], t[0]) not in known]
    if left:
        warm_up()

    def done(seen: Seen) -> None:
        sys.stderr.write(line_of(seen) + "\n")
        if store is not None:
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(seen)) + "\n")

    new = each(judge_quietly, left, jobs=jobs, failed=failed, done=done, timeout_seconds=timeout_seconds)
    known |= {(s.family, s.name): s for s in new}
    return [known[family, name] for name, family in tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, write it where asked; 1 if a class is not silent or a plant was missed."""
    from tests.zoo_live.table import is_silent, missed, table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds a class may take")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.perf_counter()
    tasks = [(n, f) for f in chosen.family or FAMILIES for n in class_names(f) if not chosen.only or n in chosen.only]
    seen = survey(tasks, jobs=chosen.jobs, store=chosen.store, timeout_seconds=chosen.timeout)
    text = table(seen, time.perf_counter() - started)
    if chosen.output:
        chosen.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(any(not s.failure and (missed(s) or not (is_silent(s) or s.name in AT_FAULT)) for s in seen))


if __name__ == "__main__":
    sys.exit(main())
