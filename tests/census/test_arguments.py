"""What users write: folders, globs, lists, and mistakes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from ghoststep.census.arguments import collect, read_list
from ghoststep.errors import UsageError
from tests.census.fleet import Plan, write
from tests.local_hub import need_loopback


def test_globs_keep_folders_and_weight_files(tmp_path: Path) -> None:
    folder = write(Plan(name="b"), tmp_path)
    write(Plan(name="a"), tmp_path)
    (tmp_path / "README.md").write_text("read me")
    found = collect([f"{tmp_path}/*"])
    assert found.subjects == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.remarks == (f"{tmp_path}/*: 1 matching files are no weight files and are left out",)
    assert collect([f"{folder}/*"]).subjects == (str(folder / "model.safetensors"),)
    assert collect([f"{tmp_path}/**/*.safetensors"]).subjects == tuple(
        str(tmp_path / name / "model.safetensors") for name in ("a", "b")
    )


def test_a_path_with_brackets_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write(Plan(name="run[1]"), tmp_path)
    write(Plan(name="run1"), tmp_path)
    assert collect([str(folder)]).subjects == (str(folder),)


def test_a_glob_without_a_match_keeps_its_line(tmp_path: Path) -> None:
    assert collect([f"{tmp_path}/no*"]).subjects == (f"{tmp_path}/no*",)


def test_each_subject_counts_once(tmp_path: Path) -> None:
    folder = write(Plan(name="a"), tmp_path)
    (tmp_path / "link").symlink_to(folder)
    found = collect([str(folder), f"{folder}/", str(tmp_path / "link"), "hf:org/a", "hf:org/b", "hf:org/a"])
    assert found.subjects == (str(folder), "hf:org/a", "hf:org/b")
    assert found.remarks == ("3 subjects were named more than once and are counted once",)


def test_list_files(tmp_path: Path) -> None:
    path = tmp_path / "models.txt"
    path.write_text("\ufeff# fleet\n\n  hf:org/a@main  # pinned\nmodels/x#1\r\n#\n~/m\n", encoding="utf-8")
    assert read_list(path) == ("hf:org/a@main", "models/x#1", "~/m")
    assert collect(["first"], path).subjects == ("first", "hf:org/a@main", "models/x#1", "~/m")


def test_wrong_lists(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_list(tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_list(tmp_path / "bytes")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UsageError, match="nothing to count"):
        collect([], tmp_path / "empty")


class ModelList:
    """A Hub that lists models, so many a page; or answers with anything else."""

    def __init__(self, ids: list[str], *, page_size: int = 1_000, body: bytes | None = None, next_host: str = "") -> None:
        self.asked: list[str] = []
        place = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
                pass

            def do_GET(self) -> None:
                place.asked.append(self.path)
                start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
                answer = json.dumps([{"id": name} for name in ids[start : start + page_size]]).encode()
                self.send_response(200)
                if start + page_size < len(ids):
                    host = next_host or f"http://127.0.0.1:{place.port}"
                    self.send_header("Link", f'<{host}/api/models?author=org&cursor={start + page_size}>; rel="next"')
                self.send_header("Content-Length", str(len(answer if body is None else body)))
                self.end_headers()
                self.wfile.write(answer if body is None else body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    def __enter__(self) -> ModelList:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HF_TOKEN", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return monkeypatch


def test_an_organisation_by_name_pattern(online: pytest.MonkeyPatch) -> None:
    need_loopback()
    with ModelList(["org/small-b", "org/small-a", "org/large", "other/small-c"], page_size=3) as hub:
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
        assert collect(["hf:org/*"]).subjects == ("hf:org/large", "hf:org/small-a", "hf:org/small-b")
        assert hub.asked == ["/api/models?author=org&limit=1000", "/api/models?author=org&cursor=3"]
        assert collect(["hf:org/small-?"]).subjects == ("hf:org/small-a", "hf:org/small-b")
        with pytest.raises(UsageError, match="none of its 4 models"):
            collect(["hf:org/x*"])


@pytest.mark.parametrize("wrong", ["hf:*", "hf:*/name", "hf:org/*@main", "hf:org/a/*", "hf:o?g/*"])
def test_a_wildcard_in_the_wrong_place(wrong: str) -> None:
    with pytest.raises(UsageError, match="expected hf:org"):
        collect([wrong])


def test_an_organisation_that_cannot_be_listed(online: pytest.MonkeyPatch) -> None:
    need_loopback()
    cases = [
        (ModelList([f"org/m{i}" for i in range(1_001)], page_size=100), "more than 1000 models"),
        (ModelList([], body=b'{"error": 1}'), "no list of models"),
        (ModelList([], body=b"<html>"), "no list of models"),
        (ModelList(["org/a", "org/b"], page_size=1, next_host="http://127.0.0.1:1"), "on another host"),
        (ModelList([f"org/m{i}" for i in range(30)], page_size=1), "more than"),
    ]
    for hub, says in cases:
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
        with hub, pytest.raises(UsageError, match=says):
            collect(["hf:org/*"])
        assert len(hub.asked) <= 20
    with pytest.raises(UsageError, match="offline"):
        collect(["hf:org/*"], offline=True)
