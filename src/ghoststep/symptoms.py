"""From what people see in a run to the checks that can prove what it is.

Each entry: the symptom in a user's words, words that lead to it, the suspects (names of checks) in order of likelihood, and the
command that settles it. Names of checks that this version does not have yet are allowed here and shown as planned.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomEntry:
    """One symptom. `keywords` are lower-case words or phrases; all of one group ("a+b") must occur."""

    title: str
    keywords: tuple[str, ...]
    suspects: tuple[str, ...]
    meaning: str
    command: str


_CHECKPOINT = "ghoststep check CHECKPOINT"

SYMPTOMS: tuple[SymptomEntry, ...] = (
    SymptomEntry(
        title="the gradient norm is inf once in a while, the loss looks normal",
        keywords=("grad_norm", "gradient norm", "grad norm", "inf", "overflow", "spike"),
        suspects=("near-zero-input-rows", "zero-input-rows", "amplified-rows", "zeroed-step", "crushed-step"),
        meaning="A token whose embedding row is almost zero makes the gradient overflow; clipping then multiplies every gradient "
        "by 0 and the step is lost. The rows are in the checkpoint and can be listed before training.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="the loss becomes NaN, or 0.0 in the log",
        keywords=("nan", "loss+0.0", "loss 0.0", "not a number"),
        suspects=(
            "nonfinite-weights",
            "nonfinite-parameter",
            "nonfinite-loss",
            "zero-input-rows",
            "nan-by-infinite-clip",
            "hidden-nan-loss",
            "nonfinite-gradient",
        ),
        meaning="Non-finite values in a table reach every batch that holds the token; an infinite norm with max_grad_norm=0 "
        "turns every weight into NaN, and some trainers log the loss as 0.0 from then on.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="NaN or an infinite loss only when the vocabulary is not a multiple of 64",
        keywords=("multiple of 64", "pad_to_multiple", "padded vocab", "vocab+multiple"),
        suspects=("probability-on-padded-rows", "masked-classes-in-smoothing", "unaligned-vocab", "spoilt-by-new-rows"),
        meaning="Alignment itself is only a matter of speed. What hurts is what was done with the padded table rows: "
        "uninitialised values, or -inf logits under label smoothing.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="the loss jumps once in a while, or training slows down or fills the memory from step to step",
        keywords=("loss+spike", "loss+jump", "slower+step", "memory+grow", "memory+leak", "out of memory+later", "gets slower"),
        suspects=("loss-spike", "growing-graph", "exploding-gradient", "zeroed-step", "crushed-step", "skipped-by-scaler"),
        meaning="A batch, a row or a layer that left its own history, or a loss that keeps the graphs of earlier steps. Which step, "
        "which token and which tensor is in the record of a watched run.",
        command="ghoststep run -- train.py",
    ),
    SymptomEntry(
        title="training on several GPUs is no better than on one, or the weights of the ranks differ",
        keywords=("ddp", "distributeddataparallel", "ranks differ", "several gpus", "multi-gpu", "more gpus", "out of sync"),
        suspects=("ranks-apart",),
        meaning="Gradients are reduced only after a forward of the wrapper: a loop that calls the model inside it trains one model a "
        "rank. The record of a watched run holds the gradient norms of every rank.",
        command="ghoststep run -- train.py",
    ),
    SymptomEntry(
        title="the model never stops talking",
        keywords=("never stops", "stop talking", "does not stop", "endless", "no eos", "keeps generating", "runs on"),
        suspects=("unsupervised-stop-token", "padding-in-loss", "special-token-disagreement", "dead-template-rows"),
        meaning="The stop token is never a target (PAD = EOS masked out of the labels), or generation waits for another id "
        "than the one the model was trained to emit.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="the loss is flat, and batch 1 is better than batch 8",
        keywords=("flat", "plateau", "batch 1", "does not go down", "not learning", "stuck", "doesn't go down"),
        suspects=(
            "visible-padding",
            "padding-in-loss",
            "twice-shifted-labels",
            "unshifted-labels",
            "uneven-token-weight",
            "unchanged-weights",
            "untrained-parameters",
        ),
        meaning="Padding takes part in attention or in the loss, or labels are shifted wrongly.",
        command="ghoststep check path.py:setup",
    ),
    SymptomEntry(
        title="the loss falls too fast, samples are nonsense",
        keywords=("too fast", "too good", "near zero loss", "nonsense", "gibberish", "copies", "repeats"),
        suspects=("unshifted-labels", "visible-future", "visible-target"),
        meaning="Each position is trained on a token that it can see.",
        command="ghoststep check path.py:setup",
    ),
    SymptomEntry(
        title="the model does not learn the chat format or mixes up roles",
        keywords=("chat template", "format", "role", "template", "markers", "reserved"),
        suspects=("dead-template-rows", "untrained-rows", "zero-input-rows", "unreachable-tokens", "prompt-in-loss"),
        meaning="The template's markers stand on table rows that were never trained; with a frozen table they stay "
        "indistinguishable.",
        command="ghoststep check CHECKPOINT --training lora",
    ),
    SymptomEntry(
        title="it was fine until I resumed or reloaded",
        keywords=("resume", "resumed", "reload", "reloaded", "after loading", "restart", "checkpoint+worse"),
        suspects=("broken-tie", "trained-not-saved", "resume-changes-run", "vocab-size-disagreement", "shrunk-table"),
        meaning="The saver trusted a flag that the tensors do not follow, or a part was never saved.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="index out of range, or a device-side assert in the embedding",
        keywords=("index out of range", "device-side assert", "out of bounds", "indexerror", "cublas"),
        suspects=("token-id-out-of-range", "shrunk-table", "vocab-size-disagreement"),
        meaning="The tokenizer emits ids that the table has no row for.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="quality dropped after tokens were added or the table was resized",
        keywords=("resize", "added tokens", "new tokens", "resize_token_embeddings", "extended vocabulary", "add_tokens"),
        suspects=("shrunk-table", "spoilt-by-new-rows", "vocab-size-disagreement", "untrained-rows", "broken-tie"),
        meaning="Rows were cut, new rows were left as they came, or the head did not follow the table.",
        command=_CHECKPOINT,
    ),
    SymptomEntry(
        title="left padding or batched generation gives worse answers",
        keywords=("left padding", "left-padding", "padding side", "batched generation", "position_ids"),
        suspects=("padding-side-changes-output", "visible-padding", "near-zero-input-rows"),
        meaning="Absolute positions count the padding, or the mask does not cover it.",
        command="ghoststep check path.py:setup",
    ),
    SymptomEntry(
        title="the loss is good, but generated text is bad",
        keywords=(
            "generated text",
            "generation is bad",
            "bad samples",
            "kv cache",
            "use_cache",
            "attn_implementation",
            "sdpa",
            "eager",
        ),
        suspects=(
            "cache-changes-output",
            "absent-mask-changes-output",
            "attention-implementations-differ",
            "pack-changes-output",
            "visible-future",
        ),
        meaning="Service runs the model in a way that training does not: with a cache, a mask, another attention, or without the pack.",
        command="ghoststep check path.py:setup",
    ),
)


def match(text: str) -> tuple[SymptomEntry, ...]:
    """Entries whose keywords occur in the text, most hits first; all of them when nothing matches is the caller's choice."""
    words = " ".join(text.lower().split())
    scored = [(sum(_occurs(k, words) for k in entry.keywords), i) for i, entry in enumerate(SYMPTOMS)]
    hits = sorted((s for s in scored if s[0]), key=lambda s: (-s[0], s[1]))
    return tuple(SYMPTOMS[i] for _, i in hits[:3])


def _occurs(keyword: str, words: str) -> bool:
    return all(_has_word(part, words) for part in keyword.split("+"))


def _has_word(part: str, words: str) -> bool:
    import re

    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", words) is not None
