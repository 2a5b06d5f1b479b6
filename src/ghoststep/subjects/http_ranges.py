"""Byte ranges of remote files: redirects, tries, waits and resumption. Knows HTTP, knows nothing of the Hub.

A range is believed only if the server says 206 with the very range that was asked for; a server that answers 200 is
refused before its body is read. A dropped or stalled transfer goes on from the byte where it broke.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urljoin

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.http_answers import HttpRefused, TryAgain, checked_length, raise_for_status
from ghoststep.subjects.http_connection import Connections, Exchange, HttpLimits, Origin, shown

REDIRECTS = (301, 302, 303, 307, 308)
SLICE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole body of a small answer, and the header Link."""

    body: bytes
    link: str


class RangeClient:
    """Reads whole small answers and byte ranges below one endpoint; several threads may use it at once.

    The token goes to the endpoint's own scheme, host and port and nowhere else, whatever the redirects say.
    `bytes_received` counts body bytes of every answer, `num_requests` every request sent (redirects included),
    `waited_seconds` the waits.
    """

    def __init__(self, endpoint: str, *, token: str | None, user_agent: str, limits: HttpLimits) -> None:
        self.limits = limits
        self.bytes_received = 0
        self.num_requests = 0
        self.waited_seconds = 0.0
        self._home = Origin.of(endpoint)
        self._token = token
        self._connections = Connections(limits, user_agent)
        self._moved: dict[str, str] = {}  # where the last redirect led: saves one request a range
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the idle connections; the client can be used again."""
        self._connections.close()

    def page(self, url: str, *, limit_bytes: int) -> Page:
        """A whole answer of unknown size, at most `limit_bytes`. Each try starts at byte 0."""
        tries = _Tries(self, threading.Event())
        while True:
            try:
                return self._page(url, limit_bytes)
            except (TryAgain, OSError, http.client.HTTPException) as error:
                tries.failed(error, url)

    def fill(self, url: str, target: memoryview, start: int, *, total_bytes: int) -> None:
        """Fill `target` with the bytes from `start` of a file of `total_bytes`; ranges over `chunk_bytes` run in parallel.

        A server that ignores ranges passes only where the whole file was asked for in one range. Error: `CannotLook`.
        """
        stop_all = threading.Event()
        step = self.limits.chunk_bytes
        if len(target) <= step:
            self._fill_range(url, target, start, total_bytes, stop_all)
            return
        pool = ThreadPoolExecutor(self.limits.num_parallel, thread_name_prefix="ghoststep-range")
        try:
            jobs = [
                pool.submit(self._fill_range, url, target[at : at + step], start + at, total_bytes, stop_all)
                for at in range(0, len(target), step)
            ]
            for job in jobs:
                job.result()
        finally:
            stop_all.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def wait(self, seconds: float, stopped: threading.Event) -> bool:
        """Sleep and book it; False when that would pass `max_wait_seconds`."""
        with self._lock:
            if self.waited_seconds + seconds > self.limits.max_wait_seconds:
                return False
            self.waited_seconds += seconds
        stopped.wait(seconds)
        return True

    def _fill_range(self, url: str, target: memoryview, start: int, total_bytes: int, stopped: threading.Event) -> None:
        done = 0
        tries = _Tries(self, stopped)
        while done < len(target):
            if stopped.is_set():
                raise CannotLook(f"{shown(url)}: given up, since another range of the same file failed")
            try:
                exchange, num_expected = self._open_range(url, start + done, start + len(target), total_bytes)
                done += self._copy(exchange, target[done : done + num_expected], stopped)
                if done < len(target):
                    raise TryAgain(f"the connection ended after {done} of {len(target)} bytes")
            except _Partial as error:
                done += error.num_bytes
                tries.failed(error, url)
            except (TryAgain, OSError, http.client.HTTPException) as error:
                tries.failed(error, url)

    def _copy(self, exchange: Exchange, target: memoryview, stopped: threading.Event) -> int:
        """Read the body into `target`; `_Partial` with the count when the connection breaks on the way."""
        done = 0
        try:
            while done < len(target) and not stopped.is_set():
                data = exchange.response.read1(min(SLICE_BYTES, len(target) - done))
                if not data:
                    break
                target[done : done + len(data)] = data
                done += len(data)
        except (OSError, http.client.HTTPException) as error:
            exchange.abandon()
            raise _Partial(error, done) from error
        finally:
            self._count(done)
        if done == len(target):
            exchange.finish()
        else:
            exchange.abandon()
        return done

    def _open_range(self, url: str, start: int, stop: int, total_bytes: int) -> tuple[Exchange, int]:
        exchange = self._open(url, (("Range", f"bytes={start}-{stop - 1}"),))
        try:
            return exchange, checked_length(exchange, start, stop, total_bytes)
        except CannotLook:
            exchange.abandon()
            raise

    def _page(self, url: str, limit_bytes: int) -> Page:
        exchange = self._open(url, (("Accept", "application/json"),))
        body = bytearray()
        try:
            while len(body) <= limit_bytes:
                data = exchange.response.read1(SLICE_BYTES)
                if not data:
                    break
                body += data
        except BaseException:
            exchange.abandon()
            raise
        finally:
            self._count(len(body))
        said = exchange.body_bytes()
        if len(body) > limit_bytes:
            exchange.abandon()
            raise UnsafeInput(f"{shown(url)}: the answer is larger than {limit_bytes} bytes; not read any further")
        if said is not None and len(body) != said:
            exchange.abandon()
            raise TryAgain(f"the connection ended after {len(body)} of {said} bytes")
        link = exchange.header("Link") or ""
        exchange.finish()
        return Page(body=bytes(body), link=link)

    def _open(self, url: str, headers: tuple[tuple[str, str], ...]) -> Exchange:
        """Follow redirects to an answer of 200 or 206. `TryAgain` for 429 and 5xx, `HttpRefused` for the rest."""
        moved = self._moved.get(url)
        if moved is not None:
            try:
                return self._follow(moved, headers, url)
            except HttpRefused:
                self._moved.pop(url, None)  # a signed address has run out: ask the first host again
            except OSError:
                self._moved.pop(url, None)
                raise
        return self._follow(url, headers, url)

    def _follow(self, url: str, headers: tuple[tuple[str, str], ...], asked: str) -> Exchange:
        here = url
        for _ in range(self.limits.max_redirects + 1):
            exchange = self._get(here, headers)
            if exchange.status not in REDIRECTS:
                raise_for_status(exchange)
                if here != asked:
                    self._moved[asked] = here
                return exchange
            target = exchange.header("Location")
            self._drop(exchange)
            if not target:
                raise CannotLook(f"{shown(here)}: a redirect ({exchange.status}) without a Location")
            there = _joined(here, target)
            if Origin.of(here).scheme == "https" and Origin.of(there).scheme == "http":
                raise UnsafeInput(f"{shown(here)} redirects from https to plain http ({shown(there)}): refused")
            here = there
        raise CannotLook(f"{shown(url)}: more than {self.limits.max_redirects} redirects; the last one to {shown(here)}")

    def _get(self, url: str, headers: tuple[tuple[str, str], ...]) -> Exchange:
        if self._token is not None and Origin.of(url) == self._home:
            headers = (*headers, ("Authorization", f"Bearer {self._token}"))
        with self._lock:
            self.num_requests += 1
        return self._connections.get(url, headers)

    def _drop(self, exchange: Exchange) -> None:
        """Skip the body of a redirect: read when it is tiny, to keep the connection."""
        num_bytes = exchange.body_bytes()
        if num_bytes is None or num_bytes > SLICE_BYTES:
            exchange.abandon()
            return
        with contextlib.suppress(_Partial):  # the address is already known
            self._copy(exchange, memoryview(bytearray(num_bytes)), threading.Event())

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_received += num_bytes


class _Partial(TryAgain):
    """A transfer broke after `num_bytes`."""

    def __init__(self, error: Exception, num_bytes: int) -> None:
        super().__init__(f"the transfer broke ({str(error) or type(error).__name__})")
        self.num_bytes = num_bytes


class _Tries:
    """The tries of one request."""

    def __init__(self, client: RangeClient, stopped: threading.Event) -> None:
        self._client = client
        self._stopped = stopped
        self._num_failed = 0

    def failed(self, error: Exception, url: str) -> None:
        """Wait for the next try, or raise `CannotLook` (`HttpRefused` when the server named a status)."""
        limits = self._client.limits
        self._num_failed += 1
        again = error if isinstance(error, TryAgain) else TryAgain(str(error) or type(error).__name__)
        if self._num_failed >= limits.num_tries:
            raise _final(f"{shown(url)}: {again}; given up after {self._num_failed} tries", again) from error
        asked = again.wait_seconds
        seconds = limits.first_backoff_seconds * 2 ** (self._num_failed - 1) if asked is None else asked
        if not self._client.wait(seconds, self._stopped):
            who = "the server asks to wait" if asked is not None else "the next try would have to wait"
            spent = f"{self._client.waited_seconds:.0f} of at most {limits.max_wait_seconds:g} s are already spent waiting"
            raise _final(f"{shown(url)}: {again}; {who} {seconds:.0f} s and {spent}: try again later", again) from error


def _final(message: str, error: TryAgain) -> CannotLook:
    return CannotLook(message) if error.status is None else HttpRefused(message, status=error.status)


def _joined(here: str, target: str) -> str:
    try:
        return urljoin(here, target)
    except ValueError as error:
        raise UnsafeInput(f"{shown(here)} redirects to something that is no URL: {error}") from error
