"""The gallery: silent failures as folders, each with a `failure.py` that shows the harm, is found, and is cured.

In a clone the folders are `gallery/` of the repository, in an installed package `ghoststep/gallery/`. Listing imports nothing of
them; running one runs its code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ghoststep.catalogue import find_page
from ghoststep.errors import SubjectError, UsageError
from ghoststep.finding import Finding, Report, Severity, Verdict

SECTIONS = ("What people see", "What really happens", "The cure")
"""The headings of a failure's docstring, in this order, below its first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One folder. name: its own. code: of the check that finds it, which the folder is named after or `CHECK` in its file names.
    title: the failure in one line. sections: by heading."""

    name: str
    code: str
    path: Path
    title: str
    sections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What running an exhibit gave.

    harm_broken / harm_cured: `harm(setup)` of each, in words `harm_words`; up to `harmless` it is none. first: the check that the
    report on the broken one names first, with its finding; None if nothing was found. beside: other errors and warnings in it.
    left: errors and warnings about the cured one. broken / cured: the two reports. seconds: all of it.
    """

    exhibit: Exhibit
    harm_broken: float
    harm_cured: float
    harm_words: str
    harmless: float
    first: tuple[Verdict, Finding] | None
    beside: tuple[str, ...]
    left: tuple[str, ...]
    broken: Report
    cured: Report
    seconds: float

    @property
    def is_harmful(self) -> bool:
        """The broken one is harmed, the cured one is not. NaN counts as harm."""
        return not self.harm_broken <= self.harmless and self.harm_cured <= self.harmless

    @property
    def is_found(self) -> bool:
        """The report on the broken one names this check before any other."""
        return self.first is not None and self.first[0].code == self.exhibit.code

    @property
    def is_cured(self) -> bool:
        """No error and no warning about the cured one, and this check could look at it."""
        looked = {v.code: v.outcome.value for v in self.cured.verdicts}
        return not self.left and looked.get(self.exhibit.code) in ("clear", "not-applicable")


def gallery_folder() -> Path:
    """Where the folders are; `SubjectError` if this installation came without them."""
    package = Path(__file__).resolve().parent
    for folder in (package / "gallery", package.parent.parent / "gallery"):
        if folder.is_dir():
            return folder
    raise SubjectError(f"no gallery beside {package}: install ghoststep from its wheel or run it from a clone")


def exhibits() -> tuple[Exhibit, ...]:
    """Every folder that holds a `failure.py`, by code. Nothing is imported. O(files)."""
    found = [_read(path) for path in gallery_folder().glob("*/failure.py")]
    return tuple(sorted(found, key=lambda e: (e.code, e.name)))


def find_exhibit(name_or_code: str) -> Exhibit:
    """By folder name or code; `UsageError` with near names otherwise."""
    every = exhibits()
    wanted = name_or_code.strip().lower()
    for exhibit in every:
        if wanted in (exhibit.name, exhibit.code.lower()):
            return exhibit
    import difflib

    near = difflib.get_close_matches(wanted, [e.name for e in every], n=3)
    hint = f"; do you mean {', '.join(near)}?" if near else ""
    raise UsageError(f"no exhibit {name_or_code!r} in the gallery{hint} `ghoststep gallery` lists them all.")


def _read(path: Path) -> Exhibit:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    doc = inspect.cleandoc(ast.get_docstring(tree, clean=False) or "")
    title, *rest = re.split(r"^## (.+)$", doc, flags=re.MULTILINE)
    name = path.parent.name
    page = find_page(_named_check(tree) or name)
    sections = {heading.strip(): " ".join(body.split()) for heading, body in zip(rest[::2], rest[1::2], strict=True)}
    return Exhibit(
        name=name, code=page.code if page else "planned", path=path, title=" ".join(title.split()), sections=sections
    )


def _named_check(tree: ast.Module) -> str | None:
    """`CHECK = "..."` of a failure that shares its check with others."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "CHECK" for t in node.targets):
            return ast.literal_eval(node.value) if isinstance(node.value, ast.Constant) else None
    return None


def load_exhibit(exhibit: Exhibit) -> ModuleType:
    """Run its file. `SubjectError` with the reason if that fails, such as a missing extra."""
    spec = importlib.util.spec_from_file_location(f"ghoststep_gallery_{exhibit.name.replace('-', '_')}", exhibit.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise SubjectError(f"the exhibit {exhibit.name} needs {error.name}: pip install 'ghoststep[hf]'") from error
    return module


def show(exhibit: Exhibit) -> Shown:
    """Build the broken and the cured one, measure the harm of each and check both. Seconds on a CPU."""
    from ghoststep.api import check

    start = time.perf_counter()
    module = load_exhibit(exhibit)
    harm = cast("Callable[[Any], float]", module.harm)
    options: Mapping[str, Any] = getattr(module, "OPTIONS", {})
    _quiet_libraries()
    # The harm may train what it gets, so each question gets one of its own.
    harms = [float(harm(build())) for build in (module.broken, module.cured)]
    broken, cured = (check(build(), **options) for build in (module.broken, module.cured))
    expected = _findings(broken, at_least=Severity.NOTE)
    first = next((pair for pair in expected if pair[0].code == exhibit.code), None)
    worst = [(v, f) for v, f in expected if (f.severity or v.severity) is not Severity.NOTE]
    if worst:
        first = worst[0]
    return Shown(
        exhibit=exhibit,
        harm_broken=harms[0],
        harm_cured=harms[1],
        harm_words=str(module.HARM),
        harmless=float(module.HARMLESS),
        first=first,
        beside=tuple(f"{v.code} {v.name}" for v, _ in worst if v.code != exhibit.code),
        left=tuple(f"{v.code} {v.name}: {f.message}" for v, f in _findings(cured, at_least=Severity.WARNING)),
        broken=broken,
        cured=cured,
        seconds=time.perf_counter() - start,
    )


def _quiet_libraries() -> None:
    """The exhibits load tiny models over and over: no progress bars and no hints of transformers in between."""
    if "transformers" in sys.modules:
        logging: Any = importlib.import_module("transformers.utils.logging")  # untyped
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def _findings(report: Report, *, at_least: Severity) -> list[tuple[Verdict, Finding]]:
    """In the report's own order."""
    pairs = [(v, f) for v in report.verdicts for f in v.findings]
    return [(v, f) for v, f in pairs if (f.severity or v.severity).rank >= at_least.rank]
