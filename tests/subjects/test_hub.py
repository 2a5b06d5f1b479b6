"""HubSource against a loopback Hub: what travels, who gets the token, and what each fault says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.local_hub import Fault, LocalHub

from ghoststep.errors import CannotLook, GhoststepError, SubjectError, UnsafeInput
from ghoststep.subjects.http_answers import HttpRefused
from ghoststep.subjects.http_connection import HttpLimits, Origin
from ghoststep.subjects.http_ranges import RangeClient
from ghoststep.subjects.hub import HubSource
from ghoststep.subjects.hub_listing import RepoSpec

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FAST = HttpLimits(timeout_seconds=0.4, first_backoff_seconds=0.01, max_wait_seconds=3.0, chunk_bytes=1 << 18)
TOKEN = "hf_testtoken"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as server:
        server.add("org/name", {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "empty.txt": b""})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)


# what travels


def sent_by(hub: LocalHub, expected: int) -> int:
    """Body bytes that the server counts, once it has: its thread counts a piece after the client may already have it."""
    deadline = time.monotonic() + 5
    while hub.body_bytes_sent < expected and time.monotonic() < deadline:
        time.sleep(0.005)
    return hub.body_bytes_sent


def test_reads_exactly_the_bytes_asked_for(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    assert source.files() == ("config.json", "empty.txt", "model.safetensors")
    assert source.size("model.safetensors") == len(WEIGHTS)
    before, requests = source.bytes_received, source.num_requests
    assert bytes(source.read("model.safetensors", 1000, 1010)) == WEIGHTS[1000:1010]
    assert source.bytes_received - before == 10
    assert source.num_requests - requests == 1
    assert source.bytes_received == sent_by(hub, source.bytes_received)
    assert source.num_requests == len(hub.seen)
    assert source.read("model.safetensors", 5, 5) == b""
    assert source.read_whole("empty.txt", limit_bytes=10) == b""


def test_large_reads_are_split_and_put_together_in_order(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    data = source.read("model.safetensors", 3, len(WEIGHTS) - 1)
    assert bytes(data) == WEIGHTS[3:-1]
    assert isinstance(data, memoryview)
    assert data.readonly
    ranges = [seen.range for seen in hub.files_seen()[1:]]
    assert sorted(ranges, key=str)[0] == f"bytes=262147-{2 * 262144 + 2}"
    assert len(ranges) == 4


def test_config_is_read_once_and_bounded(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    requests = source.num_requests
    assert source.read_whole("config.json", limit_bytes=100) == b'{"a": 1}'
    assert source.num_requests == requests
    with pytest.raises(CannotLook, match="more than the 4"):
        source.read_whole("config.json", limit_bytes=4)
    with pytest.raises(CannotLook, match=r"no file absent\.json"):
        source.read_whole("absent.json", limit_bytes=4)
    with pytest.raises(CannotLook, match="truncated"):
        source.read("model.safetensors", 0, len(WEIGHTS) + 1)


def test_one_connection_serves_small_reads(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    started = time.monotonic()
    for start in range(50):
        assert bytes(source.read("model.safetensors", start, start + 8)) == WEIGHTS[start : start + 8]
    assert time.monotonic() - started < 2.0
    source.close()
    assert bytes(source.read("model.safetensors", 0, 2)) == WEIGHTS[:2]


def test_a_read_is_bounded_in_memory(hub: LocalHub) -> None:
    hub.tree_override = [{"type": "file", "path": "model.safetensors", "size": 1 << 40}]
    source = HubSource("org/name", limits=FAST)
    with pytest.raises(CannotLook, match="read it in blocks"):
        source.read("model.safetensors", 0, 1 << 40)


# pinned revision


def test_a_moving_branch_cannot_mix_revisions(hub: LocalHub) -> None:
    source = HubSource("org/name@main", limits=FAST)
    old = source.sha
    new = hub.add("org/name", {"config.json": b"{}", "model.safetensors": bytes(len(WEIGHTS))})
    assert new != old
    assert bytes(source.read("model.safetensors", 7, 9)) == WEIGHTS[7:9]
    assert all(f"/resolve/{old}/" in seen.path for seen in hub.files_seen())
    assert source.name == f"org/name@{old[:7]} (main)"
    assert HubSource("org/name", limits=FAST).name == f"org/name@{new[:7]}"
    assert HubSource(f"org/name@{old}", limits=FAST).sha == old


def test_branch_with_a_slash_and_paged_list(hub: LocalHub) -> None:
    hub.add("org/name", {f"part-{number}.bin": b"x" for number in range(7)}, branch="refs/pr/1")
    hub.page_entries = 3
    source = HubSource("org/name@refs/pr/1", limits=FAST)
    assert len(source.files()) == 7
    assert len([seen for seen in hub.seen if "/tree/" in seen.path]) == 3


@pytest.mark.parametrize("error_codes", [True, False])
def test_missing_model_revision_and_file_are_told_apart(hub: LocalHub, error_codes: bool) -> None:
    hub.error_codes = error_codes
    with pytest.raises(SubjectError, match="no such model"):
        HubSource("org/absent", limits=FAST)
    with pytest.raises(SubjectError, match="no such model"):
        HubSource("org/absent@v1", limits=FAST)
    with pytest.raises(SubjectError, match="the model exists, the revision 'v9' does not"):
        HubSource("org/name@v9", limits=FAST)
    source = HubSource("org/name", limits=FAST)
    del hub.repos["org/name"].commits[source.sha]["model.safetensors"]
    with pytest.raises(CannotLook, match=r"no file model\.safetensors at this commit"):
        source.read("model.safetensors", 0, 1)


@pytest.mark.parametrize(
    "spec", ["", "a/b/c", "../x", "org/na me", "org/name@", "org/name@../x", "org/name@a b", "org/..", "a\n/b"]
)
def test_bad_specs(spec: str) -> None:
    with pytest.raises(SubjectError, match="expected hf:"):
        RepoSpec.parse(spec)


# Range ignored, lies, broken connections


def test_server_that_ignores_range_is_refused_unread(hub: LocalHub) -> None:
    hub.add("org/name", {"config.json": b"{}", "model.safetensors": bytes(96 << 20)})
    hub.ranges = False
    source = HubSource("org/name", limits=FAST)
    received, sent = source.bytes_received, hub.body_bytes_sent
    with pytest.raises(CannotLook, match="ignores Range"):
        source.read("model.safetensors", 0, 8)
    time.sleep(0.1)
    assert source.bytes_received == received
    assert hub.body_bytes_sent - sent < 24 << 20  # what fits into the two socket buffers, not the file
    assert source.read_whole("config.json", limit_bytes=10) == b"{}"


@pytest.mark.parametrize(
    ("content_range", "message"),
    [
        ("bytes 0-9/1048576", "the server sent 0 to 9"),
        ("bytes 99-109/1048576", "the server sent 99 to 109"),
        ("bytes 100-110/1048576", "the server sent 100 to 110"),
        ("bytes 100-99/1048576", "the server sent 100 to 99"),
        ("bytes 100-109/99", "file list says 1048576 bytes, the server says 99"),
        ("bytes 100-104/1048576", "disagree"),
        ("bytes 1000000000000000000000-9/9", "Content-Range"),
        ("nonsense", "Content-Range"),
    ],
)
def test_content_range_that_lies(hub: LocalHub, content_range: str, message: str) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(Fault(content_range=content_range))
    with pytest.raises(CannotLook, match=message):
        source.read("model.safetensors", 100, 110)
    assert bytes(source.read("model.safetensors", 100, 110)) == WEIGHTS[100:110]


def test_encoded_bytes_are_refused(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(Fault(headers={"Content-Encoding": "gzip"}))
    with pytest.raises(CannotLook, match="'gzip'-encoded"):
        source.read("model.safetensors", 0, 10)


def test_dropped_connection_goes_on_where_it_broke(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults += [Fault(send_bytes=100_000), Fault(close_before=True), Fault(send_bytes=50_000)]
    received = source.bytes_received
    assert bytes(source.read("model.safetensors", 10, 200_010)) == WEIGHTS[10:200_010]
    starts = [int(str(seen.range).removeprefix("bytes=").split("-")[0]) for seen in hub.files_seen()[1:]]
    assert starts[0] == 10
    assert 100_010 in starts
    assert starts[-1] == 150_010
    assert source.bytes_received - received == 200_000  # nothing twice


def test_a_stall_in_the_middle_goes_on_where_it_stopped(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(Fault(stall_seconds=5.0, stall_after_bytes=70_000))
    received = source.bytes_received
    assert bytes(source.read("model.safetensors", 10, 200_010)) == WEIGHTS[10:200_010]
    assert hub.files_seen()[-1].range == "bytes=70010-200009"
    assert source.bytes_received - received == 200_000


def test_drops_for_ever_are_bounded(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults += [Fault(send_bytes=1)] * 50
    with pytest.raises(CannotLook, match="given up after 5 tries"):
        source.read("model.safetensors", 0, 1000)
    assert len(hub.faults) == 45


def test_one_failing_range_stops_the_others(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults += [Fault(status=500)] * 50
    with pytest.raises(HttpRefused, match="500"):
        source.read("model.safetensors", 0, len(WEIGHTS))
    assert len(hub.faults) >= 30


@pytest.mark.parametrize("fault", [Fault(stall_seconds=5.0), Fault(trickle_seconds=0.1)])
def test_stall_and_trickle_are_given_up_and_resumed(hub: LocalHub, fault: Fault) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(fault)
    started = time.monotonic()
    assert bytes(source.read("model.safetensors", 0, 5000)) == WEIGHTS[:5000]
    assert 0.3 < time.monotonic() - started < 2.5
    hub.faults += [fault] * 20
    with pytest.raises(CannotLook, match="given up after 5 tries"):
        source.read("model.safetensors", 0, 5000)
    assert time.monotonic() - started < 8.0


def test_headers_that_trickle_are_given_up(hub: LocalHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopping = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not stopping.wait(0.02):
                    connection.sendall(b"x")

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = RangeClient(url, token=None, user_agent="t", limits=HttpLimits(timeout_seconds=0.3, num_tries=1))
        started = time.monotonic()
        with pytest.raises(CannotLook, match="given up after 1 tries"):
            client.page(url, limit_bytes=10)
        assert time.monotonic() - started < 2.0
        stopping.set()


def test_server_errors_are_tried_again(hub: LocalHub) -> None:
    hub.api_faults.append(Fault(status=503))
    hub.api_faults.append(Fault(close_before=True))
    source = HubSource("org/name", limits=FAST)
    hub.faults += [Fault(status=502), Fault(status=500)]
    assert bytes(source.read("model.safetensors", 0, 4)) == WEIGHTS[:4]
    assert source.waited_seconds == pytest.approx(0.01 + 0.02 + 0.01 + 0.02)


# 429


def test_retry_after_seconds_and_date(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(Fault(status=429, headers={"Retry-After": "1"}))
    started = time.monotonic()
    assert bytes(source.read("model.safetensors", 0, 4)) == WEIGHTS[:4]
    assert 1.0 <= time.monotonic() - started < 3.0
    hub.faults.append(Fault(status=429, headers={"Retry-After": formatdate(time.time() + 2, usegmt=True)}))
    started = time.monotonic()
    assert bytes(source.read("model.safetensors", 0, 4)) == WEIGHTS[:4]
    assert 0.5 < time.monotonic() - started < 3.0


def test_retry_after_beyond_the_limit_is_not_waited_for(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults.append(Fault(status=429, headers={"Retry-After": "3600"}))
    started = time.monotonic()
    with pytest.raises(CannotLook, match=r"asks to wait 3600 s.*at most 3 s.*hf auth login"):
        source.read("model.safetensors", 0, 4)
    assert time.monotonic() - started < 1.0
    hub.api_faults.append(Fault(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(SubjectError, match="limits the rate"):
        HubSource("org/name", limits=FAST)


# who gets the token


def test_gated_and_private_say_what_to_do(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"].token = TOKEN
    with pytest.raises(SubjectError, match=r"org/name: gated or private.*licence.*hf auth login.*HF_TOKEN"):
        HubSource("org/name", limits=FAST)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_wrong")
    with pytest.raises(SubjectError, match="gated or private: the Hub answered 403"):
        HubSource("org/name", limits=FAST)
    hub.repos["org/name"].needs_token_to_list = True
    with pytest.raises(SubjectError, match="gated or private: the Hub answered 401"):
        HubSource("org/name", limits=FAST)
    log_in(monkeypatch)
    source = HubSource("org/name", limits=FAST)
    assert bytes(source.read("model.safetensors", 0, 4)) == WEIGHTS[:4]


def test_the_token_never_reaches_another_host(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch)
    hub.repos["org/name"].token = TOKEN
    with LocalHub() as store:
        store.repos = hub.repos
        hub.redirect_to = store.url
        source = HubSource("org/name", limits=FAST)
        assert bytes(source.read("model.safetensors", 0, 400_000)) == WEIGHTS[:400_000]
        assert store.seen
        assert all(seen.authorization is None for seen in store.seen)
        assert all(seen.authorization == f"Bearer {TOKEN}" for seen in hub.seen)
        num_asked = len(hub.files_seen())
        assert bytes(source.read("model.safetensors", 9, 12)) == WEIGHTS[9:12]
        assert len(hub.files_seen()) == num_asked  # the second read goes straight to where the first was sent
        store.faults.append(Fault(status=403))  # the signed address has run out
        assert bytes(source.read("model.safetensors", 9, 12)) == WEIGHTS[9:12]
        assert len(hub.files_seen()) == num_asked + 1
        store.faults += [Fault(status=403), Fault(status=403)]
        with pytest.raises(CannotLook) as caught:
            source.read("model.safetensors", 9, 12)
        assert "secret" not in str(caught.value)
        assert TOKEN not in str(caught.value)


def test_redirects_are_bounded_and_stay_http(hub: LocalHub) -> None:
    source = HubSource("org/name", limits=FAST)
    hub.faults += [Fault(status=302, headers={"Location": "/org/name/resolve/x/y"})] * 20
    with pytest.raises(CannotLook, match="more than 5 redirects"):
        source.read("model.safetensors", 0, 4)
    assert len(hub.faults) == 14
    for location in ("file:///etc/passwd", "ftp://host/x", "http://[bad"):
        hub.faults.clear()
        hub.faults.append(Fault(status=302, headers={"Location": location}))
        with pytest.raises(UnsafeInput):
            source.read("model.safetensors", 0, 4)
    hub.faults.append(Fault(status=302))
    with pytest.raises(CannotLook, match="without a Location"):
        source.read("model.safetensors", 0, 4)


def test_redirect_from_https_to_http_is_refused(monkeypatch: pytest.MonkeyPatch, hub: LocalHub) -> None:
    client = RangeClient("https://hub.example", token=TOKEN, user_agent="t", limits=FAST)
    asked: list[str] = []
    real_get = client._connections.get

    def get(url: str, headers: tuple[tuple[str, str], ...]) -> object:
        asked.append(url)
        return real_get(hub.url + "/org/name/resolve/x/y", headers)  # stands for a TLS server

    monkeypatch.setattr(type(client._connections), "get", lambda _, url, headers: get(url, headers))
    hub.faults.append(Fault(status=302, headers={"Location": hub.url + "/elsewhere"}))
    with pytest.raises(UnsafeInput, match="from https to plain http"):
        client.fill("https://hub.example/f", memoryview(bytearray(4)), 0, total_bytes=4)
    assert asked == ["https://hub.example/f"]


def test_origin_tells_port_and_scheme_apart() -> None:
    assert Origin.of("https://host/x") == Origin.of("https://HOST:443/y")
    assert Origin.of("https://host/x") != Origin.of("http://host/x")
    assert Origin.of("https://host/x") != Origin.of("https://host:444/x")
    assert Origin.of("https://host@evil.example/x").host == "evil.example"


def test_token_with_a_line_break_is_refused_without_showing_it(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret\r\nX: y")
    with pytest.raises(SubjectError, match="unprintable") as caught:
        HubSource("org/name", limits=FAST)
    assert "hf_secret" not in str(caught.value)


# lists from strangers


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "../x", "size": 1},
        {"type": "file", "path": "/etc/passwd", "size": 1},
        {"type": "file", "path": "a//b", "size": 1},
        {"type": "file", "path": "..\\x", "size": 1},
        {"type": "file", "path": "x", "size": -1},
        {"type": "file", "path": "x", "size": 1 << 60},
        {"type": "file", "path": "x", "size": "1"},
        {"type": "file", "path": 5, "size": 1},
    ],
)
def test_hostile_file_lists(hub: LocalHub, entry: dict[str, object]) -> None:
    hub.tree_override = [entry]
    with pytest.raises(UnsafeInput):
        HubSource("org/name", limits=FAST)
    assert hub.files_seen() == []


@pytest.mark.parametrize("body", [b"{", b"[1]", b"[" * 100_000, b'{"sha": "../../x"}', b'{"sha": null}', b"x" * 5000])
def test_answers_that_are_not_what_they_should_be(hub: LocalHub, body: bytes) -> None:
    hub.api_faults.append(Fault(status=200, body=body))
    with pytest.raises(GhoststepError):
        HubSource("org/name", limits=HttpLimits(max_listing_bytes=4000))


def test_listing_is_bounded_even_without_a_length(hub: LocalHub) -> None:
    hub.api_faults.append(Fault(status=200, body=b" " * 3_000_000, headers={}))
    with pytest.raises(UnsafeInput, match="larger than 10000 bytes"):
        HubSource("org/name", limits=HttpLimits(max_listing_bytes=10_000))


def test_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalHub() as gone:
        url = gone.url
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(SubjectError, match="cannot ask the Hub"):
        HubSource("org/name", limits=FAST)


# offline


def cache(folder: Path, *, sha: str = "a" * 40) -> None:
    repo = folder / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(sha)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "1234").write_bytes(b'{"cached": 1}')
    (repo / "snapshots" / sha).mkdir(parents=True)
    (repo / "snapshots" / sha / "config.json").symlink_to(Path("../../blobs/1234"))


@pytest.mark.parametrize("by_variable", [True, False])
def test_offline_uses_the_cache_and_nothing_else(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SubjectError, match=r"offline, and revision 'main' is not in the local cache.*hf download org/name"):
        HubSource("org/name", offline=not by_variable)
    cache(tmp_path / "hf-cache")
    for spec in ("org/name", "org/name@main", "org/name@" + "a" * 40, "org/name@aaaaaaa"):
        source = HubSource(spec, offline=not by_variable)
        assert source.files() == ("config.json",)
        assert source.sha == "a" * 40
        assert source.read_whole("config.json", limit_bytes=100) == b'{"cached": 1}'
        assert (source.num_requests, source.bytes_received) == (0, 0)
    with pytest.raises(CannotLook, match=r"model\.safetensors is not in the local cache"):
        source.read("model.safetensors", 0, 1)
    with pytest.raises(SubjectError, match="revision 'v2' is not in the local cache"):
        HubSource("org/name@v2", offline=not by_variable)
    assert hub.seen == []


def test_a_ref_that_points_outside_is_not_followed(tmp_path: Path) -> None:
    cache(tmp_path / "hf-cache")
    (tmp_path / "hf-cache" / "models--org--name" / "refs" / "main").write_text("../../../../etc")
    with pytest.raises(SubjectError, match="offline"):
        HubSource("org/name", offline=True)


def test_a_proxy_is_used_and_may_be_bypassed(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", hub.url.replace("http://", "http://user:p%40ss@"))
    monkeypatch.setenv("no_proxy", "")
    source = HubSource("org/name", limits=FAST)
    assert bytes(source.read("model.safetensors", 1, 3)) == WEIGHTS[1:3]
    monkeypatch.setenv("no_proxy", "hub.invalid")
    with pytest.raises(SubjectError, match="cannot ask the Hub"):
        HubSource("org/name", limits=FAST)


# a sharded checkpoint, end to end


def sharded_files() -> tuple[dict[str, bytes], int]:
    """A 4-shard checkpoint, and the bytes that its tables, headers, index, config and tokenizer hold."""
    import json

    import numpy as np
    from safetensors.numpy import save

    random = np.random.default_rng(0)
    num_rows, num_dims = 3000, 64
    layer = {f"model.layers.{number}.mlp.up_proj.weight": (num_dims, 4 * num_dims) for number in range(40)}
    shapes = {"model.embed_tokens.weight": (num_rows, num_dims), **layer, "lm_head.weight": (num_rows, num_dims)}
    shards: list[dict[str, np.ndarray]] = [{}, {}, {}, {}]
    for place, (name, shape) in enumerate(shapes.items()):
        shards[place * 4 // len(shapes)][name] = random.standard_normal(shape, dtype=np.float32)
    names = [f"model-{number}-of-00004.safetensors" for number in range(1, 5)]
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    files = {name: save(shard) for name, shard in zip(names, shards, strict=True)}
    wanted = sum(8 + int.from_bytes(body[:8], "little") for body in files.values()) + 2 * num_rows * num_dims * 4
    config = {"model_type": "llama", "vocab_size": num_rows, "hidden_size": num_dims, "tie_word_embeddings": False}
    vocabulary = {f"t{number}": number for number in range(num_rows)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}
    text = {"config.json": config, "tokenizer.json": tokenizer, "model.safetensors.index.json": {"weight_map": weight_map}}
    files |= {name: json.dumps(body).encode() for name, body in text.items()}
    return files, wanted + sum(len(files[name]) for name in text)


TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def test_four_shards_cost_their_tables_and_headers(hub: LocalHub) -> None:
    from ghoststep.subjects.containers.safetensors_file import SafetensorsFiles
    from ghoststep.subjects.containers.sharded import read_index

    files, wanted_bytes = sharded_files()
    hub.add("org/sharded", files)
    source = HubSource("org/sharded", limits=FAST)
    index = read_index(source, "model.safetensors.index.json")
    container = SafetensorsFiles(source, index.shards)
    for table in TABLES:
        store = container.rows(table)
        blocks = [bytes(store.raw_rows(at, min(at + 700, store.num_rows))) for at in range(0, store.num_rows, 700)]
        assert b"".join(blocks) in files[index.weight_map[table]]
    for file in ("config.json", "tokenizer.json"):
        assert source.read_whole(file, limit_bytes=1 << 20) == files[file]
    assert source.bytes_received == sent_by(hub, source.bytes_received)
    assert wanted_bytes <= source.bytes_received <= 1.05 * wanted_bytes
    assert source.bytes_received < 0.5 * sum(map(len, files.values()))
    # commit, list, config, index, tokenizer; two reads a header; five blocks a table, none over one range
    assert source.num_requests == 5 + 2 * 4 + 2 * 5


def test_open_checkpoint_over_the_hub(hub: LocalHub) -> None:
    from ghoststep.subjects.checkpoint import open_checkpoint

    files, wanted_bytes = sharded_files()
    hub.add("org/sharded", files)
    checkpoint = open_checkpoint("hf:org/sharded")
    assert set(checkpoint.stored().tensors) >= set(TABLES)
    for table in TABLES:
        store = checkpoint.rows(table)
        for at in range(0, store.num_rows, 700):
            store.raw_rows(at, min(at + 700, store.num_rows))
    config = checkpoint.read_json("config.json")
    assert config is not None
    assert config["hidden_size"] == 64
    assert checkpoint.read_bytes("tokenizer.json") == files["tokenizer.json"]
    assert checkpoint.read_json("absent.json") is None
    assert isinstance(checkpoint.source, HubSource)
    assert wanted_bytes <= checkpoint.source.bytes_received <= 1.05 * wanted_bytes
