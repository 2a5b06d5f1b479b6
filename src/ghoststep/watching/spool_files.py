"""The spool's dealings with the file system: whole writes, files that are replaced at once, and the lock of a rank's folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from pathlib import Path
from typing import Any

from ghoststep.errors import CannotLook, UsageError
from ghoststep.run_folder import LOCK, read_bounded, refuse_while_loading

logger = logging.getLogger("ghoststep.watch")


def _file_locks() -> Any:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    return fcntl


_FCNTL = _file_locks()
OPEN_FLAGS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def hold_lock(folder: Path) -> tuple[int, str]:
    """A descriptor that holds the lock of a rank's folder until it is closed, or its process ends in whatever way; and why it holds
    nothing, "" if it does (a file system without locks: logged). `UsageError` when another process holds it, or when it is a setup's
    file that trains while it is loaded."""
    refuse_while_loading(folder)
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o666)
    try:
        unlocked = _take(descriptor, path)
        if unlocked:
            logger.warning("%s: %s, so a second process that writes there would not be noticed.", folder, unlocked)
        os.ftruncate(descriptor, 0)
        write_all(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, unlocked


def _take(descriptor: int, path: Path) -> str:
    if _FCNTL is None:
        return "this system has no file locks"
    try:
        _FCNTL.flock(descriptor, _FCNTL.LOCK_EX | _FCNTL.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent} is being written by {_holder(path)}: wait for it, stop it, or name another folder (run_dir=)"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return f"its file system has no locks ({error.strerror})"
    return ""


def write_all(descriptor: int, data: bytes) -> None:
    """All of it; one `os.write` unless the system takes less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, data: bytes, *, sync: bool) -> None:
    """A file with these bytes; `sync` waits for the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN_FLAGS
    descriptor = os.open(path, flags, 0o666)
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """A reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write_file(temporary, data, sync=sync)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _holder(path: Path) -> str:
    """Who holds a lock, in words, as the lock file names it."""
    try:
        pid, _, host = read_bounded(path, 1000).decode(errors="replace").strip().partition(" ")
    except (OSError, CannotLook):
        pid = host = ""
    if not pid.isdigit():
        return "another process"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host!r}"
