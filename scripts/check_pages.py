"""Writes docs/checks/, by scripts/docs and never by hand: a page a check from its docstring, and an index by family."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from ghoststep.registry import Check, load

PAGES = Path(__file__).resolve().parent.parent / "docs" / "checks"

HEADINGS = (
    "What it finds",
    "Why it matters",
    "When it is not a problem",
    "How to confirm by hand",
    "How to fix",
    "Options",
    "References",
)

FAMILIES = {
    "GS0": "Vocabulary and tables",
    "GS1": "Visibility",
    "GS2": "Labels and loss",
    "GS3": "Rows of the embedding",
    "GS4": "Steps",
    "GS5": "Geometry",
    "GS6": "Set-up",
    "GS9": "ghoststep itself",
}


def missing_headings(check: Check) -> list[str]:
    """The fixed headings that a check's docstring lacks, or has out of order."""
    have = [line.removeprefix("## ").strip() for line in check.doc.splitlines() if line.startswith("## ")]
    wanted = [heading for heading in HEADINGS if heading not in have]
    return wanted or ([] if [h for h in have if h in HEADINGS] == list(HEADINGS) else ["the fixed headings in their order"])


def page(check: Check) -> str:
    """The page of one check: title, its facts, then its docstring as it is."""
    needs = ", ".join(f"`{need.kind.__name__}`" + (" (optional)" if need.optional else "") for need in check.needs)
    options = ", ".join(f"`{o.name.replace('_', '-')} = {o.default!r}`" for o in check.options) or "none"
    source = inspect.getsourcefile(check.function) or ""
    rows = (
        ("Worst severity", check.severity.value),
        ("Basis", check.basis.value),
        ("Judges", needs),
        ("Options", options),
        ("Explains", ", ".join(f"`{name}`" for name in check.explains) or "nothing else"),
        ("Source", f"`src/{'/'.join(Path(source).parts[-4:])}`"),
    )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    flaw, _, rest = check.doc.partition("\n")
    return f"# {check.code} {check.name}\n\n**{flaw}**\n\n| | |\n|---|---|\n{table}\n\n{rest.strip()}\n"


def entry(check: Check) -> str:
    """One line of the index."""
    flaw = check.flaw.replace("|", "\\|")
    return f"| [{check.code}]({check.code}.md) | `{check.name}` | {flaw} | {check.severity.value} | {check.basis.value} |"


def index(checks: tuple[Check, ...]) -> str:
    """All checks, family by family, with the flaw of each in one sentence."""
    header = ["| code | name | the flaw | severity, at worst | basis |", "|---|---|---|---|---|"]
    lines = ["# All checks", "", f"{len(checks)} checks. The same text in a terminal: `ghoststep explain CODE`.", ""]
    for prefix, title in FAMILIES.items():
        members = [c for c in checks if c.code.startswith(prefix)]
        if members:
            lines += [f"## {prefix}xx {title}", "", *header, *(entry(c) for c in members), ""]
    return "\n".join(lines)


def main() -> int:
    """Write all pages afresh; 1, with the reason, if a docstring lacks a heading."""
    checks = load(with_instruments=False, plugins=False).checks
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    for check in checks:
        (PAGES / f"{check.code}.md").write_text(page(check), encoding="utf-8")
    (PAGES / "index.md").write_text(index(checks), encoding="utf-8")
    complaints = [f"{c.module}: the docstring of {c.code} lacks: {', '.join(m)}" for c in checks if (m := missing_headings(c))]
    print("\n".join(complaints), end="\n" if complaints else "", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
