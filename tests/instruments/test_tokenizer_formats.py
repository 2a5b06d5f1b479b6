"""Every tokenizer format beside tokenizer.json: it classifies ids as the tokenizer that it was written from."""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ghoststep.errors import CannotLook
from ghoststep.evidence.tokenizer import Reach
from ghoststep.instruments import tokenizer as instruments
from ghoststep.instruments.reachability import classify
from ghoststep.instruments.tokenizers import base, gguf_vocab, locate
from ghoststep.subjects.checkpoint import Checkpoint, open_checkpoint
from tests.assets import need, pypi
from tests.instruments import tokenizer_builders as build


def load(checkpoint: Checkpoint) -> base.Tokenizer:
    found = instruments.loaded_tokenizer(checkpoint)
    assert isinstance(found, base.Tokenizer)
    return found


def reach(tokenizer: base.Tokenizer) -> dict[int, Reach]:
    return dict(classify(tokenizer, range(tokenizer.max_id + 1)).reach)


class TestOlderFiles:
    def test_vocab_txt_equals_the_same_tokenizer_json(self, tmp_path: Path) -> None:
        plain = build.word_piece()
        lines = [s for s, _ in sorted(plain.get_vocab().items(), key=lambda item: item[1])]
        config = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
        tokenizer = load(build.folder(tmp_path, files={"vocab.txt": "\n".join(lines) + "\n", "tokenizer_config.json": config}))
        assert tokenizer.prefix_ids == (2,)
        assert tokenizer.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
        strings = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        assert reach(tokenizer) == reach(build.wrapped(plain, strings=strings))

    def test_vocab_txt_cased(self, tmp_path: Path) -> None:
        files = {"vocab.txt": "[UNK]\nFox\nf", "tokenizer_config.json": {"do_lower_case": False}}
        assert reach(load(build.folder(tmp_path / "cased", files=files)))[1] is Reach.REACHABLE
        files["tokenizer_config.json"] = {}
        assert reach(load(build.folder(tmp_path / "uncased", files=files)))[1] is Reach.UNREACHABLE

    def test_vocab_txt_of_something_else(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match="no unknown token"):
            load(build.folder(tmp_path, files={"vocab.txt": "a\nb", "tokenizer_config.json": {}}))

    def test_vocab_json_and_merges(self, tmp_path: Path) -> None:
        plain = build.byte_level()
        data = json.loads(plain.to_str())["model"]
        merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in data["merges"])
        config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "additional_special_tokens": build.SPECIALS[1:]}
        files = {"vocab.json": data["vocab"], "merges.txt": merges, "tokenizer_config.json": config}
        assert reach(load(build.folder(tmp_path, files=files))) == reach(build.wrapped(plain))

    @pytest.mark.parametrize(("token", "name"), [("a</w>", "GPT2Tokenizer"), ("a", "Qwen2Tokenizer")])
    def test_vocab_json_that_is_cut_in_another_way(self, tmp_path: Path, token: str, name: str) -> None:
        files = {"vocab.json": {token: 0}, "merges.txt": "", "tokenizer_config.json": {"tokenizer_class": name}}
        with pytest.raises(CannotLook, match=r"get a tokenizer\.json"):
            load(build.folder(tmp_path, files=files))


