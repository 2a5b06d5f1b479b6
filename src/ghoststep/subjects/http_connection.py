"""One HTTP GET at a time over kept-alive connections, with a watch on servers that stall or trickle.

Standard library only: `huggingface_hub` has changed its HTTP library twice (requests, httpx, httpx2), and none of them
refuses a body unread, bounds a trickle, or says which host gets the token on a redirect. Here all three are explicit.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import io
import os
import socket
import ssl
import threading
import time
import urllib.request
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from ghoststep.errors import CannotLook, UnsafeInput

# Slower than this over a whole time-out is a stall: at 4 KiB/s a table of 1 GB would take three days.
MIN_BYTES_PER_SECOND = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a stranger's server may cost us.

    `timeout_seconds`: for connecting, for the headers, and for every further `timeout_seconds * MIN_BYTES_PER_SECOND` bytes.
    `num_tries`: per request (a range of at most `chunk_bytes`); every drop, stall, 5xx and 429 uses one.
    `max_wait_seconds`: all waits of one source added up (Retry-After and back-off).
    `max_read_bytes`: the most that one `read` may ask for, so that a lying header cannot fill the memory.
    """

    timeout_seconds: float = 20.0
    num_tries: int = 5
    first_backoff_seconds: float = 0.5
    max_wait_seconds: float = 60.0
    max_redirects: int = 5
    chunk_bytes: int = 8 << 20
    num_parallel: int = 3
    max_read_bytes: int = 1 << 30
    max_listing_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Scheme, host and port: what decides whether a token may be sent."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of an absolute http(s) URL; `UnsafeInput` for anything else."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UnsafeInput(f"{shown(url)!r} is not a valid URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise UnsafeInput(f"{shown(url)!r} is not an http or https URL with a host")
        return cls(scheme=parts.scheme, host=host, port=port or (443 if parts.scheme == "https" else 80))


def shown(url: str) -> str:
    """A URL fit for a message: without the query, where a content host keeps its signature, and without a password."""
    head = url.split("?", 1)[0].split("#", 1)[0]
    scheme, mark, rest = head.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"[:300] if mark else head[:300]


class _Watched(io.RawIOBase):
    """The socket as a raw stream that gives up on a stall and on a trickle.

    A socket time-out alone starts anew with each byte, so one byte a second would hold us for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._window_seconds = sock.gettimeout() or HttpLimits().timeout_seconds
        self._ends = time.monotonic() + self._window_seconds
        self._window_bytes = 0
        self.in_body = False  # the headers have one window in all

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        now = time.monotonic()
        fast = self.in_body and self._window_bytes >= MIN_BYTES_PER_SECOND * self._window_seconds
        if now >= self._ends:
            if not fast:
                raise TimeoutError(f"less than {MIN_BYTES_PER_SECOND} bytes a second for {self._window_seconds:g} s")
            self._ends, self._window_bytes = now + self._window_seconds, 0
        self._sock.settimeout(self._window_seconds if fast else max(self._ends - now, 1e-3))
        num_bytes = self._raw.readinto(buffer)
        self._window_bytes += num_bytes or 0
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An `HTTPResponse` that reads through `_Watched`."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None) -> None:
        super().__init__(sock, debuglevel, method, url)
        self.watched = _Watched(sock)
        self.fp.close()
        self.fp = io.BufferedReader(self.watched, 1 << 16)

    def begin(self) -> None:
        super().begin()
        self.watched.in_body = True


@dataclass(slots=True, kw_only=True)
class Exchange:
    """An answer whose headers are here and whose body is not. Call `finish` or `abandon` exactly once."""

    url: str
    origin: Origin
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    pool: Connections

    @property
    def status(self) -> int:
        return self.response.status

    def header(self, name: str) -> str | None:
        value = self.response.getheader(name)
        return None if value is None else value.strip()

    def body_bytes(self) -> int | None:
        """Content-Length; None when the server did not say (chunked)."""
        text = self.header("Content-Length")
        return int(text) if text and text.isdecimal() and len(text) < 19 and not self.header("Transfer-Encoding") else None

    def finish(self) -> None:
        """The body was read to its end: keep the connection."""
        keep = not self.response.will_close and self.body_bytes() is not None
        self.response.close()
        if keep:
            self.pool.give(self.origin, self.connection)
        else:
            self.connection.close()

    def abandon(self) -> None:
        """Close at once; what was not read is never downloaded."""
        self.response.close()
        self.connection.close()


@dataclass(slots=True)
class Connections:
    """Idle connections by origin; safe to use from several threads. Proxies and certificates from the environment."""

    limits: HttpLimits
    user_agent: str
    _idle: list[tuple[Origin, http.client.HTTPConnection]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tls: ssl.SSLContext | None = None

    def give(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        """Put a connection back for the next request."""
        with self._lock:
            self._idle.append((origin, connection))

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def get(self, url: str, headers: tuple[tuple[str, str], ...]) -> Exchange:
        """Send GET and read the headers. OSError and http.client.HTTPException mean: may be tried again."""
        origin = Origin.of(url)
        while True:
            connection = self._take(origin)
            reused = connection is not None
            connection = connection or self._new(origin)
            try:
                return self._send(connection, origin, url, headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The server may close an idle connection at any time: that is no failure, so ask again on another one.
                if not reused or isinstance(error, TimeoutError):
                    raise
            except ValueError as error:
                connection.close()
                raise UnsafeInput(f"{shown(url)!r} cannot be asked for: {type(error).__name__}") from error

    def _take(self, origin: Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            for place, (idle_origin, connection) in enumerate(self._idle):
                if idle_origin == origin:
                    del self._idle[place]
                    return connection
        return None

    def _send(
        self, connection: http.client.HTTPConnection, origin: Origin, url: str, headers: tuple[tuple[str, str], ...]
    ) -> Exchange:
        if connection.sock is not None:
            connection.sock.settimeout(self.limits.timeout_seconds)
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        proxy_authorization = getattr(connection, "proxy_authorization", None)
        if origin.scheme == "http" and (connection.host, connection.port) != (origin.host, origin.port):
            target = f"http://{parts.netloc.rpartition('@')[2]}{target}"  # a plain proxy wants the whole URL
        host = parts.netloc.rpartition("@")[2]
        connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
        fixed = (("Host", host), ("User-Agent", self.user_agent), ("Accept-Encoding", "identity"))
        extra = (("Proxy-Authorization", proxy_authorization),) if proxy_authorization else ()
        for name, value in (*fixed, *headers, *extra):
            connection.putheader(name, value)
        connection.endheaders()
        return Exchange(url=url, origin=origin, connection=connection, response=connection.getresponse(), pool=self)

    def _new(self, origin: Origin) -> http.client.HTTPConnection:
        host, port, credentials = origin.host, origin.port, None
        proxy = _proxy_of(origin)
        if proxy is not None:
            place = Origin.of(proxy)
            host, port, credentials = place.host, place.port, _basic(proxy)
        seconds = self.limits.timeout_seconds
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context())
            if proxy is not None:
                connection.set_tunnel(origin.host, origin.port, {"Proxy-Authorization": credentials} if credentials else {})
        else:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
            if credentials:
                connection.proxy_authorization = credentials  # type: ignore[attr-defined]
        connection.response_class = _Response
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = _tls_context()
            return self._tls


def _tls_context() -> ssl.SSLContext:
    """The system's certificates (or SSL_CERT_FILE, or REQUESTS_CA_BUNDLE), and certifi's where that is installed."""
    bundle = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    try:
        if bundle:
            is_folder = os.path.isdir(bundle)
            return ssl.create_default_context(cafile=None if is_folder else bundle, capath=bundle if is_folder else None)
        context = ssl.create_default_context()
        with contextlib.suppress(ImportError):  # the system's own store is enough on most machines
            context.load_verify_locations(importlib.import_module("certifi").where())
        return context
    except OSError as error:
        raise CannotLook(f"cannot load the TLS certificates from {bundle or 'the system'}: {error}") from error


def _proxy_of(origin: Origin) -> str | None:
    proxy = urllib.request.getproxies().get(origin.scheme)
    if not proxy or urllib.request.proxy_bypass(origin.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _basic(proxy: str) -> str | None:
    parts = urlsplit(proxy)
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + b64encode(pair.encode()).decode()
