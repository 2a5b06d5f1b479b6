"""A loopback stand-in for the Hugging Face Hub, with faults on demand.

    with LocalHub() as hub:
        hub.add("org/name", {"config.json": b"{}"})          # or hub.add_folder("org/name", path)
        hub.faults += [Fault(status=429, headers={"Retry-After": "1"}), Fault(send_bytes=100)]
        ...                                                   # the next two file requests go wrong, the third is served

Commits are kept side by side: adding to a branch again moves the branch, the old commit stays. Everything is in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SLICE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request as the server saw it."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request. Without `status` the file is served, but badly."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    send_bytes: int | None = None  # then the connection is cut
    stall_seconds: float = 0.0  # silence before the body, or after `stall_after_bytes` of it
    stall_after_bytes: int = 0
    trickle_seconds: float = 0.0  # silence between single bytes
    content_range: str | None = None
    body: bytes | None = None  # sent instead of the right bytes, Content-Length to match
    close_before: bool = False  # cut before any header


@dataclass
class Repo:
    """Branches and tags → commit; commit → files."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None  # needed to read files
    needs_token_to_list: bool = False
    gated: bool = False


def need_loopback() -> None:
    """Skip the test, saying so, where even 127.0.0.1 cannot be reached (a network namespace without `lo`)."""
    import pytest

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        try:
            socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError as error:
            pytest.skip(f"the loopback interface is down: {error}")


class LocalHub:
    """The server; `url` goes into HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.faults: deque[Fault] = deque()  # for file requests
        self.api_faults: deque[Fault] = deque()
        self.ranges = True  # False: Range is ignored
        self.redirect_to: str | None = None  # files: 302 to this base URL
        self.error_codes = True  # False: 404 without X-Error-Code
        self.tree_override: object = None  # a file list that lies
        self.page_entries = 1000
        self.body_bytes_sent = 0
        self.stopping = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        need_loopback()
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Commit `files` and move `branch` to them; returns the sha."""
        place = self.repos.setdefault(repo, Repo())
        sha = hashlib.sha1(repr((repo, len(place.commits), sorted(files))).encode()).hexdigest()
        place.commits[sha] = dict(files)
        place.revisions[branch] = sha
        return sha

    def add_folder(self, repo: str, folder: Path, *, branch: str = "main") -> str:
        """Commit all files below `folder`."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return self.add(repo, {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, branch=branch)

    def files_seen(self) -> list[Seen]:
        """Requests for file contents only."""
        return [seen for seen in self.seen if "/resolve/" in seen.path]


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        seen = Seen(
            method=self.command, path=path, range=self.headers.get("Range"), authorization=self.headers.get("Authorization")
        )
        self.hub.seen.append(seen)
        try:
            if path.startswith("/api/"):
                self._api(urlsplit(self.path).path, parse_qs(parts.query))
            else:
                self._file(path, parts.query)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(body)

    def _write(self, body: bytes) -> None:
        for at in range(0, len(body), SLICE_BYTES):
            piece = body[at : at + SLICE_BYTES]
            self.wfile.write(piece)
            self.hub.body_bytes_sent += len(piece)

    def _refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"{code} (test)"} if self.hub.error_codes else {}
        self._send(status, b'{"error": "refused"}', **headers)

    def _fault(self, faults: deque[Fault]) -> Fault | None:
        try:
            fault = faults.popleft()
        except IndexError:
            return None
        if fault.close_before:
            self.close_connection = True
            return fault
        if fault.status is not None:
            self._send(fault.status, fault.body or b"no", **fault.headers)
        return fault

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        fault = self._fault(self.hub.api_faults)
        if fault is not None and (fault.status is not None or fault.close_before):
            return None
        match = re.fullmatch(r"/api/models/((?:[^/]+/)?[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
        repo = self.hub.repos.get(unquote(match[1])) if match else None
        if match is None or repo is None:
            return self._refuse(404, "RepoNotFound")
        if repo.needs_token_to_list and self.headers.get("Authorization") != f"Bearer {repo.token}":
            return self._refuse(401, "RepoNotFound")
        asked = unquote(match[3] or "main")
        sha = repo.revisions.get(asked, asked)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        if match[2] == "tree":
            return self._tree(repo.commits[sha], path, int(query.get("page", ["0"])[0]))
        body = {"id": match[1], "sha": sha, "gated": "manual" if repo.gated else False}
        return self._send(200, json.dumps(body).encode(), Content_Type="application/json")

    def _tree(self, files: dict[str, bytes], path: str, page: int) -> None:
        entries: Any = [
            {"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in sorted(files.items())
        ]
        if self.hub.tree_override is not None:
            entries = self.hub.tree_override
        step = self.hub.page_entries
        more = {"Link": f'<{self.hub.url}{path}?page={page + 1}>; rel="next"'} if len(entries) > (page + 1) * step else {}
        self._send(200, json.dumps(entries[page * step : (page + 1) * step]).encode(), **more)

    def _file(self, path: str, query: str) -> None:
        fault = self._fault(self.hub.faults)
        if fault is not None and (fault.status is not None or fault.close_before):
            return None
        match = re.fullmatch(r"/((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = self.hub.repos.get(match[1]) if match else None
        if match is None or repo is None:
            return self._refuse(404, "RepoNotFound")
        if self.hub.redirect_to is not None and "signed=" not in query:
            return self._send(302, b"Found", Location=f"{self.hub.redirect_to}{path}?signed=secret")
        if repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}" and "signed=" not in query:
            return self._refuse(401 if self.headers.get("Authorization") is None else 403, "GatedRepo")
        files = repo.commits.get(repo.revisions.get(match[2], match[2]), {})
        if match[3] not in files:
            return self._refuse(404, "EntryNotFound")
        return self._body(files[match[3]], fault or Fault())

    def _body(self, whole: bytes, fault: Fault) -> None:
        start, stop, status, headers = 0, len(whole), 200, dict(fault.headers)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked and self.hub.ranges:
            start, stop, status = int(asked[1]), min(int(asked[2]) + 1, len(whole)), 206
            headers["Content-Range"] = fault.content_range or f"bytes {start}-{stop - 1}/{len(whole)}"
        body = whole[start:stop] if fault.body is None else fault.body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self._write(body[: fault.stall_after_bytes])
        body = body[fault.stall_after_bytes :]
        self.hub.stopping.wait(fault.stall_seconds)
        if fault.trickle_seconds:
            for at in range(len(body)):
                self._write(body[at : at + 1])
                if self.hub.stopping.wait(fault.trickle_seconds):
                    break
            return
        self._write(body if fault.send_bytes is None else body[: fault.send_bytes])
        if fault.send_bytes is not None:
            self.close_connection = True
            time.sleep(0.01)
