"""The batches of the last steps, kept on their device within a bound, and written out when a step is accused."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.text import visible

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("ghoststep.watch")

MAX_BYTES = 64 << 20
"""Of kept batches, on their device."""

MAX_FLOAT_BYTES = 4 << 20
"""A float tensor larger than this (images, features) is not kept; ids, masks and labels always are, within `MAX_BYTES`."""

MAX_FILES = 16
"""Kept batches of one rank on disk."""

MAX_TEXT = 10_000
"""Characters of the plain values (strings, numbers, lists of them) of one micro-batch that are kept beside the tensors."""

KEY = "ghoststep"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """One fed batch. tensors: clones by path ("labels", "inputs/input_ids"). plain: values that JSON can hold. left_out: path → why.
    kind: "mapping" or "tuple". micro_batch, by_loop: see `BatchKeeper.keep`."""

    step: int
    kind: str
    micro_batch: int | None
    by_loop: bool
    tensors: Mapping[str, torch.Tensor]
    plain: Mapping[str, Any]
    left_out: Mapping[str, str]
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class BatchKeeper:
    """Keeps clones of what was fed in the last `num_steps` steps, at most `max_bytes` of them, and writes accused ones to disk.

    keep: no read by the host. dropped: why batches or parts of them are missing, reason → number of times. failed: why nothing is
    written any more, "" while it is.
    """

    max_bytes: int = MAX_BYTES
    num_steps: int = 80
    max_files: int = MAX_FILES
    dropped: dict[str, int] = field(default_factory=dict)
    failed: str = ""
    _kept: deque[_MicroBatch] = field(default_factory=deque)
    _num_bytes: int = 0

    def keep(self, step: int, batch: Any, *, micro_batch: int | None = None, by_loop: bool = False) -> None:
        """Clone a batch (mapping, nested mappings, tuple, list or one tensor) that is fed as a micro-batch of this step.

        micro_batch: number of backwards of the step before this call: a model that is called twice for one backward is fed two
        parts of one micro-batch. by_loop: the loop handed it over, `w.step(loss, batch)`; else it is what the model was called with.
        """
        made = _cloned(step, batch, self.max_bytes, micro_batch, by_loop)
        for reason in made.left_out.values():
            self._drop(reason)
        self._kept.append(made)
        self._num_bytes += made.num_bytes
        while self._kept and self._kept[0].step <= step - self.num_steps:
            self._num_bytes -= self._kept.popleft().num_bytes
        while self._num_bytes > self.max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popleft().num_bytes
            self._drop(f"batches of the window are larger than {self.max_bytes} bytes together: the oldest were dropped")

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def batches(self, step: int) -> list[Any]:
        """The micro-batches of a step as they are kept, with clones; empty if they are gone."""
        return [nested(m.kind, {**m.plain, **m.tensors}) for m in self._kept if m.step == step]

    def save(self, step: int, rank: int, run_dir: Path) -> tuple[Path | None, str]:
        """Write the step's batches to `run_dir/rank-00000/batches/step-000123.safetensors`: the path, or None and why not.

        Never overwrites, never raises for the disk: an existing file is returned as it is; when the disk refuses, nothing is
        written from then on. Cost: one copy to the host.
        """
        path = batch_path(run_dir, rank, step)
        found = [m for m in self._kept if m.step == step]
        if path.exists():
            return path, ""
        if self.failed:
            return None, self.failed
        if not found:
            return None, f"the batch of step {step} is no longer kept" + "".join(f"; {reason}" for reason in self.dropped)
        if len(list(path.parent.glob("step-*.safetensors"))) >= self.max_files:
            return None, f"{self.max_files} batches are kept already"
        try:
            _write(path, _serialised(found, step, rank))
        except OSError as error:
            self.failed = visible(f"batches cannot be written to {path.parent}: {error.strerror or error}")
            logger.warning("%s; training goes on", self.failed)
            return None, self.failed
        return path, ""


def batch_path(run_dir: Path, rank: int, step: int) -> Path:
    """Where the batch of a step is kept."""
    return run_dir / f"rank-{rank:05d}" / "batches" / f"step-{step:06d}.safetensors"


def _cloned(step: int, batch: Any, max_bytes: int, micro_batch: int | None, by_loop: bool) -> _MicroBatch:
    import torch

    kind = "mapping" if isinstance(batch, Mapping) else "tuple"
    entries = dict(_leaves(batch if kind == "mapping" else _by_place(batch)))
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    room, text = max_bytes, MAX_TEXT
    for path, value in entries.items():
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            reason = _unkept(value, size, room)
            if reason:
                left_out[path] = reason
                continue
            tensors[path] = value.detach().clone(memory_format=torch.contiguous_format)
            room -= size
        else:
            written = _json(value)
            if written is None or len(written) > text:
                left_out[path] = (
                    f"values of type {type(value).__name__} are not kept" if written is None else "long texts are not kept"
                )
                continue
            plain[path] = value
            text -= len(written)
    return _MicroBatch(
        step=step, kind=kind, micro_batch=micro_batch, by_loop=by_loop, tensors=tensors, plain=plain, left_out=left_out,
        num_bytes=max_bytes - room,
    )  # fmt: skip


def _unkept(value: torch.Tensor, size: int, room: int) -> str:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return "sparse, quantised and meta tensors are not kept"
    if value.is_complex():
        return "complex tensors are not kept"
    if value.is_floating_point() and size > MAX_FLOAT_BYTES:
        return f"float tensors over {MAX_FLOAT_BYTES} bytes are not kept"
    return f"one batch is larger than {MAX_BYTES} bytes" if size > room else ""


def _by_place(batch: Any) -> dict[str, Any]:
    return {str(i): v for i, v in enumerate(batch if isinstance(batch, (tuple, list)) else (batch,))}


def _leaves(batch: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Entries of nested mappings by path. A "/" inside a name is written "%2F", so that paths can be split again."""
    for name, value in batch.items():
        path = prefix + str(name).replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping) and depth < 4:
            yield from _leaves(value, path + "/", depth + 1)
        else:
            yield path, value


