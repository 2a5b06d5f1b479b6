"""The page of a check in the terminal."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable

from ghoststep.catalogue import CheckPage
from ghoststep.report.explain import HEADINGS, render_explain

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def some_flaw() -> None:
    """The tables of two files differ, in a sentence that is long enough to be wrapped at forty columns.

    ## What it finds
    `a.weight` ≠ `b.weight`, shape [table rows, dims]:

    - the first item, which is long enough to be wrapped into a second line of text;
    - the second item.

    ## How to confirm by hand
    ```python
    for name, tensor in load_file("a-long-enough-name.safetensors").items(): print(name, tensor.shape, tensor.norm())
    ```

    ## Options
    `multiple`: 64 by default.
    `fraction`: 0.05 by default.

    ## References
    1. A token \x1b[31m is not a colour.
    """


def page_of(function: Callable[[], None]) -> CheckPage:
    name, doc = function.__name__.replace("_", "-"), inspect.cleandoc(function.__doc__ or "")
    return CheckPage(code="GS999", name=name, severity="error", basis="rule-of-thumb", doc=doc)


def page(*, color: bool = False, width: int = 80) -> str:
    return render_explain(page_of(some_flaw), color=color, width=width)


def test_the_page_at_80_columns() -> None:
    assert page().splitlines() == [
        "GS999 some-flaw · error · rule of thumb",
        "",
        "  The tables of two files differ, in a sentence that is long enough to be",
        "  wrapped at forty columns.",
        "",
        "What it finds",
        "  `a.weight` ≠ `b.weight`, shape [table rows, dims]:",
        "",
        "  - the first item, which is long enough to be wrapped into a second line of",
        "    text;",
        "  - the second item.",
        "",
        "How to confirm by hand",
        '    for name, tensor in load_file("a-long-enough-name.safetensors").items(): print(name, tensor.shape, tensor.norm())',
        "",
        "Options",
        "  `multiple`: 64 by default.",
        "  `fraction`: 0.05 by default.",
        "",
        "References",
        r"  1. A token \x1b[31m is not a colour.",
    ]


def test_prose_keeps_to_the_width_and_code_keeps_its_lines() -> None:
    for width in (40, 60, 100):
        long = [line for line in page(width=width).splitlines() if len(line) > width]
        assert len(long) == 1
        assert "load_file" in long[0]


def test_colour_adds_only_colour() -> None:
    colored = ANSI.sub("", page(color=True))
    assert colored == page().replace("`", "")
    assert "\x1b[36mmultiple\x1b[0m" in page(color=True)
    assert "\x1b" not in page()


def test_a_span_that_wraps_ends_its_colour_on_each_line() -> None:
    def wraps() -> None:
        """Use `one two three four five six seven eight nine ten` to see it."""

    check = page_of(wraps)
    for line in render_explain(check, color=True, width=40).splitlines():
        assert line.count("\x1b[36m") + line.count("\x1b[1m") + line.count("\x1b[1;31m") == line.count("\x1b[0m")


def test_a_check_without_a_docstring_has_a_page() -> None:
    def bare() -> None:
        pass

    check = page_of(bare)
    assert render_explain(check) == "GS999 bare · error · rule of thumb\n"


def test_an_unclosed_fence_is_printed() -> None:
    def unclosed() -> None:
        """A flaw.

        ```
        code
        """

    check = page_of(unclosed)
    assert render_explain(check).endswith("  A flaw.\n\n    code\n")


def test_our_checks_use_the_fixed_headings() -> None:
    from ghoststep.registry import load

    for check in load(with_instruments=False, plugins=False).checks:
        used = re.findall(r"^## (.+)$", check.doc, re.MULTILINE)
        assert used == [h for h in HEADINGS if h in used], check.code
        shown = CheckPage(check.code, check.name, check.severity.value, check.basis.value, check.doc)
        assert check.flaw in render_explain(shown, width=100).replace("\n  ", " ")


def test_reports_and_pages_import_nothing_heavy() -> None:
    code = (
        "import sys; import ghoststep.report.explain, ghoststep.report, ghoststep.text\n"
        "print([m for m in ('rich.console', 'rich.markdown', 'msgspec', 'torch', 'numpy', 'jinja2') if m in sys.modules])\n"
        "from ghoststep.report import terminal, concise, json_format, sarif, junit, github, markdown, html\n"
        "print([m for m in ('rich.markdown', 'torch', 'numpy', 'transformers', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
