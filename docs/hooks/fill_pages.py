"""Fills hand-written pages from the code, so that they never claim a check that is not there or call one planned that is.

`{name-of-a-check}` becomes a link to the check's page or, while there is no such check, its name and "planned".
`<!-- symptoms -->` becomes the table behind `ghoststep explain --symptom`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ghoststep.registry import load
from ghoststep.symptoms import SYMPTOMS

_NAME = re.compile(r"\{([a-z]+(?:-[a-z]+)+)\}")


@cache
def _codes() -> dict[str, str]:
    return {check.name: check.code for check in load(with_instruments=False, plugins=False).checks}


def _symptoms() -> str:
    parts = []
    for entry in SYMPTOMS:
        suspects = "\n".join(f"{i}. {{{name}}}" for i, name in enumerate(entry.suspects, start=1))
        title = entry.title[:1].upper() + entry.title[1:]
        parts.append(f"## {title}\n\n{entry.meaning}\n\n{suspects}\n\n```console\n$ {entry.command}\n```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, **context: Any) -> str:
    """The mkdocs event: the page's text with its places filled in."""
    folder = "" if context["page"].file.src_uri.startswith("checks/") else "checks/"

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        code = _codes().get(name)
        return f"[{code} {name}]({folder}{code}.md)" if code else f"`{name}` (planned)"

    return _NAME.sub(replace, markdown.replace("<!-- symptoms -->", _symptoms()))
