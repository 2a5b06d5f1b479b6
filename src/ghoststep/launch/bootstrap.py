"""What runs in every Python process under `ghoststep run`, before its script: wait for torch, and be there at the end.

Imports nothing heavy: a data loader's worker or a tokenizer's helper must not notice.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

PLAN = "GHOSTSTEP_RUN"
REPORTER = "GHOSTSTEP_RUN_REPORTER"
"""Environment: the plan as JSON, and the id of the process that tells at the end what was found."""

_installed = False


def install() -> None:
    """Act on the plan in the environment, once a process; without a plan nothing happens."""
    global _installed  # noqa: PLW0603 - one process, one bootstrap
    if _installed or not os.environ.get(PLAN):
        return
    _installed = True
    if os.environ.get(REPORTER) == str(os.getpid()):
        atexit.register(_report)  # registered first, so it runs last: after whatever the script registers
    if "torch" in sys.modules:
        _torch_is_here()
    else:
        sys.meta_path.insert(0, _TorchFinder())


def _report() -> None:
    try:
        from ghoststep.launch import session

        session.report_at_exit()
    except Exception as error:
        _say(f"the report failed: {type(error).__name__}: {error}")


def _torch_is_here() -> None:
    try:
        from ghoststep.launch import discover

        discover.install()
    except Exception as error:
        _say(f"the script runs unwatched: {type(error).__name__}: {error}")


def _say(text: str) -> None:
    try:
        stream = sys.__stderr__
        if stream is not None:
            stream.write(f"ghoststep run: {text}\n")
            stream.flush()
    except Exception:  # stderr is gone; there is nowhere left to say it
        return


class _TorchFinder:
    """First on `sys.meta_path` until torch was imported: lets the real finders find it, and acts when its code has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                # Many libraries only look whether torch is there: nothing happens until the module is executed.
                self._follow(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None

    def _follow(self, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _torch_is_here()

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader with slots or of C: not how torch is installed
            _say("torch is loaded in a way that cannot be followed; the script runs unwatched")
