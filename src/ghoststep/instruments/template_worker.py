"""Renders chat templates in a process of its own: run as a script, JSON in on stdin, JSON out on stdout.

A template is a program by a stranger. Jinja's sandbox keeps it from Python's internals, but not from endless loops or from
building a string of many gigabytes, and a thread cannot be stopped; a process with limits can.
Input `{"template": str, "jobs": [variables, ...], "max_chars": int, "path": sys.path}`; output a list with one object a job,
`{"text": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

CPU_SECONDS = 10
MEMORY_BYTES = 512 * 2**20
FIXED_DATE = (2025, 1, 15, 12, 0, 0)
"""What `strftime_now` says: a fixed date, so that one checkpoint always gives one report."""


def limit_process() -> None:
    """Cap memory and processor time where the platform can."""
    try:
        import resource
    except ImportError:  # not on Windows: the caller's timeout remains
        return
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, CPU_SECONDS)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the platform has none of this kind
            resource.setrlimit(kind, (limit, limit))


def environment() -> Any:
    """A sandbox with what chat templates may rely on: trimmed blocks, break and continue, `{% generation %}`, `tojson`, ..."""
    import datetime

    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks answers for a loss mask; the text is what stands inside."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime(*FIXED_DATE).strftime(form)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def render(template: Any, variables: dict[str, Any], max_chars: int) -> str:
    """The text of one conversation; `ValueError` past `max_chars`."""
    parts = []
    length = 0
    for part in template.generate(**variables):
        length += len(part)
        if length > max_chars:
            raise ValueError(f"more than {max_chars} characters for one conversation")
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any]) -> list[dict[str, str]]:
    """Every job rendered; a job that raises gives its error instead."""
    try:
        template = environment().from_string(request["template"])
    except Exception as error:
        return [{"error": f"the template does not compile: {_short(error)}"} for _ in request["jobs"]]
    answers = []
    for job in request["jobs"]:
        try:
            answers.append({"text": render(template, job, int(request["max_chars"]))})
        except Exception as error:
            answers.append({"error": _short(error)})
    return answers


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main() -> None:
    """Answer the one request on stdin."""
    limit_process()
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    json.dump(answer(request), sys.stdout)


if __name__ == "__main__":
    main()
