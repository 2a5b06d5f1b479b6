"""The older sets of files: `vocab.txt` (WordPiece) and `vocab.json` + `merges.txt` (byte-level BPE of GPT-2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.instruments.tokenizers.base import MAX_FILE_BYTES, Tokenizer, guarded
from ghoststep.instruments.tokenizers.hf_backend import wrap
from ghoststep.instruments.tokenizers.special_ids import NamedSpecials

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

SAVE = "save it once with transformers (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`) to get a tokenizer.json"
BERT_DEFAULTS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
GPT2_PRETOKENIZED = (None, "GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer")
"""Tokenizer classes whose two files mean GPT-2's own pre-tokenizer. Others share the files and cut text in another way."""


def load_wordpiece(checkpoint: Checkpoint, named: NamedSpecials, config: Mapping[str, object]) -> Tokenizer | None:
    """`vocab.txt` with the switches of tokenizer_config.json (`do_lower_case` is true unless said otherwise)."""
    import tokenizers as hf
    from tokenizers import models, normalizers, pre_tokenizers, processors

    text = _text(checkpoint, "vocab.txt")
    if text is None:
        return None
    vocab = {line.rstrip("\r"): n for n, line in enumerate(text.split("\n")) if line.rstrip("\r")}
    strings = {r: s for r, s in {**BERT_DEFAULTS, **named.strings}.items() if s in vocab}
    if "unk" not in strings:
        raise CannotLook(
            f"vocab.txt: no unknown token such as [UNK] among its {len(vocab)} lines; this is not WordPiece. {SAVE}"
        )
    accents = config.get("strip_accents")
    tokenizer = hf.Tokenizer(guarded("vocab.txt", lambda: models.WordPiece(vocab, unk_token=strings["unk"])))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True) is not False,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = hf.decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(list(dict.fromkeys(strings.values())))
    if "cls" in strings and "sep" in strings:
        ends = [(strings[r], vocab[strings[r]]) for r in ("cls", "sep")]
        single = f"{strings['cls']} $A {strings['sep']}"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    merged = NamedSpecials(strings=strings, extra=named.extra, added=named.added, add_bos=named.add_bos)
    return wrap(tokenizer, file="vocab.txt", named=merged)


def load_gpt2(checkpoint: Checkpoint, named: NamedSpecials, config: Mapping[str, object]) -> Tokenizer | None:
    """`vocab.json` + `merges.txt`; `CannotLook` where the config's tokenizer class would cut text in its own way."""
    import tokenizers as hf
    from tokenizers import models, pre_tokenizers

    merges_text = _text(checkpoint, "merges.txt")
    vocab = checkpoint.read_json("vocab.json", limit_bytes=MAX_FILE_BYTES) if merges_text is not None else None
    if vocab is None or merges_text is None:
        return None
    name = config.get("tokenizer_class")
    plain = str(name).removesuffix("Fast") if name is not None else None
    if plain not in GPT2_PRETOKENIZED or any(s.endswith("</w>") for s in vocab):
        raise CannotLook(f"vocab.json + merges.txt of {name or 'an unnamed class'} do not say how text is cut; {SAVE}")
    ids = {s: i for s, i in vocab.items() if isinstance(i, int) and not isinstance(i, bool) and i >= 0}
    lines = [line.rstrip("\r") for line in merges_text.split("\n") if line and not line.startswith("#version")]
    merges = [(pair[0], pair[1]) for line in lines if len(pair := line.split(" ")) == 2]
    tokenizer = hf.Tokenizer(guarded("vocab.json", lambda: models.BPE(ids, merges)))
    space = config.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)
    tokenizer.decoder = hf.decoders.ByteLevel()
    tokenizer.add_special_tokens([s for s in dict.fromkeys((*named.strings.values(), *named.extra)) if s in ids])
    return wrap(tokenizer, file="vocab.json", named=named)


def _text(checkpoint: Checkpoint, file: str) -> str | None:
    raw = checkpoint.read_bytes(file, limit_bytes=MAX_FILE_BYTES)
    return None if raw is None else bytes(raw).decode("utf-8", errors="replace")
