"""Checks, instruments and remedies, and how they are found.

A check is a plain function under `@check`; an instrument a plain function under `@instrument`. Both say what they need by
the annotations of their parameters: an evidence or subject class is injected, `Fact | Missing` makes it optional.
Keyword-only parameters of a check are its options. Nothing is registered by hand: the packages `ghoststep.checks` and
`ghoststep.instruments` are walked, and other packages name a module under the entry point group `ghoststep.checks`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ghoststep.answers import Answer, Clear, Found, NotApplicable, Unknown, answer
from ghoststep.errors import GhoststepError, UsageError
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.finding import Basis, Severity

__all__ = [
    "Answer", "BrokenPlugin", "Check", "Clear", "Found", "Instrument", "Need", "NotApplicable", "Option", "Registry", "Unknown",
    "answer", "check", "instrument", "load", "members", "walk",
]  # fmt: skip
ENTRY_POINT_GROUP = "ghoststep.checks"
CODE_PATTERN = re.compile(r"[A-Z]{2,}[0-9]{3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One injected parameter: the class asked for, and whether `Missing` is acceptable."""

    parameter: str
    kind: type
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One keyword-only parameter of a check: its type ("float", "int", "str", "bool", "tuple[str, ...]") and default."""

    name: str
    type: Any
    default: object


class _Injected:
    """A function whose positional parameters are facts. Calling it calls the function unchanged."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__.strip("_").replace("_", "-")
        self.module = function.__module__
        self.doc = inspect.cleandoc(function.__doc__ or "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.function)

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """The facts to inject, in parameter order."""
        positional = (p for p in inspect.signature(self.function).parameters.values() if p.kind is not p.KEYWORD_ONLY)
        return tuple(self._need(p.name) for p in positional)

    def _need(self, parameter: str) -> Need:
        hint = self._hints.get(parameter)
        is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        members = typing.get_args(hint) if is_union else (hint,)
        kinds = [m for m in members if m is not Missing]
        if len(kinds) != 1 or not _is_fact(kinds[0]):
            got = "has no annotation" if hint is None else f"is annotated {getattr(hint, '__name__', hint)}"
            raise TypeError(
                f"{self.module}.{self.function.__name__}: parameter {parameter!r} {got}; expected one evidence or subject class, "
                "or `Class | Missing`. Options stand after `*`."
            )
        return Need(parameter=parameter, kind=kinds[0], optional=Missing in members)

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The keyword-only parameters; each needs a default."""
        found = []
        for p in inspect.signature(self.function).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                if p.default is p.empty:
                    raise TypeError(f"{self.module}.{self.function.__name__}: option {p.name!r} has no default")
                found.append(Option(name=p.name, type=self._hints.get(p.name, object), default=p.default))
        return tuple(found)


def _is_fact(kind: object) -> bool:
    """True for an evidence class, and for a subject class, which names its `kind`."""
    return isinstance(kind, type) and (issubclass(kind, Evidence) or isinstance(getattr(kind, "kind", None), str))


class Check(_Injected):
    """A registered check: see `check`."""

    def __init__(
        self,
        function: Callable[..., Answer],
        *,
        code: str,
        severity: Severity,
        basis: Basis,
        explains: tuple[str, ...] = (),
        explains_anywhere: tuple[str, ...] = (),
    ) -> None:
        super().__init__(function)
        if not CODE_PATTERN.fullmatch(code):
            raise TypeError(f"{self.module}: code {code!r} is not letters and three digits (such as ACME101)")
        if not self.doc:
            raise TypeError(f"{self.module}.{function.__name__} has no docstring: its first line names the flaw")
        self.code, self.severity, self.basis = code, severity, basis
        self.explains, self.explains_anywhere = explains, explains_anywhere

    def __call__(self, *args: Any, **kwargs: Any) -> Answer:
        """The function itself, for tests: facts in, answer out."""
        said: Answer = self.function(*args, **kwargs)
        return said

    @property
    def flaw(self) -> str:
        """The first line of the docstring: the flaw in one sentence."""
        return self.doc.partition("\n")[0]


class Instrument(_Injected):
    """A registered instrument: see `instrument`."""

    @cached_property
    def provides(self) -> type:
        """The class of the evidence it makes: its return annotation."""
        kind = self._hints.get("return")
        if not isinstance(kind, type):
            raise TypeError(f"{self.module}.{self.function.__name__}: return annotation {kind!r} is not an evidence class")
        return kind


def check(
    *,
    code: str,
    severity: Severity,
    basis: Basis,
    explains: Sequence[str] = (),
    explains_anywhere: Sequence[str] = (),
) -> Callable[[Callable[..., Answer]], Check]:
    """Make a check of a pure function.

    The function's name is the check's name (`near_zero_input_rows` → `near-zero-input-rows`) and names the flaw. `severity`
    and `basis` are the worst and the usual ones; a finding may carry its own. `explains` lists checks (names) whose findings
    at the same place are symptoms of this one, `explains_anywhere` those whose findings are, wherever they stand (labels that are
    not shifted make the target visible at every position, not only where the finding points).
    """

    def decorate(function: Callable[..., Answer]) -> Check:
        return Check(
            function,
            code=code,
            severity=severity,
            basis=basis,
            explains=tuple(explains),
            explains_anywhere=tuple(explains_anywhere),
        )

    return decorate


def instrument(function: Callable[..., Any]) -> Instrument:
    """Make an instrument of a function: facts and subjects in by annotation, one evidence out by return annotation.

    It raises `CannotLook` or `DoesNotApply` with a reason where it cannot measure. Several instruments may provide the same
    evidence from different subjects; the first that succeeds counts.
    """
    return Instrument(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPlugin:
    """A module under the entry point group that failed to load."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Everything found, ordered by code."""

    checks: tuple[Check, ...]
    instruments: tuple[Instrument, ...] = ()
    broken_plugins: tuple[BrokenPlugin, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def find(self, code_or_name: str) -> Check:
        """The check with this code or name (any case); `UsageError` suggests near ones."""
        wanted = code_or_name.strip()
        for c in self.checks:
            if wanted.upper() == c.code or wanted.lower().replace("_", "-") == c.name:
                return c
        raise UsageError(self._no_such_check(wanted))

    def select(self, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Check, ...]:
        """Checks whose code starts with, or whose name is, one of `select` (all when empty), less those of `ignore`."""
        for pattern in (*select, *ignore):
            if not any(_matches(c, pattern) for c in self.checks):
                raise UsageError(self._no_such_check(pattern))
        chosen = [c for c in self.checks if not select or any(_matches(c, p) for p in select)]
        return tuple(c for c in chosen if not any(_matches(c, p) for p in ignore))

    def _no_such_check(self, wanted: str) -> str:
        import difflib  # lazy: only on the error path

        known = [c.code for c in self.checks] + [c.name for c in self.checks]
        near = [m for spelling in (wanted.lower(), wanted.upper()) for m in difflib.get_close_matches(spelling, known, n=3)]
        hint = f"did you mean {', '.join(near[:3])}?" if near else "it is neither a code, a prefix of codes nor a name."
        broken = "".join(f" Plugin {p.name} failed to load: {p.reason}." for p in self.broken_plugins)
        return f"no check {wanted!r}: {hint} `ghoststep checks` lists them.{broken}"


def _matches(c: Check, pattern: str) -> bool:
    return c.code.startswith(pattern.upper()) or c.name == pattern.lower().replace("_", "-")


def walk(package_name: str) -> Iterator[types.ModuleType]:
    """Import a package and every module below it, in name order."""
    package = importlib.import_module(package_name)
    yield package
    for info in pkgutil.walk_packages(getattr(package, "__path__", []), package_name + "."):
        yield importlib.import_module(info.name)


def members(modules: Iterable[types.ModuleType], kind: type[Any]) -> list[Any]:
    """Every module-level object of this kind that was defined in the module that holds it."""
    return [m for module in modules for m in vars(module).values() if isinstance(m, kind) and m.module == module.__name__]


def load(*, with_instruments: bool = True, plugins: bool = True) -> Registry:
    """Find all checks (and, unless only texts are wanted, instruments).

    A plugin that fails to import, or whose check has an unusable signature or a code or name that is taken, is recorded, never
    raised: `broken-check` (GS901) reports it. Two built-in checks with one code or name raise `GhoststepError`.
    """
    checks = members(walk("ghoststep.checks"), Check)
    _refuse_duplicates(checks)
    instruments = members(walk("ghoststep.instruments"), Instrument) if with_instruments else []
    broken, versions = [], {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if plugins else ():
        try:
            modules = list(walk(entry.value))
            found = [c for c in members(modules, Check) if c not in checks]  # two entry points may lead into one package
            measuring = [i for i in members(modules, Instrument) if i not in instruments]
            for c in found:
                _ = c.needs, c.options  # a bad signature is the plugin's fault: show it now, by name
            for i in measuring:
                _ = i.needs, i.provides
            _refuse_duplicates([*checks, *found])
            checks += found
            instruments += measuring if with_instruments else []
            if entry.dist is not None:
                versions[entry.dist.name] = entry.dist.version
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a stranger's module may raise anything, SystemExit too
            broken.append(BrokenPlugin(name=entry.name, reason=f"{entry.value}: {type(error).__name__}: {error}"))
    checks.sort(key=lambda c: (not c.code.startswith("GS"), c.code))
    return Registry(checks=tuple(checks), instruments=tuple(instruments), broken_plugins=tuple(broken), versions=versions)


def _refuse_duplicates(checks: Sequence[Check]) -> None:
    seen: dict[str, Check] = {}
    for c in checks:
        for key in (c.code, c.name):
            if key in seen:
                raise GhoststepError(f"two checks are called {key}: {seen[key].module} and {c.module}; rename one of them")
            seen[key] = c
