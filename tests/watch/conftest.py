"""What the tests of the watch share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.local_hub import need_loopback


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone. Its rendezvous is in memory: a file's can hang."""
    import torch.distributed as dist

    need_loopback()
    if dist.is_initialized():
        pytest.skip("another test holds the process group")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()
