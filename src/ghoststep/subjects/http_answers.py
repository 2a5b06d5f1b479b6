"""What an HTTP answer says before its body is read: refused for good, to be tried again, or the range that was asked for."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime

from ghoststep.errors import CannotLook
from ghoststep.subjects.http_connection import Exchange, shown

RETRIED = (408, 425, 429, 500, 502, 503, 504)


class HttpRefused(CannotLook):
    """The server refused for good. `status` is the HTTP status, `error_code` the header X-Error-Code ("" without it)."""

    def __init__(self, message: str, *, status: int, error_code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code


class TryAgain(Exception):  # noqa: N818 - control flow between the HTTP modules
    """This try failed in a way that may pass; `wait_seconds` is what the server asked for."""

    def __init__(self, reason: str, *, status: int | None = None, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.wait_seconds = wait_seconds


def raise_for_status(exchange: Exchange) -> None:
    status = exchange.status
    if status in (200, 206):
        encoding = exchange.header("Content-Encoding")
        if encoding and encoding.lower() != "identity":
            exchange.abandon()
            raise CannotLook(
                f"{shown(exchange.url)}: the server sent {encoding[:40]!r}-encoded bytes; plain bytes were asked for"
            )
        return
    wait_seconds = _retry_after(exchange)
    error_code = (exchange.header("X-Error-Code") or "")[:60]
    said = _printable(exchange.header("X-Error-Message") or exchange.response.reason or "")
    exchange.abandon()
    if status in RETRIED:
        raise TryAgain(f"the server answered {status} {said}".rstrip(), status=status, wait_seconds=wait_seconds)
    raise HttpRefused(
        f"{shown(exchange.url)}: the server answered {status} {said}".rstrip(), status=status, error_code=error_code
    )


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])


def _retry_after(exchange: Exchange) -> float | None:
    """Seconds to wait: Retry-After as seconds or as a date (against the server's own clock), else the RateLimit header."""
    text = exchange.header("Retry-After")
    if not text:
        match = re.search(r"\bt=(\d{1,6})\b", exchange.header("RateLimit") or "")
        return float(match[1]) if match and exchange.status == 429 else None
    if text.isdecimal():
        return float(text[:9])
    try:
        now_text = exchange.header("Date")
        now = parsedate_to_datetime(now_text).timestamp() if now_text else time.time()
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def checked_length(exchange: Exchange, start: int, stop: int, total_bytes: int) -> int:
    """How many bytes of [start, stop) this answer carries; `CannotLook` when it is not the range that was asked for."""
    where = shown(exchange.url)
    body_bytes = exchange.body_bytes()
    if exchange.status == 200:
        if start == 0 and stop == total_bytes and body_bytes in (total_bytes, None):
            return total_bytes
        raise CannotLook(
            f"{where}: asked for bytes {start} to {stop - 1}, and the server ignores Range (status 200 instead of 206): "
            f"refused, nothing was downloaded. Use a server or proxy that supports ranges, or check a local copy"
        )
    text = exchange.header("Content-Range") or ""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", text)
    if match is None:
        raise CannotLook(
            f"{where}: status 206 with Content-Range {text[:80]!r}; expected 'bytes {start}-{stop - 1}/{total_bytes}'"
        )
    first, last = int(match[1]), int(match[2])
    if first != start or not start <= last < stop:
        raise CannotLook(f"{where}: asked for bytes {start} to {stop - 1}, and the server sent {first} to {last}: refused")
    if match[3] not in ("*", str(total_bytes)):
        raise CannotLook(
            f"{where}: the file list says {total_bytes} bytes, the server says {match[3]}: the file changed, refused"
        )
    if body_bytes not in (last - first + 1, None):
        raise CannotLook(f"{where}: Content-Range {text!r} with Content-Length {body_bytes}: they disagree, refused")
    return last - first + 1
