"""The table of a survey, in Markdown: totals, what is not silent, what was not built, then every class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.zoo_live.allowed import ALLOWED, AT_FAULT, Allowed, reason_for
from tests.zoo_live.judge import Said, Seen

MASK_CODES = frozenset({"GS101", "GS102", "GS103", "GS105"})
INTRODUCTION = """\
Every class behind transformers' causal, masked and seq2seq language modelling mappings (transformers {version}), built tiny with
random weights. A right setup (right pads, attention mask, labels that fit the family, float32, AdamW, a tokenizer) goes through
all of `ghoststep.check` in eval and in train mode; what a class needs otherwise is in `tests/zoo_live/overrides.py`. Silent means:
no error, no warning, and no note or unknown but those that `tests/zoo_live/allowed.py` lists with a reason. Then the same class
with a planted fault must give an error with the right code.
Written by `python -m tests.zoo_live.survey --output benchmarks/zoo_table.md` (see `scripts/nightly`)."""
LEGEND = """\
Plants: `future`: before a late layer, every position gets a little of the next one (GS101). `examples`: every example gets a
little of the one before it (GS105). `open`: attention without its mask, where the first plant has no place (GS101; for masked
models GS102 or GS106). `pads`: pads in a class that sees them by construction (GS102). 1: the first error. 2: an error behind
another one. 0: missed. -: no place."""


def is_silent(seen: Seen) -> bool:
    """Nothing but allowed notes and unknowns in both modes, and the checks about masks could look."""
    return bool(seen.modes) and seen.name not in AT_FAULT and not alarms(seen) and not all_unknown(seen)


def alarms(seen: Seen) -> list[tuple[str, Said]]:
    """(mode, what was said) where it is not allowed; nothing for a class that is at fault itself."""
    if seen.name in AT_FAULT:
        return []
    return [
        (mode, s) for mode, said in seen.modes.items() for s in said
        if reason_for(s, kind=seen.kind, name=seen.name) is None
    ]  # fmt: skip


def all_unknown(seen: Seen) -> bool:
    """True if none of the checks about who sees whom could look, in some mode."""
    return any({s.code for s in said if s.outcome == "unknown"} >= MASK_CODES for said in seen.modes.values())


def found(seen: Seen) -> bool:
    """True if a plant could be put in, and each of them that could was found as an error."""
    if seen.name in AT_FAULT:
        return own_fault_found(seen)
    planted = [p for p in seen.plants.values() if not p.startswith("no place")]
    return bool(planted) and all(p == "first" or p.startswith("later") for p in planted)


def own_fault_found(seen: Seen) -> bool:
    """True if a class that is at fault itself gets that error in both modes."""
    code = AT_FAULT[seen.name][0]
    return bool(seen.modes) and all(any((s.code, s.outcome) == (code, "error") for s in said) for said in seen.modes.values())


def without_plant(seen: Seen) -> bool:
    """True if no plant has a place in this class."""
    return not seen.failure and seen.name not in AT_FAULT and all(p.startswith("no place") for p in seen.plants.values())


def missed(seen: Seen) -> bool:
    """True if a plant that could be put in was not found."""
    return not seen.failure and not found(seen) and not without_plant(seen)


def word(seen: Seen) -> str:
    """ "silent", "at fault itself" or "NOT SILENT"."""
    return "silent" if is_silent(seen) else "at fault itself" if seen.name in AT_FAULT else "NOT SILENT"


def line_of(seen: Seen) -> str:
    """One line about one class, and one for each thing that is wrong, for the log."""
    if seen.failure:
        return f"{seen.name}: {seen.failure}"
    told = [f"{mode}: {s.code} {s.outcome}: {s.text[:200]}" for mode, s in alarms(seen)]
    told += [f"{n}: {p}" for n, p in seen.plants.items() if p != "first" and not p.startswith("no place")]
    return "\n    ".join([f"{seen.name} ({seen.kind}, {seen.seconds:.0f} s): {word(seen)}", *told])


def totals(seen: Sequence[Seen]) -> Iterable[str]:
    """The counts, a line a family and one for all."""
    heads = ("family", "tried", "built and run", "silent", "at fault itself", "plant found", "plant missed", "no place for a plant",
             "mask checks unknown", "some check unknown")  # fmt: skip
    yield _cells(heads)
    yield _cells(["---"] * len(heads))
    for family in (*dict.fromkeys(s.family for s in seen), "all"):
        some = [s for s in seen if family in ("all", s.family)]
        built = [s for s in some if not s.failure]
        counts = (
            len(some), len(built), sum(map(is_silent, built)), sum(s.name in AT_FAULT for s in built), sum(map(found, built)),
            sum(map(missed, built)), sum(map(without_plant, built)), sum(map(all_unknown, built)),
            sum(any(x.outcome == "unknown" for said in s.modes.values() for x in said) for s in built),
        )  # fmt: skip
        yield _cells([family, *map(str, counts)])


def table(seen: Sequence[Seen], seconds: float) -> str:
    """The whole page."""
    import transformers

    lines = ["# The zoo", "", INTRODUCTION.format(version=transformers.__version__), "", *totals(seen), "",
             f"{sum(s.seconds for s in seen):.0f} s of single classes, {seconds:.0f} s in all.", "", LEGEND]  # fmt: skip
    lines += _section(
        "Not silent", (f"{_name(s)}, {mode}: {x.code} {x.outcome}: {x.text[:300]}" for s in seen for mode, x in alarms(s))
    )
    lines += _section("None of the checks about masks could look", (_name(s) for s in seen if all_unknown(s)))
    wrong = ("missed", "raised")
    lines += _section(
        "Plants missed", (f"{_name(s)}, {n}: {p}" for s in seen for n, p in s.plants.items() if p.startswith(wrong))
    )
    lines += _section("No plant has a place", (f"{_name(s)}: {'; '.join(s.plants.values())}" for s in seen if without_plant(s)))
    lines += _section("At fault themselves", (_fault(s) for s in seen if s.name in AT_FAULT and not s.failure))
    lines += _section("Not built or not run", (f"{_name(s)}: {s.failure}" for s in seen if s.failure))
    lines += _section("Allowed, and how many classes show it", (
        f"{a.code} {a.outcome}, {', '.join(a.classes or a.kinds) or 'everywhere'}: {a.reason} ({_uses(seen, a)})"
        for a in ALLOWED
    ))  # fmt: skip
    heads = ("class", "family", "kind", "", "notes and unknowns", "plants", "clear")
    lines += ["", "## Every class", "", _cells(heads), _cells(["---"] * len(heads))]
    lines += [_entry(s) for s in seen if not s.failure]
    return "\n".join(lines) + "\n"


def _name(seen: Seen) -> str:
    return f"{seen.name} ({seen.family})"


def _fault(seen: Seen) -> str:
    code, reason = AT_FAULT[seen.name]
    return f"{_name(seen)}: {code} {'found' if own_fault_found(seen) else '**missed**'}; {reason}"


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _uses(seen: Sequence[Seen], allowed: Allowed) -> int:
    return sum(any(allowed.covers(x, kind=s.kind, name=s.name) for said in s.modes.values() for x in said) for s in seen)


def _section(title: str, entries: Iterable[str]) -> list[str]:
    cleaned = [f"- {' '.join(e.split()).replace('|', '/')}" for e in entries]
    return ["", f"## {title}", "", *(cleaned or ["None."])]


def _sign(result: str) -> str:
    return {"first": "1", "no place": "-", "later": "2"}.get(result.partition(":")[0], "0")


def _entry(seen: Seen) -> str:
    said = Counter(f"{s.code} {s.outcome}" for both in seen.modes.values() for s in both)
    plants = ", ".join(f"{n} {_sign(p)}" for n, p in seen.plants.items())
    return _cells([seen.name, seen.family, seen.kind, word(seen), ", ".join(said), plants, str(seen.num_clear)])
