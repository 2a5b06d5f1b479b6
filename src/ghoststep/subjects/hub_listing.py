"""Which commit a revision means and which files it holds, asked from the Hub's HTTP API.

Two small requests: the commit sha of the revision, then the file tree of that sha. `huggingface_hub.HfApi` asks the same
addresses, but its tree request has no time-out and no limit on the answer; here both are bounded like every other read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin

from ghoststep.errors import CannotLook, SubjectError, UnsafeInput
from ghoststep.subjects.http_answers import HttpRefused
from ghoststep.subjects.http_connection import Origin
from ghoststep.subjects.http_ranges import RangeClient
from ghoststep.subjects.local import check_relative_name

MAX_FILES = 20_000
MAX_PAGES = 100
MAX_FILE_BYTES = 1 << 44  # 16 TiB; the Hub's own limit is far below


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoSpec:
    """`org/name[@rev]`, taken apart. `revision` is None when none was asked for (the Hub's default branch)."""

    repo: str
    revision: str | None

    @classmethod
    def parse(cls, spec: str) -> RepoSpec:
        """`SubjectError` when it is not `org/name`, `name`, `org/name@rev` or `name@rev`."""
        repo, at, revision = spec.partition("@")
        parts = repo.split("/")
        plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}", part) and ".." not in part for part in parts)
        if not plain or len(parts) > 2:
            raise SubjectError(f"hf:{spec[:200]}: not a Hub model; expected hf:org/name or hf:org/name@revision")
        if at and (not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-+/]{0,254}", revision) or ".." in revision):
            raise SubjectError(f"hf:{spec[:200]}: {revision[:100]!r} is not a branch, tag or commit; expected hf:{repo}@main")
        return cls(repo=repo, revision=revision if at else None)

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of one commit: names sorted, sizes in bytes at the same places."""

    sha: str
    gated: bool
    names: tuple[str, ...]
    sizes: tuple[int, ...]


def list_files(client: RangeClient, endpoint: str, spec: RepoSpec) -> Listing:
    """Resolve the revision and list its files; 2 requests (one more for each further 1,000 files).

    Errors: `SubjectError` (not found, gated, not reachable) and `UnsafeInput` (a name that leaves the folder, an absurd size).
    """
    try:
        sha, gated = _commit(client, endpoint, spec)
        entries = _tree(client, f"{endpoint}/api/models/{quote(spec.repo)}/tree/{sha}?recursive=true&expand=false")
    except UnsafeInput:
        raise
    except HttpRefused as error:
        raise SubjectError(explain_refusal(error, spec)) from error
    except CannotLook as error:
        raise SubjectError(f"hf:{spec}: cannot ask the Hub: {error}") from error
    found: dict[str, int] = {}
    for entry in entries:
        name, size = entry.get("path"), entry.get("size")
        if entry.get("type") != "file":
            continue
        if not isinstance(name, str) or not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
            raise UnsafeInput(f"hf:{spec}: the Hub's file list says {str(name)[:100]!r} has {str(size)[:40]} bytes: refused")
        if "\\" in name and ".." not in name:
            continue  # a folder separator of another system inside a name; no loader opens such a file
        found[check_relative_name(name, where=f"hf:{spec}: the Hub's file list")] = size
    names = tuple(sorted(found))
    return Listing(sha=sha, gated=gated, names=names, sizes=tuple(found[name] for name in names))


def explain_refusal(error: HttpRefused, spec: RepoSpec, *, file: str | None = None) -> str:
    """The sentence for a user: what was refused and what to do about it."""
    if error.status in (401, 403):
        return (
            f"hf:{spec}: gated or private: the Hub answered {error.status}{' for ' + file if file else ''} (without a valid "
            f"token it says the same of a model that does not exist). Check the name, accept the licence at the model's page "
            f"if there is one, then `hf auth login` or set HF_TOKEN to a token that may read {spec.repo}"
        )
    if error.status == 404:
        if file is not None:
            return f"hf:{spec}: no file {file} at this commit"
        if error.error_code == "RevisionNotFound":
            return f"hf:{spec}: the model exists, the revision {spec.revision!r} does not; expected a branch, tag or commit"
        return f"hf:{spec}: no such model on the Hub (404). Check the spelling: hf:org/name"
    if error.status == 429:
        return f"hf:{spec}: the Hub limits the rate of requests: {error}. A token (`hf auth login`) raises the limit"
    return f"hf:{spec}: {error}"


def _commit(client: RangeClient, endpoint: str, spec: RepoSpec) -> tuple[str, bool]:
    model = f"{endpoint}/api/models/{quote(spec.repo)}"
    wanted = "?expand[]=sha&expand[]=gated"
    url = model + wanted if spec.revision is None else f"{model}/revision/{quote(spec.revision, safe='')}{wanted}"
    try:
        answer = _json(client, url)[0]
    except HttpRefused as error:
        if error.status != 404 or error.error_code or spec.revision is None:
            raise
        _json(client, model + wanted)  # the server did not say what is missing: raises if the model is
        raise HttpRefused(str(error), status=404, error_code="RevisionNotFound") from error
    sha = answer.get("sha") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(sha, str) or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", sha):
        raise CannotLook(f"the answer names no commit (got {str(sha)[:60]!r}, expected 40 hexadecimal digits)")
    return sha, bool(answer.get("gated"))


def _tree(client: RangeClient, url: str) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    home = Origin.of(url)
    for _ in range(MAX_PAGES):
        answer, link = _json(client, url)
        if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
            raise CannotLook("the file list is not a list of entries")
        entries += answer
        if len(entries) > MAX_FILES:
            raise CannotLook(f"more than {MAX_FILES} files in this repository; expected one checkpoint")
        following = re.search(r'<([^<>]+)>\s*;\s*rel="?next"?', link)
        if following is None:
            return entries
        url = urljoin(url, following[1])
        if Origin.of(url) != home:
            raise UnsafeInput("the next page of the file list lies on another host: refused")
    raise CannotLook(f"the file list has more than {MAX_PAGES} pages")


def _json(client: RangeClient, url: str) -> tuple[object, str]:
    page = client.page(url, limit_bytes=client.limits.max_listing_bytes)
    try:
        return json.loads(page.body), page.link
    except (ValueError, RecursionError) as error:
        raise CannotLook(f"the answer to {url.split('?', 1)[0]} is not JSON ({len(page.body)} bytes)") from error
