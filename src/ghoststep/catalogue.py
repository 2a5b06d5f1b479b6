"""The page of one built-in check, read from its source file without importing anything of it.

`explain` must start at once: importing every check means building every evidence class, which takes longer than the rest of
the command together. The registry stays the truth for everything that runs.
"""

from __future__ import annotations

import ast
import inspect
import os
from typing import NamedTuple


class CheckPage(NamedTuple):
    """What `explain` shows: plain strings, as `registry.Check` has them."""

    code: str
    name: str
    severity: str
    basis: str
    doc: str


def find_page(code_or_name: str) -> CheckPage | None:
    """The page of the built-in check with this code or name (any case), or None (a plugin's check, or no check at all)."""
    wanted = code_or_name.strip()
    name, code = wanted.lower().replace("-", "_"), wanted.upper()
    for folder, _, files in os.walk(os.path.join(os.path.dirname(__file__), "checks")):
        for file in files:
            if not file.endswith(".py"):
                continue
            with open(os.path.join(folder, file), encoding="utf-8") as source:
                text = source.read()
            if file[:-3] == name or f'code="{code}"' in text:
                return _read(text)
    return None


def _read(text: str) -> CheckPage | None:
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "check":
                given = {k.arg: k.value for k in decorator.keywords}
                return CheckPage(
                    code=ast.literal_eval(given["code"]),
                    name=node.name.replace("_", "-"),
                    severity=_enum_value(given["severity"]),
                    basis=_enum_value(given["basis"]),
                    doc=inspect.cleandoc(ast.get_docstring(node, clean=False) or ""),
                )
    return None


def _enum_value(node: ast.expr) -> str:
    """`Basis.RULE_OF_THUMB` → "rule-of-thumb", as the enums of `finding` spell their values."""
    assert isinstance(node, ast.Attribute)
    return node.attr.lower().replace("_", "-")
