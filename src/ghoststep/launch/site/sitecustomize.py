"""On PYTHONPATH under `ghoststep run`, so that Python imports it before any script; then the user's own `sitecustomize` runs.

Other Python 3 interpreters than ours may read this: old syntax, no import that can fail.
"""

import os
import sys


def _bootstrap() -> None:
    try:
        from ghoststep.launch import bootstrap
    except ImportError:
        # ghoststep was not installed but on the path of the command; for the same interpreter that path is good here too.
        home, python = os.environ.get("GHOSTSTEP_RUN_HOME", ""), os.environ.get("GHOSTSTEP_RUN_PYTHON", "")
        if not home or python != sys.executable:
            return
        sys.path.append(home)
        try:
            from ghoststep.launch import bootstrap
        except ImportError:
            sys.path.remove(home)
            return
    bootstrap.install()


def _go_on_to_the_users() -> None:
    ours = sys.modules.pop("sitecustomize", None)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
    sys.path_importer_cache.pop(here, None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


try:
    _bootstrap()
except Exception as error:
    sys.stderr.write("ghoststep run: not started in this process: %s: %s\n" % (type(error).__name__, error))  # noqa: UP031
_go_on_to_the_users()