def _json(value: Any) -> str | None:
    """As JSON, if it comes back the same."""
    try:
        written = json.dumps(value, allow_nan=False)
        return written if json.loads(written) == value else None
    except (TypeError, ValueError, RecursionError):
        return None


def nested(kind: str, entries: Mapping[str, Any]) -> Any:
    """A batch of its entries by path: nested dicts, or a tuple (a place that was left out holds None)."""
    made: dict[str, Any] = {}
    for path, value in entries.items():
        *outer, name = [p.replace("%2F", "/").replace("%25", "%") for p in path.split("/")]
        inside = made
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[name] = value
    if kind == "mapping":
        return made
    places = {int(k): v for k, v in made.items() if k.isdecimal()}
    return tuple(places.get(i) for i in range(min(max(places, default=-1) + 1, 64)))


def _serialised(found: Sequence[_MicroBatch], step: int, rank: int) -> bytes:
    from safetensors.torch import save

    tensors = {f"{i}/{path}": t.to("cpu") for i, m in enumerate(found) for path, t in m.tensors.items()}
    about = {
        "version": 1,
        "step": step,
        "rank": rank,
        "micro_batches": [
            {
                "kind": m.kind,
                "micro_batch": m.micro_batch,
                "by_loop": m.by_loop,
                "plain": dict(m.plain),
                "left_out": dict(m.left_out),
                "dtypes": {path: str(t.dtype).removeprefix("torch.") for path, t in m.tensors.items()},
            }
            for m in found
        ],
    }
    return save(tensors, {KEY: json.dumps(about)})


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, and never over a file that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        try:
            os.link(unfinished, path)  # refuses to overwrite, unlike rename
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            if not path.exists():
                os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def decode_tokens(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """Text of each id, by a tokenizer of transformers or tokenizers (or any with `decode`). Raw: whoever prints it escapes it.

    An id that the tokenizer cannot decode is left out.
    """
    texts: dict[int, str] = {}
    for token_id in dict.fromkeys(ids):
        text = _decoded(tokenizer, int(token_id))
        if text is not None:
            texts[int(token_id)] = text[:200]
    return texts


def _decoded(tokenizer: Any, token_id: int) -> str | None:
    try:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not text or text == "\ufffd":  # a part of a character: the vocabulary's own spelling says more
            spell = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(tokenizer, "id_to_token", None)
            text = (spell(token_id) if spell is not None else None) or text
    except TypeError:
        try:
            text = tokenizer.decode([token_id])
        except Exception:
            return None
    except Exception:  # a stranger's tokenizer raises what it likes for an unknown id
        return None
    return text if isinstance(text, str) and text else None
