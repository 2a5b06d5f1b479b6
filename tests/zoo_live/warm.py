"""Imports once, before processes are forked, what every one of them needs."""

from __future__ import annotations

import importlib
import pkgutil

NEEDED = (
    "torch._dynamo", "transformers.models.auto.modeling_auto", "transformers.tokenization_utils_tokenizers",
    "tests.zoo_live.overrides", "tests.zoo_live.plants", "tests.zoo_live.setups", "tests.zoo_live.tiny",
)  # fmt: skip


def warm_up() -> None:
    """Import torch, transformers and all of ghoststep; run no model."""
    for name in NEEDED:
        importlib.import_module(name)
    import ghoststep
    from ghoststep.registry import load
    from tests.zoo_live.judge import quiet

    for module in pkgutil.walk_packages(ghoststep.__path__, "ghoststep."):
        if "pytest_plugin" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    load()
    quiet()
