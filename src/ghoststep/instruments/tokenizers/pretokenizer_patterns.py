"""How text is cut before merging, by the name that a GGUF file gives it (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{end}}"
O200K = CASED.replace("{end}", CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
TEKKEN = CASED.replace("{end}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenization:
    """`patterns` split one after the other, every match and every gap a piece. `ignore_merges`: whole words are looked up."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False


_GPT2 = PreTokenization(patterns=(GPT2,))
_DIGITS = PreTokenization(patterns=(r"\p{N}", GPT2))
_LLAMA3 = PreTokenization(patterns=(LLAMA3,), ignore_merges=True)

BY_GGUF_NAME = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": PreTokenization(patterns=(LLAMA3,)),
    "qwen2": PreTokenization(patterns=(QWEN2,)),
    "deepseek-r1-qwen": PreTokenization(patterns=(QWEN2,)),
    "gpt-4o": PreTokenization(patterns=(O200K,)),
    "tekken": PreTokenization(patterns=(TEKKEN,), ignore_merges=True),
}
