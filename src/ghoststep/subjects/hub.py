"""A model on the Hugging Face Hub as a `Source`: only the bytes that are asked for travel.

The revision is resolved to a commit once; every later read names that commit, so a branch that moves cannot mix two
revisions. Offline, the local cache of `huggingface_hub` is read instead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from ghoststep.errors import CannotLook, SubjectError, UnsafeInput
from ghoststep.subjects.base import Source
from ghoststep.subjects.http_answers import HttpRefused
from ghoststep.subjects.http_connection import HttpLimits
from ghoststep.subjects.http_ranges import RangeClient
from ghoststep.subjects.hub_listing import Listing, RepoSpec, explain_refusal, list_files
from ghoststep.subjects.local import LocalSource

_PROBE_BYTES = 1 << 20
_TRUE = ("1", "ON", "YES", "TRUE")


class HubSource:
    """`org/name[@rev]` read over HTTP ranges, or from the local cache when offline.

    `spec`: `org/name`, `org/name@branch`, `org/name@tag`, `org/name@sha`. `offline`: never touch the network; also switched on
    by HF_HUB_OFFLINE. The environment is read now, not at import: HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HOME, proxies.

    Public: `name` ("org/name@sha7", and what was asked for when that differs), `sha` (the full commit), `asked` (the spec),
    `is_offline`, `bytes_received` (bodies of all answers), `num_requests`, `waited_seconds`; the last three are 0 offline.

    Cost of opening: 2 requests and config.json (which also proves that the files may be read: a gated model shows its file
    list to everybody). Afterwards each read is one request for every 8 MiB, three at a time. Threads may read at once.
    Errors: `SubjectError` at opening (not found, gated or private, not reachable, nothing in the cache), `UnsafeInput` (a
    file list that lies), `CannotLook` at reading.
    """

    def __init__(self, spec: str, *, offline: bool = False, limits: HttpLimits | None = None) -> None:
        self.asked = spec
        self._spec = RepoSpec.parse(spec)
        self._limits = limits or HttpLimits()
        self.is_offline = offline or offline_by_environment()
        self.is_remote = not self.is_offline
        self._client: RangeClient | None = None
        self._place: Source
        if self.is_offline:
            self.sha, folder = _cached_snapshot(self._spec)
            self.name = _name(self._spec, self.sha)
            self._place = LocalSource(folder, name=self.name)
        else:
            endpoint = hub_endpoint()
            self._client = RangeClient(endpoint, token=hub_token(), user_agent=hub_user_agent(), limits=self._limits)
            listing = list_files(self._client, endpoint, self._spec)
            self.sha = listing.sha
            self.name = _name(self._spec, self.sha)
            self._place = _Remote(self._client, endpoint, self._spec, listing, name=self.name)

    @property
    def bytes_received(self) -> int:
        """Body bytes of all answers so far: files, file list, redirects."""
        return 0 if self._client is None else self._client.bytes_received

    @property
    def num_requests(self) -> int:
        """Requests sent so far, redirects and repeated tries included."""
        return 0 if self._client is None else self._client.num_requests

    @property
    def waited_seconds(self) -> float:
        """Seconds spent in Retry-After and back-off, threads added up."""
        return 0.0 if self._client is None else self._client.waited_seconds

    def files(self) -> tuple[str, ...]:
        """All file names of the commit (offline: those in the cache), sorted."""
        return self._place.files()

    def size(self, file: str) -> int:
        """Size in bytes as the Hub lists it; `CannotLook` for a file that is not there."""
        self._require(file)
        return self._place.size(file)

    def read(self, file: str, start: int, stop: int) -> memoryview | bytes:
        """Exactly bytes [start, stop), read-only; at most 1 GiB at once, all of it held in memory."""
        self._require(file)
        return self._place.read(file, start, stop)

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        """The whole file; `CannotLook` when it is larger than `limit_bytes` (nothing is read then)."""
        self._require(file)
        return self._place.read_whole(file, limit_bytes=limit_bytes)

    def close(self) -> None:
        """Close the kept-alive connections; reading again opens new ones."""
        if self._client is not None:
            self._client.close()

    def _require(self, file: str) -> None:
        if file in self._place.files():
            return
        if self.is_offline:
            raise CannotLook(
                f"hf:{self.name}: {file} is not in the local cache and ghoststep is offline. Run without --offline (and "
                f"without HF_HUB_OFFLINE), or first `hf download {self._spec.repo} {file} --revision {self.sha}`"
            )
        raise CannotLook(f"hf:{self.name}: no file {file} at this commit")


class _Remote:
    """The files of one commit behind one endpoint."""

    is_remote = True

    def __init__(self, client: RangeClient, endpoint: str, spec: RepoSpec, listing: Listing, *, name: str) -> None:
        self.name = name
        self._client = client
        self._spec = spec
        self._root = f"{endpoint}/{spec.repo}/resolve/{listing.sha}/"
        self._sizes = dict(zip(listing.names, listing.sizes, strict=True))
        self._names = listing.names
        self._probed: tuple[str, bytes] | None = None
        self._probe()

    def files(self) -> tuple[str, ...]:
        return self._names

    def size(self, file: str) -> int:
        return self._sizes[file]

    def read(self, file: str, start: int, stop: int) -> memoryview | bytes:
        size = self._sizes[file]
        if not 0 <= start <= stop <= size:
            raise CannotLook(
                f"hf:{self.name}: {file} has {size} bytes, expected bytes {start} to {stop}: truncated or mislabelled"
            )
        limit = self._client.limits.max_read_bytes
        if stop - start > limit:
            raise CannotLook(
                f"hf:{self.name}: {file}: {stop - start} bytes asked for at once, at most {limit}: read it in blocks"
            )
        if start == stop:
            return b""
        buffer = bytearray(stop - start)
        try:
            self._client.fill(self._url(file), memoryview(buffer), start, total_bytes=size)
        except HttpRefused as error:
            message = explain_refusal(error, self._spec, file=file)
            raise HttpRefused(message, status=error.status, error_code=error.error_code) from error
        return memoryview(buffer).toreadonly()

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        size = self._sizes[file]
        if size > limit_bytes:
            raise CannotLook(f"hf:{self.name}: {file} has {size} bytes, more than the {limit_bytes} that are read whole")
        if self._probed is not None and self._probed[0] == file:
            return self._probed[1]
        return bytes(self.read(file, 0, size))

    def _probe(self) -> None:
        """Read config.json (or one byte of another file) now: a refusal belongs to opening, not to the first check."""
        file = "config.json" if 0 < self._sizes.get("config.json", 0) <= _PROBE_BYTES else None
        other = next((name for name in self._names if self._sizes[name] > 0), None)
        try:
            if file is not None:
                self._probed = (file, bytes(self.read(file, 0, self._sizes[file])))
            elif other is not None:
                self.read(other, 0, 1)
        except UnsafeInput:
            raise
        except HttpRefused as error:
            if error.status in (401, 403, 429):
                raise SubjectError(str(error)) from error
        except CannotLook:
            pass  # whoever needs the file will hear it again, with the reason

    def _url(self, file: str) -> str:
        return self._root + quote(file)


def _name(spec: RepoSpec, sha: str) -> str:
    short = f"{spec.repo}@{sha[:7]}"
    return short if spec.revision is None or sha.startswith(spec.revision) else f"{short} ({spec.revision})"


def hub_endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def offline_by_environment() -> bool:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        value = os.environ.get(variable)
        if value is not None:
            return value.upper() in _TRUE
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_token() -> str | None:
    from huggingface_hub import get_token

    try:
        token = get_token()
    except Exception as error:
        raise SubjectError(
            f"huggingface_hub cannot get the token ({type(error).__name__}); run `hf auth login` again"
        ) from error
    if token is not None and not re.fullmatch(r"[\x21-\x7e]{1,4096}", token):
        raise SubjectError("the Hub token holds blanks or unprintable characters; run `hf auth login` again or set HF_TOKEN")
    return token


def hub_user_agent() -> str:
    from ghoststep import __version__

    return f"ghoststep/{__version__}"


def _cached_snapshot(spec: RepoSpec) -> tuple[str, Path]:
    """Commit and folder in the cache of `huggingface_hub`: refs/<revision> names the commit, snapshots/<commit> its files."""
    repo = _cache_folder() / f"models--{spec.repo.replace('/', '--')}"
    revision = spec.revision or "main"
    sha = revision
    try:
        ref = repo / "refs" / revision
        if ref.is_file() and ref.stat().st_size < 256:
            sha = ref.read_text(encoding="ascii").strip()
        elif re.fullmatch(r"[0-9a-f]{7,64}", revision):
            full = [place.name for place in (repo / "snapshots").iterdir() if place.name.startswith(revision)]
            sha = full[0] if len(full) == 1 else revision
    except (OSError, ValueError):
        sha = revision
    folder = repo / "snapshots" / sha
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", sha) or not folder.is_dir():
        raise SubjectError(
            f"hf:{spec}: offline, and revision {revision!r} is not in the local cache ({_cache_folder()}). Run without "
            f"--offline (and without HF_HUB_OFFLINE), or first `hf download {spec.repo} --revision {revision}`"
        )
    return sha, folder


def _cache_folder() -> Path:
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)
