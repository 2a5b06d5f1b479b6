"""Batches that are left out when they come again, known by their content."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("ghoststep.watch")

FILE = "quarantine.jsonl"
MAX_BYTES = 8 << 20
"""Of the list that a resumed run reads back."""


def fingerprint(batch: Any) -> str:
    """sha256 of everything in a batch: names, dtypes, shapes and values of tensors, and other values as they print.

    A tensor on an accelerator is copied to the host. Two batches with the same tensors under the same names are the same batch.
    """
    digest = hashlib.sha256()
    _feed(digest, batch, 0)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, depth: int) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu")
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        digest.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    elif isinstance(value, Mapping) and depth < 8:
        for key in value:
            digest.update(f"{key!r}: ".encode())
            _feed(digest, value[key], depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 8:
        digest.update(f"{len(value)} values ".encode())
        for one in value:
            _feed(digest, one, depth + 1)
    else:
        digest.update(repr(value).encode("utf-8", "backslashreplace"))


class Quarantine:
    """The fingerprints of guilty batches, listed in `folder/quarantine.jsonl`, which a resumed run reads back."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.known: set[str] = set()
        try:
            if self.path.is_file() and self.path.stat().st_size <= MAX_BYTES:
                self.known = {h for line in self.path.read_text("utf-8", "replace").splitlines() if (h := _hash(line))}
        except OSError as error:
            logger.warning("the list of batches in quarantine cannot be read: %s", error.strerror)

    def __contains__(self, batch: object) -> bool:
        """True if this batch is to be left out. Costs nothing while no batch is in quarantine."""
        return bool(self.known) and fingerprint(batch) in self.known

    def add(self, batch: Any, about: Mapping[str, Any]) -> str:
        """Leave this batch out from now on; its fingerprint. A disk that refuses the list is told, and the batch left out anyway."""
        found = fingerprint(batch)
        self.known.add(found)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"sha256": found, **about}) + "\n")
        except OSError as error:
            logger.warning("the list of batches in quarantine cannot be written: %s", error.strerror)
        return found


def _hash(line: str) -> str:
    try:
        found = json.loads(line).get("sha256")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) and len(found) == 64 else ""