def gguf_of(tokenizer: Tokenizer, *, pre: str = "gpt-2") -> dict[str, object]:
    """The key-values that a converter writes for a byte-level tokenizer."""
    data = json.loads(tokenizer.to_str())["model"]
    tokens = [s for s, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(3 if t in build.SPECIALS else 1 for t in tokens),
        "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in data["merges"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }


class TestGguf:
    def test_byte_level_equals_the_tokenizer_it_came_from(self) -> None:
        plain = build.byte_level()
        tokenizer = load(build.MetadataOnly(gguf_of(plain)))
        assert reach(tokenizer) == reach(build.wrapped(plain))
        vocabulary = instruments.vocabulary(tokenizer)
        assert (vocabulary.file, vocabulary.special_ids) == ("GGUF metadata", {"bos": 1, "eos": 0})
        assert (vocabulary.bos_is_added, vocabulary.prefix_ids) == (False, ())
        added = load(build.MetadataOnly({**gguf_of(plain), "tokenizer.ggml.add_bos_token": True}))
        assert added.prefix_ids == (1,)

    def test_the_digit_splitting_kind(self) -> None:
        plain = build.byte_level()
        digits = [i for s, i in plain.get_vocab().items() if s.isdigit() and len(s) > 1]
        assert digits, "the training text has numbers"
        assert not {reach(load(build.MetadataOnly(gguf_of(plain))))[i] for i in digits} - {Reach.REACHABLE}
        found = classify(load(build.MetadataOnly(gguf_of(plain, pre="smollm"))), digits)
        assert set(found.causes.values()) == {"cut by the pre-tokenizer"}

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"tokenizer.ggml.pre": "brand-new"}, "'brand-new'; how it cuts text is known only for"),
            ({"tokenizer.ggml.model": "t5"}, "is 't5'"),
            ({"tokenizer.ggml.model": "bert"}, "is 'bert'"),
        ],
    )
    def test_unknown_kinds_have_sizes_but_no_answer(self, change: dict[str, object], match: str) -> None:
        plain = build.byte_level()
        tokenizer = load(build.MetadataOnly({**gguf_of(plain), **change}))
        vocabulary = instruments.vocabulary(tokenizer)
        assert (vocabulary.num_tokens, vocabulary.special_ids["bos"]) == (build.size_of(plain), 1)
        assert vocabulary.added_special == {0, 1, 2}
        with pytest.raises(CannotLook, match=match):
            instruments.vocabulary_reach(tokenizer)

    @pytest.mark.parametrize(
        "change",
        [
            {"tokenizer.ggml.token_type": (1, 2)},
            {"tokenizer.ggml.tokens": "no list"},
            {"tokenizer.ggml.tokens": ()},
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": (0.0,)},
            {"tokenizer.ggml.merges": ("never there",)},
        ],
    )
    def test_nonsense(self, change: dict[str, object]) -> None:
        with pytest.raises(CannotLook):
            instruments.vocabulary_reach(load(build.MetadataOnly({**gguf_of(build.byte_level()), **change})))

    def test_two_ids_of_one_string(self) -> None:
        meta: dict[str, Any] = gguf_of(build.byte_level())
        meta["tokenizer.ggml.tokens"] += ("a",)
        meta["tokenizer.ggml.token_type"] += (1,)
        tokenizer = load(build.MetadataOnly(meta))
        twin = tokenizer.max_id
        first = meta["tokenizer.ggml.tokens"].index("a")
        found = classify(tokenizer, [first, twin])
        assert found.reach == {first: Reach.REACHABLE, twin: Reach.UNREACHABLE}

    def test_scores(self) -> None:
        """SentencePiece's merging by score: "ab" wins over "bc", so that "bc" comes out only where no a stands before it."""
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a", "xyz"]
        types = [2, 3, 3, *[6] * 256, *[1] * 8]
        scores = [0.0] * 259 + [-9.0, -10.0, -11.0, -12.0, -1.0, -2.0, -3.0, -4.0]
        meta: dict[str, object] = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tuple(pieces),
            "tokenizer.ggml.token_type": tuple(types),
            "tokenizer.ggml.scores": tuple(scores),
            "tokenizer.ggml.bos_token_id": 1,
        }
        tokenizer = load(build.MetadataOnly(meta))
        assert tokenizer.prefix_ids == (1,), "llama.cpp adds it unless the file says no"
        assert [tokenizer.pieces[i] for i in tokenizer.need_backend().encode(["abc"])[0].ids] == ["▁", "ab", "c"]
        found = classify(tokenizer, range(256 + 3, len(pieces)))
        assert {pieces[i]: cause for i, cause in found.causes.items()} == {"xyz": "the merges never build it"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sp") / "m"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(build.TEXT).split("\n")),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return prefix.with_suffix(".model").read_bytes()


class TestRanksAndSentencePiece:
    def tekken(self) -> dict[str, object]:
        raw = [bytes([b]) for b in range(256)] + [b"ab", b"12", "é".encode()[:1] + b"x", b"cut off"]
        vocab = [{"rank": n, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for n, t in enumerate(raw)]
        config = {"pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]+", "default_vocab_size": 10 + 259, "default_num_special_tokens": 10}
        special = [{"rank": 1, "token_str": "<s>", "is_control": True}]
        return {"config": config, "vocab": vocab, "special_tokens": special}

    def test_tekken(self, tmp_path: Path) -> None:
        pytest.importorskip("tiktoken")
        tokenizer = load(build.folder(tmp_path, files={"tekken.json": self.tekken()}))
        assert (tokenizer.max_id, tokenizer.special_ids) == (268, {"bos": 1})
        found = classify(tokenizer, range(269))
        assert [found.reach[i] for i in (1, 10 + 97, 10 + 256, 10 + 257, 10 + 258)] == [
            Reach.SPECIAL,
            Reach.REACHABLE,
            Reach.REACHABLE,
            Reach.UNREACHABLE,
            Reach.PARTIAL_UTF8,
        ]
        assert found.causes == {10 + 257: "cut by the pre-tokenizer"}

    @pytest.mark.parametrize("change", [{"config": None}, {"vocab": [{"rank": 0}]}, {"config": {"default_vocab_size": -1}}])
    def test_broken_tekken(self, tmp_path: Path, change: dict[str, object]) -> None:
        with pytest.raises(CannotLook, match=r"tekken\.json"):
            load(build.folder(tmp_path, files={"tekken.json": {**self.tekken(), **change}}))

    def test_ranks_without_a_pattern(self, tmp_path: Path) -> None:
        lines = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))
        tokenizer = load(build.folder(tmp_path, files={"tokenizer.model": lines}))
        assert instruments.vocabulary(tokenizer).num_tokens == 256
        with pytest.raises(CannotLook, match="not the pattern that cuts text"):
            instruments.vocabulary_reach(tokenizer)
        with pytest.raises(CannotLook, match="line 3 is not base64"):
            load(build.folder(tmp_path / "broken", files={"tokenizer.model": b"IQ== 0\nIg== 1\n!!! x\n"}))

    def test_sentencepiece(self, tmp_path: Path, model: bytes) -> None:
        config = {"add_bos_token": True, "bos_token": "<s>"}
        tokenizer = load(build.folder(tmp_path, files={"tokenizer.model": model, "tokenizer_config.json": config}))
        assert tokenizer.special_ids == {"bos": 1, "eos": 2, "unk": 0}
        assert (tokenizer.prefix_ids, tokenizer.bos_is_added) == ((1,), True)
        found = classify(tokenizer, range(480))
        by_class = {r: [tokenizer.pieces[i] for i in found.reach if found.reach[i] is r] for r in Reach}
        assert by_class[Reach.SPECIAL] == ["<unk>", "<s>", "</s>"]
        assert len(by_class[Reach.PARTIAL_UTF8]) == 128
        assert all(p.startswith("<0x") for p in by_class[Reach.UNREACHABLE])
        assert "<tool>" in by_class[Reach.REACHABLE]
        assert "▁the" in by_class[Reach.REACHABLE]

    def test_sentencepiece_is_optional(self, tmp_path: Path, model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
        with pytest.raises(CannotLook, match=r"pip install -U sentencepiece"):
            load(build.folder(tmp_path, files={"tokenizer.model": model}))

    def test_a_broken_sentencepiece_model(self, tmp_path: Path) -> None:
        pytest.importorskip("sentencepiece")
        with pytest.raises(CannotLook, match=r"tokenizer\.model"):
            load(build.folder(tmp_path, files={"tokenizer.model": b"\x0a\xff\xff\xff\xff\x07nothing"}))


@pytest.mark.network
def test_scores_agree_with_sentencepiece(tmp_path: Path) -> None:
    """A real SentencePiece model written as GGUF key-values encodes and classifies as the library itself does."""
    sentencepiece = pytest.importorskip("sentencepiece")
    data = need(pypi, "mistral-common", "1.13.1") / "mistral_common" / "data"
    (tmp_path / "tokenizer.model").write_bytes((data / "tokenizer.model.v1").read_bytes())
    p = sentencepiece.SentencePieceProcessor()
    p.load(str(tmp_path / "tokenizer.model"))
    size = range(p.get_piece_size())
    kinds = [2 if p.is_unknown(i) else 3 if p.is_control(i) else 6 if p.is_byte(i) else 1 for i in size]
    prefix = "tokenizer.ggml."
    meta: dict[str, object] = {
        prefix + "model": "llama",
        prefix + "tokens": tuple(p.id_to_piece(i) for i in size),
        prefix + "scores": tuple(p.get_score(i) for i in size),
        prefix + "token_type": tuple(kinds),
    }
    ours = gguf_vocab.load(build.MetadataOnly(meta))
    theirs = locate.locate(open_checkpoint(str(tmp_path)))
    assert ours is not None
    text = "\n".join(build.TEXT)
    assert list(ours.need_backend().encode([text])[0].ids) == list(theirs.need_backend().encode([text])[0].ids)
    ids = random.Random(0).sample(size, 2000)
    assert classify(ours, ids).reach == classify(theirs, ids).reach
