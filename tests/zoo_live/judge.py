"""One class through the whole of `ghoststep.check`: the right setup in both modes, then with each plant."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One verdict that is not clear or not applicable. `outcome`: error, warning, note, unknown or broken."""

    code: str
    outcome: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was said about one class. `failure` says why it could not be built or run; `modes` maps eval and train to what was said,
    `plants` a plant's name to "first", "later", "missed: ..." or "no place: ...". `num_clear` is the smaller count of both modes."""

    name: str
    family: str
    kind: str = ""
    failure: str = ""
    modes: dict[str, tuple[Said, ...]] = field(default_factory=dict)
    plants: dict[str, str] = field(default_factory=dict)
    num_clear: int = 0
    seconds: float = 0.0


def quiet() -> None:
    """No warnings or progress of the libraries; one thread."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    verbosity: Any = transformers.utils.logging
    verbosity.set_verbosity_error()
    torch.set_num_threads(1)


def fresh(name: str, family: str, *, train: bool, pads: bool | None = None) -> dict[str, Any]:
    """The right setup around a newly built model."""
    from tests.zoo_live.setups import setup
    from tests.zoo_live.tiny import build

    return setup(build(name, family).train(train), family, name, pads=pads)


def ask(given: dict[str, Any]) -> tuple[tuple[Said, ...], int, tuple[str, ...]]:
    """What the check says, how many verdicts are clear, and the codes of the errors in reading order."""
    import ghoststep

    report = ghoststep.check(**given)
    said = []
    for verdict in report.verdicts:
        outcome = verdict.outcome.value
        if outcome == "found":  # a symptom attached to its cause has no findings of its own
            said += [Said(code=verdict.code, outcome=verdict.severity.value, text=f.message) for f in verdict.findings[:1]]
        elif outcome in ("unknown", "broken"):
            said.append(Said(code=verdict.code, outcome=outcome, text=verdict.reason or ""))
    errors = tuple(v.code for v, f in report.findings if (f.severity or v.severity).value == "error")
    return tuple(said), sum(v.outcome.value == "clear" for v in report.verdicts), errors


def power(name: str, family: str, kind: str, *, every: bool = False) -> dict[str, str]:
    """The first plant of the kind that has a place (or `every` one): found first, later, missed, or no place for it."""
    from tests.zoo_live.overrides import NO_PADS
    from tests.zoo_live.plants import NoPlaceError, plants_of

    found: dict[str, str] = {}
    for plant in plants_of(kind):
        if not every and any(not p.startswith("no place") for p in found.values()):
            break  # one that has a place is enough
        given = fresh(name, family, train=True)
        try:
            with plant.put(given):
                found[plant.name] = verdict_on(plant.codes, given)
        except NoPlaceError as reason:
            found[plant.name] = f"no place: {reason}"
    if name in NO_PADS:
        found["pads"] = verdict_on(("GS102",), fresh(name, family, train=True, pads=True))
    return found


def verdict_on(codes: tuple[str, ...], given: dict[str, Any]) -> str:
    """ "first", "later: ..." or "missed: ..."."""
    said, _, errors = ask(given)
    if errors and errors[0] in codes:
        return "first"
    if set(errors) & set(codes):
        return f"later: behind {errors[0]}"
    told = [f"{s.code} {s.outcome}: {s.text}" for s in said if s.code in codes or s.outcome in ("error", "warning", "broken")]
    return "missed: " + ("; ".join(told)[:300] or "nothing was said")


def judge_quietly(name: str, family: str) -> Seen:
    """`judge` in a process of its own."""
    quiet()
    return judge(name, family)


def judge(name: str, family: str, *, every: bool = False) -> Seen:
    """Everything about one class; never raises for what the class does. `every` plant, or the first that has a place."""
    from tests.zoo_live.setups import kind_of

    started = time.perf_counter()
    try:
        given = fresh(name, family, train=True)
    except Exception as error:
        return Seen(name=name, family=family, failure=f"not built: {told(error)}")
    kind = kind_of(given["model"], family)
    try:
        given["loss_fn"](given["model"], given["batches"][0]).backward()
    except Exception as error:
        return Seen(name=name, family=family, kind=kind, failure=f"not run: {told(error)}")
    modes, clear = {}, []
    for mode in ("eval", "train"):
        try:
            said, num_clear, _ = ask(fresh(name, family, train=mode == "train"))
        except Exception as error:
            said, num_clear = (Said(code="raised", outcome="broken", text=told(error)),), 0
        modes[mode] = said
        clear.append(num_clear)
    try:
        plants = power(name, family, kind, every=every)
    except Exception as error:
        plants = {"all": f"raised: {told(error)}"}
    return Seen(
        name=name, family=family, kind=kind, modes=modes, plants=plants, num_clear=min(clear), seconds=time.perf_counter() - started
    )  # fmt: skip


def told(error: BaseException) -> str:
    """The exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
