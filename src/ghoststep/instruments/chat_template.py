"""What a chat template really writes around messages: found by rendering conversations whose messages are sentinels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.tokenizer import TemplateTokens
from ghoststep.instruments import template_worker
from ghoststep.instruments.tokenizers.base import MAX_CONFIG_BYTES, Encoded, Tokenizer

if TYPE_CHECKING:
    from ghoststep.subjects.checkpoint import Checkpoint

MAX_TEMPLATE_CHARS = 1_000_000
MAX_CHARS = 200_000
"""Longest rendering of one short conversation that is believed; the longest real tool prompts are about 10,000 characters."""
LIMIT_SECONDS = 20.0
SENTINELS = (("Kqzvoa", "Wxjyue"), ("7Kqzvoa", "3Wxjyue"))
"""Two pairs of message contents. Within a pair they begin alike but differ, so that what both leave over is the template's;
the pairs begin with a letter and a digit, since a letter may join the space that the template puts before it."""
MARKER = re.compile(r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?(?:start|end|begin)_of_[a-z_]{1,32}>")
"""Strings made to be one token each. `[INST]` and `<<SYS>>` are several tokens on purpose in some healthy models."""

PRINTED_PARTS = ("{'type': 'text'", '{"type": "text"')
"""A list of message parts printed as it is: such a template takes messages as plain strings, and this was the other form."""

Variables = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of one conversation and the sentinels put into it. `key` names the conversation apart from its sentinels."""

    key: tuple[int, int]
    text: str
    sentinels: tuple[str, ...]


