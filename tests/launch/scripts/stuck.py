"""Trains, then hangs in C code for good, where no Python handler of a signal can run: like a rank in a collective."""

from __future__ import annotations

import ctypes

from tests.launch.scripts.ending import train

train()
print("trained", flush=True)
mutex = ctypes.create_string_buffer(256)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
