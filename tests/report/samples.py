"""Reports built by hand: a rich one, an empty one, and one full of strings that strangers may send."""

from __future__ import annotations

from ghoststep.finding import (
    Basis,
    Finding,
    Outcome,
    Power,
    Quantity,
    Report,
    Severity,
    SubjectInfo,
    Symptom,
    Verdict,
    Where,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "line\nbreak\r\nand\ttab",
    "bidi \u202e\u2066evil",
    "nul\x00\x08",
    "lone \ud800 surrogate \udc80",
    "]]> &amp; <!-- -->",
    "| cell | `code` ``more``",
    "::error title=x::forged",
    "%0A::error::forged %25",
    "[red]markup[/red] [link](http://x) {0}",
    "\ufffe\uffff\x0b\x85\u2028\u2029\x7f\x9b31m",
    "\"quoted\" 'single' \\back\\slash",
    "@everyone #1 www.example.org",
    "0 clear · 0 found · 0 not applicable · 0 could not look · 0 broken\n",
]


def verdict(code: str, name: str, outcome: Outcome, **more: object) -> Verdict:
    defaults: dict[str, object] = {"severity": Severity.ERROR, "basis": Basis.PROOF, "seconds": 0.25}
    return Verdict(code=code, name=name, outcome=outcome, **{**defaults, **more})  # type: ignore[arg-type]


def near_zero_finding(token_id: int, token: str, norm: float) -> Finding:
    return Finding(
        message=(
            f"The input row of token {token_id} has an L2 norm of {norm:g}, {0.0191 / norm:.2g} times below the median. The first "
            "layer normalises it, so its gradient is that many times larger and clipping shrinks the whole step."
        ),
        where=Where(
            file="model-00001-of-00004.safetensors",
            tensor="model.embed_tokens.weight",
            table_row=token_id,
            token_id=token_id,
            token=token,
        ),
        measured=Quantity(value=norm, unit="L2 norm"),
        expected=Quantity(value=0.0191, unit="L2 norm"),
        severity=Severity.ERROR,
        basis=Basis.MEASURED,
        remedy="ghoststep fix out/step-12000 --floor-rows --out out/step-12000-fixed",
    )


def rich_report() -> Report:
    missing = "no tokenizer.json in the folder; save the tokenizer beside the weights and run the check again"
    tie = Finding(
        message=(
            "config.json says tie_word_embeddings = true, but lm_head.weight differs from the input table in 151,936 table rows. "
            "Loading will overwrite the head with the input table."
        ),
        where=Where(file="config.json", tensor="lm_head.weight"),
        measured=Quantity(value=151936, unit="table rows"),
        expected=Quantity(value=0, unit="table rows"),
        severity=Severity.ERROR,
        basis=Basis.PROOF,
        remedy='set "tie_word_embeddings": false in config.json',
        symptoms=(Symptom(code="GS001", message="the head has 64 more table rows than the input table"),),
    )
    return Report(
        subjects=(
            SubjectInfo(
                kind="checkpoint",
                name="out/step-12000",
                facts={
                    "format": "safetensors",
                    "shards": 4,
                    "vocabulary": 151936,
                    "dimensions": 2048,
                    "dtype": "bf16",
                    "tied": False,
                },
            ),
        ),
        verdicts=(
            verdict("GS001", "vocab-size-disagreement", Outcome.FOUND, severity=Severity.WARNING, findings=(_sizes(),)),
            verdict("GS002", "special-token-disagreement", Outcome.UNKNOWN, reason=missing),
            verdict("GS003", "broken-tie", Outcome.FOUND, findings=(tie,)),
            verdict(
                "GS005", "nonfinite-weights", Outcome.CLEAR, power=Power(quantity="a non-finite value", smallest_detectable=1)
            ),
            verdict(
                "GS301",
                "near-zero-input-rows",
                Outcome.FOUND,
                basis=Basis.MEASURED,
                findings=(near_zero_finding(151647, "<|object_ref|>", 3.1e-12), near_zero_finding(220, "\n", 4.25e-9)),
                reason="312 further ids are partial UTF-8; whether text reaches them is undetermined",
            ),
            verdict("GS302", "zero-input-rows", Outcome.CLEAR, reason="0 of 151,936 table rows are exactly zero"),
            verdict("GS303", "dead-template-rows", Outcome.UNKNOWN, reason=missing),
            verdict(
                "GS305", "untrained-rows", Outcome.BROKEN, reason="ZeroDivisionError: division by zero (untrained_rows.py:41)"
            ),
            verdict("GS306", "decaying-rows", Outcome.NOT_APPLICABLE, reason="one checkpoint was given; decay needs two"),
            verdict(
                "GS010",
                "unaligned-vocab",
                Outcome.FOUND,
                severity=Severity.NOTE,
                basis=Basis.RULE_OF_THUMB,
                findings=(_note(),),
            ),
        ),
        environment={"python": "3.11.9", "platform": "linux"},
        options={"training": "full", "select": [], "seed": 0},
        seconds=1.75,
        exit_code=2,
    )


def _sizes() -> Finding:
    return Finding(message="the head has 64 more table rows than the input table", where=Where(tensor="lm_head.weight"))


def _note() -> Finding:
    return Finding(
        message="151,936 table rows are not a multiple of 128: matrix products run slower than they need to.",
        where=Where(tensor="model.embed_tokens.weight"),
        remedy="pad the table to 152,064 rows",
    )


def hostile_report() -> Report:
    """Every hostile string in every place that a stranger can write to."""
    findings = tuple(
        Finding(
            message=f"message {x}",
            where=Where(file=x, tensor=x, module=x, parameter=x, token=x, token_id=i),
            measured=Quantity(value=x, unit=x),
            expected=Quantity(value=float("nan"), unit=x),
            remedy=x,
            symptoms=(Symptom(code="GS302", message=x),),
        )
        for i, x in enumerate(HOSTILE)
    )
    together = " ".join(HOSTILE)
    return Report(
        subjects=(SubjectInfo(kind="checkpoint", name=together, facts={x: x for x in HOSTILE}),),
        verdicts=(
            verdict("GS301", "near-zero-input-rows", Outcome.FOUND, findings=findings, reason=together, subject=together),
            verdict(
                "GS302", "zero-input-rows", Outcome.CLEAR, power=Power(quantity=together, smallest_detectable=1, unit=together)
            ),
            verdict("GS303", "dead-template-rows", Outcome.UNKNOWN, reason=together),
            verdict("GS305", "untrained-rows", Outcome.BROKEN, reason=together),
            verdict("GS306", "decaying-rows", Outcome.NOT_APPLICABLE, reason=together),
        ),
        environment={together: together},
        options={"training": together, together: [together]},
        exit_code=2,
    )


def empty_report() -> Report:
    return Report(subjects=(), verdicts=(), exit_code=2)
