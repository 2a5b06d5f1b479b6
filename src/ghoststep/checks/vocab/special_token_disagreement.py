"""GS005."""

from collections.abc import Iterable
from dataclasses import replace

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared, Tables
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.finding import Basis, Finding, Power, Quantity, Severity, Where
from ghoststep.registry import Answer, NotApplicable, answer, check

_ROLES = ("bos", "eos", "pad")


@check(code="GS005", severity=Severity.ERROR, basis=Basis.PROOF)
def special_token_disagreement(
    declared: Declared, tables: Tables | Missing, vocabulary: Vocabulary | Missing, tie: TieState | Missing
) -> Answer:
    """Config, generation config and tokenizer name different special tokens, or ids that cannot exist.

    ## What it finds
    - A bos, eos or pad id of the config or the generation config outside the input table (error).
    - A stop token of the tokenizer that generation does not stop at: the eos ids in force (generation config, else config) and
      the tokenizer's eos have nothing in common (warning).
    - bos or pad ids of config and tokenizer that differ (note).
    In a model without an output head everything is a note: it does not generate.

    ## Why it matters
    Generation waits for an id that is never trained or does not exist, and never stops. A bos id outside the table fails at
    the first generated text. Trainers pad with one id and mask another.

    ## When it is not a problem
    Several stop ids, as long as the tokenizer's own is among them; PAD = EOS as such; a role that only one side names.

    ## How to confirm by hand
    Compare `config.eos_token_id`, `generation_config.eos_token_id` and `tok.eos_token_id`.

    ## How to fix
    `model.config.eos_token_id = model.generation_config.eos_token_id = tok.eos_token_id` (a list may hold several), and save.

    ## Options
    None.

    ## References
    A published antibody model has a config with ids 50256 and a table of 33 rows.
    """
    in_config = {"bos": declared.bos_token_ids, "eos": declared.eos_token_ids, "pad": declared.pad_token_ids}
    named = [ids for ids in (*in_config.values(), *declared.generation.values()) if ids]
    if not named and isinstance(vocabulary, Missing):
        return NotApplicable(reason="neither config nor generation config names a special token, and there is no tokenizer")
    if not named:
        return NotApplicable(reason="neither config nor generation config names a special token")
    findings = []
    if not isinstance(tables, Missing) and not tables.input.unmeasured:
        findings += _impossible(declared, in_config, tables.input.num_rows)
    out_of_range = {
        role
        for role, ids in in_config.items()
        if not isinstance(tables, Missing) and any(not 0 <= i < tables.input.num_rows for i in ids)
    }
    if not isinstance(vocabulary, Missing):
        findings += _stop_token(declared, vocabulary) if "eos" not in out_of_range else []
        findings += [
            _differ(declared, role, in_config[role], vocabulary)
            for role in ("bos", "pad")
            if role not in out_of_range and _contradict(in_config[role], vocabulary.special_ids.get(role))
        ]
    if isinstance(tie, TieState) and tie.tie is Tie.NO_HEAD:  # it never generates: nothing waits for a stop token
        findings = [replace(f, severity=Severity.NOTE) for f in findings]
    if isinstance(tables, Tables) and tables.input.unmeasured:
        tables = Missing(reason=tables.input.unmeasured)
    missing = [m.reason for m in (tables, vocabulary) if isinstance(m, Missing)]
    power = Power(quantity="special ids that disagree", smallest_detectable=1, unit="ids")
    return answer(findings, power=power, undecided="; ".join(missing) or None)


def _impossible(declared: Declared, in_config: dict[str, tuple[int, ...]], num_rows: int) -> list[Finding]:
    """One finding an impossible id, however many roles name it."""
    places: dict[int, list[str]] = {}
    for role in _ROLES:
        sources = (("config", in_config[role]), ("generation config", declared.generation.get(role, ())))
        for source, ids in sources:
            for i in ids:
                if not 0 <= i < num_rows:
                    places.setdefault(i, []).append(f"{role}_token_id of the {source}")
    return [
        Finding(
            message=f"{_join(where)} is {i}, but the table has {num_rows} rows, so that no such token exists: generation cannot "
            "start from it or waits for it for ever. Set it to the tokenizer's id.",
            where=Where(file=declared.file, token_id=i),
            measured=Quantity(value=i, unit="token id"),
            expected=Quantity(value=num_rows - 1, unit="largest table row"),
            remedy="set bos/eos/pad_token_id in config.json and generation_config.json to the tokenizer's ids",
        )
        for i, where in places.items()
    ]


def _stop_token(declared: Declared, vocabulary: Vocabulary) -> list[Finding]:
    own = vocabulary.special_ids.get("eos")
    in_force = declared.generation.get("eos") or declared.eos_token_ids
    if own is None or not in_force or own in in_force:
        return []
    source = "generation config" if declared.generation.get("eos") else "config"
    return [
        Finding(
            message=f"the tokenizer's stop token is id {own}, but the {source} stops at {_ids(in_force)}: what is trained as the end "
            "of an answer does not end a generation. Add it to eos_token_id.",
            where=Where(file=declared.file, token_id=own, key="eos_token_id"),
            measured=Quantity(value=_ids(in_force), unit="eos_token_id"),
            expected=Quantity(value=own, unit="eos_token_id"),
            severity=Severity.WARNING,
            remedy=f"add {own} to eos_token_id of the generation config",
        )
    ]


def _contradict(ids: tuple[int, ...], own: int | None) -> bool:
    return bool(ids) and own is not None and own not in ids


def _differ(declared: Declared, role: str, ids: tuple[int, ...], vocabulary: Vocabulary) -> Finding:
    own = vocabulary.special_ids[role]
    return Finding(
        message=f"{role}_token_id is {_ids(ids)} in the config and {own} in the tokenizer: code that asks the one contradicts code "
        "that asks the other. Set both to the same id.",
        where=Where(file=declared.file, token_id=own, key=f"{role}_token_id"),
        measured=Quantity(value=_ids(ids), unit=f"{role}_token_id"),
        expected=Quantity(value=own, unit=f"{role}_token_id"),
        severity=Severity.NOTE,
    )


def _ids(ids: Iterable[int]) -> str:
    return ", ".join(str(i) for i in ids)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
