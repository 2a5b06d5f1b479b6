"""Fails when a file that git would carry holds an absolute path of somebody's machine or the host of a package registry.

Such strings work on one machine only. The patterns are put together from pieces, so that this file does not match itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FOLDERS = "|".join(
    ("ro" + "ot", "wo" + "rk", "ho" + r"me/[a-z][\w.-]*", "Us" + r"ers/[A-Za-z][\w.-]*", "t" + "mp/[a-z]", "o" + "pt")
)
MACHINE_PATH = re.compile(rf"""(?:^|[\s"'`(=:,])(/(?:{_FOLDERS})(?:/|\b))""")
_HOSTS = (
    ("pypi", "org"),
    ("python" + "hosted", "org"),
    ("npmjs", "org"),
    ("npmjs", "com"),
    ("deb." + "debian", "org"),
    ("download.pytorch", "org"),
)
REGISTRY_HOST = re.compile("|".join(rf"\b(?:[\w-]+\.)*{re.escape(name)}\.{top}\b" for name, top in _HOSTS), re.IGNORECASE)

MAX_BYTES = 5_000_000


def carried_files() -> list[Path]:
    """Tracked files and new ones that are not ignored; outside a git clone, every file of the source folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        names = [name for name in done.stdout.decode().split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    folders = [ROOT / name for name in ("src", "tests", "docs", "scripts", "demo", "benchmarks")]
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def complaints(path: Path) -> list[str]:
    """One line a match; binary and very large files are passed over."""
    if path.stat().st_size > MAX_BYTES:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        for pattern, what in ((MACHINE_PATH, "a machine's own path"), (REGISTRY_HOST, "a package registry's host")):
            match = pattern.search(line)
            if match:
                found.append(f"{path.relative_to(ROOT)}:{number}: {what}: {match.group().strip()}")
    return found


def main() -> int:
    """Print the complaints; 1 if there is one."""
    found = [line for path in carried_files() for line in complaints(path)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