def find_templates(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The templates that the files hold, the default one first; () if there is none.

    transformers lets a file `chat_template.jinja` win over `chat_template.json`, and that over tokenizer_config.json.
    """
    raw = checkpoint.read_bytes("chat_template.jinja", limit_bytes=MAX_CONFIG_BYTES)
    found: object = bytes(raw).decode("utf-8", errors="replace") if raw is not None else None
    for file in ("chat_template.json", "tokenizer_config.json"):
        if not found:
            found = (checkpoint.read_json(file, limit_bytes=MAX_CONFIG_BYTES) or {}).get("chat_template")
    found = found or checkpoint.metadata().get("tokenizer.chat_template")
    return tuple(t for t in _as_texts(found) if t.strip())


def need_templates(checkpoint: Checkpoint) -> tuple[str, ...]:
    """`find_templates`, or `DoesNotApply` where there is none."""
    templates = find_templates(checkpoint)
    if not templates:
        raise DoesNotApply("no chat template in the files: this is a base model or an encoder")
    return templates


def _as_texts(found: object) -> list[str]:
    if isinstance(found, bytes):
        return [found.decode("utf-8", errors="replace")]
    if isinstance(found, str):
        return [found]
    named = (
        [(str(e.get("name")), e.get("template")) for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []
    )
    named += [(str(k), v) for k, v in found.items()] if isinstance(found, Mapping) else []
    return [t for _, t in sorted(named, key=lambda item: item[0] != "default") if isinstance(t, str)]


def measure_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> TemplateTokens:
    """Render, encode and take what stands outside the messages.

    `DoesNotApply` without a template (a base model), `CannotLook` if no conversation can be rendered within the limits.
    Cost: one process of about 0.2 s a template, and a few dozen short encodings.
    """
    templates = need_templates(checkpoint)
    backend = tokenizer.need_backend()
    rendered: list[Rendered] = []
    errors: list[str] = []
    for template in templates:
        texts, failed = render(template, tokenizer.roles)
        rendered += texts
        errors += failed
    if not rendered:
        raise CannotLook(f"the chat template raises for every conversation that was tried: {errors[0]}")
    encoded = backend.encode([r.text for r in rendered])
    outside = [_outside(r, e) for r, e in zip(rendered, encoded, strict=True)]
    ids: set[int] = set()
    for group in _groups(rendered, outside):
        ids |= frozenset.intersection(*group)
    first = {e.ids[0] for r, e in zip(rendered, encoded, strict=True) if e.ids and e.ids[0] in ids and r.text}
    split = {m for r, e in zip(rendered, encoded, strict=True) for m in _split_markers(r, e)}
    return TemplateTokens(
        ids=tuple(sorted(ids)),
        first_ids=tuple(sorted(first)),
        texts={i: tokenizer.pieces.get(i, "") for i in sorted(ids)},
        split_markers=tuple(sorted(split)),
    )


def render(template: str, roles: Mapping[str, str]) -> tuple[list[Rendered], list[str]]:
    """All conversations with all sentinels, and the errors of those that the template refuses."""
    if len(template) > MAX_TEMPLATE_CHARS:
        raise CannotLook(f"the chat template has {len(template)} characters; at most {MAX_TEMPLATE_CHARS} are rendered")
    jobs: list[Variables] = []
    keys: list[tuple[tuple[int, int], tuple[str, ...]]] = []
    for pair, words in enumerate(SENTINELS):
        for word in words:
            for number, (variables, used) in enumerate(conversations(word)):
                jobs.append({**roles, **variables})
                keys.append(((pair, number), used))
    rendered, errors = [], []
    for (key, used), found in zip(keys, _run_worker(template, jobs), strict=True):
        if "text" in found and not any(p in found["text"] for p in PRINTED_PARTS):
            rendered.append(Rendered(key=key, text=found["text"], sentinels=used))
        else:
            errors.append(found.get("error", "it prints lists of message parts as they are"))
    return rendered, errors


def conversations(word: str) -> Iterator[tuple[Variables, tuple[str, ...]]]:
    """Variables of each conversation and the sentinels inside, longest first: messages as text and as lists of parts."""
    user, system, reply, more = (word + end for end in ("u", "s", "r", "m"))
    used = tuple(sorted((user, system, reply, more), key=len, reverse=True))
    turns = {"user": user, "system": system, "assistant": reply}
    shapes = (
        ("user",),
        ("system", "user"),
        ("user", "assistant"),
        ("user", "assistant", "user"),
        ("system", "user", "assistant", "user"),
    )
    for shape in shapes:
        plain = [{"role": role, "content": turns[role]} for role in shape]
        parts = [{"role": role, "content": [{"type": "text", "text": turns[role]}]} for role in shape]
        for messages in (plain, parts):
            for prompt in (False, True):
                yield {"messages": messages, "add_generation_prompt": prompt}, used
    asked: list[dict[str, object]] = [{"role": "user", "content": user}]
    yield {"messages": asked, "add_generation_prompt": True, "enable_thinking": False}, used
    tool, called = _tool_turns(word, user, more)
    # The tool's own JSON is the caller's text, not the template's.
    printed = tuple(json.dumps(tool, indent=indent, ensure_ascii=False) for indent in (None, 2, 4))
    used_tool = (*printed, *used, f"{word}t", f"{word}p")
    for messages_of_tool in (asked, called):
        yield {"messages": messages_of_tool, "add_generation_prompt": True, "tools": [tool]}, used_tool


def _tool_turns(word: str, user: str, more: str) -> tuple[Variables, list[dict[str, object]]]:
    name, argument = f"{word}t", f"{word}p"
    parameters = {"type": "object", "properties": {argument: {"type": "string", "description": argument}}}
    tool: Variables = {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    call = {"id": "call12345", "type": "function", "function": {"name": name, "arguments": {argument: argument}}}
    called: list[dict[str, object]] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": more, "tool_call_id": "call12345"},
    ]
    return tool, called


def _run_worker(template: str, jobs: Sequence[Variables]) -> list[dict[str, str]]:
    # -I keeps the working folder and the user's variables out; the worker still has to find jinja2 where we would.
    path = [p for p in sys.path if p]
    request = json.dumps({"template": template, "jobs": list(jobs), "max_chars": MAX_CHARS, "path": path})
    script = str(Path(template_worker.__file__))
    try:
        done = subprocess.run(
            [sys.executable, "-I", script],
            check=False,
            input=request,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotLook(f"the chat template did not finish within {LIMIT_SECONDS:g} s; it was stopped") from error
    except OSError as error:
        raise CannotLook(f"the chat template could not be rendered: no process could be started ({error})") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise CannotLook(
            f"the chat template needed more than {template_worker.CPU_SECONDS} s or {template_worker.MEMORY_BYTES // 2**20} MiB, "
            f"or ended its process (exit {done.returncode}: {last})"
        )
    answers: list[dict[str, str]] = json.loads(done.stdout)
    return answers


def _spans(rendered: Rendered) -> list[tuple[int, int]]:
    found = (m.span() for s in rendered.sentinels for m in re.finditer(re.escape(s), rendered.text))
    return sorted(found)


def _outside(rendered: Rendered, encoded: Encoded) -> frozenset[int]:
    """Ids whose characters touch no sentinel."""
    inside = bytearray(len(rendered.text) + 1)
    for start, stop in _spans(rendered):
        inside[start:stop] = b"\x01" * (stop - start)
    pairs = zip(encoded.ids, encoded.offsets, strict=True)
    return frozenset(i for i, (start, stop) in pairs if not any(inside[start : max(stop, start + 1)]))


def _groups(rendered: Sequence[Rendered], outside: Sequence[frozenset[int]]) -> list[list[frozenset[int]]]:
    groups: dict[tuple[int, int], list[frozenset[int]]] = {r.key: [] for r in rendered}
    for r, ids in zip(rendered, outside, strict=True):
        groups[r.key].append(ids)
    return list(groups.values())


def _split_markers(rendered: Rendered, encoded: Encoded) -> list[str]:
    pairs = list(zip(encoded.ids, encoded.offsets, strict=True))
    split = []
    for marker in MARKER.finditer(rendered.text):
        start, stop = marker.span()
        if len({n for n, (_, (a, b)) in enumerate(pairs) if a < stop and b > start}) > 1:
            split.append(marker[0])
    return split
