"""Fails when a function of src/ is longer than 60 lines or a file longer than 300, unless it is listed here with a reason.

The docstring of a function is not counted: that of a check is its page.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 300
SOURCE = Path(__file__).resolve().parent.parent / "src"

# "ghoststep/file.py" or "ghoststep/file.py:function" → why it may be longer.
ALLOWED: dict[str, str] = {}


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the docstring, 0 without one."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def too_long(path: Path) -> Iterator[tuple[str, str]]:
    """(key, complaint) for the file itself and each of its functions."""
    key = path.relative_to(SOURCE).as_posix()
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield key, f"{key}: {num_lines} lines, at most {MAX_FILE_LINES}: split it by topic"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            if length > MAX_FUNCTION_LINES:
                yield f"{key}:{node.name}", f"{key}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    """Print the complaints; 1 if there is one, or if an exception in ALLOWED is no longer needed."""
    long = dict(pair for path in sorted(SOURCE.rglob("*.py")) for pair in too_long(path))
    complaints = [text for key, text in long.items() if key not in ALLOWED]
    complaints += [f"{key}: listed in ALLOWED but short enough now: take it out" for key in ALLOWED if key not in long]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
