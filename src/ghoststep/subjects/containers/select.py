"""Which files of a folder are its weights.

Decided by names only, so that it costs no reading. First match of: model.safetensors.index.json, model.safetensors,
adapter_model.safetensors, any other *.safetensors, pytorch_model.bin.index.json, pytorch_model.bin, adapter_model.bin, any other
PyTorch file, *.gguf, .metadata with *.distcp. Only the top folder counts, and files of a training state never do.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ghoststep.errors import CannotLook
from ghoststep.subjects.base import Source
from ghoststep.subjects.containers.base import SUPPORTED_FORMATS, Container
from ghoststep.subjects.containers.dcp import METADATA_FILE, DistributedCheckpoint
from ghoststep.subjects.containers.gguf_file import GgufFiles
from ghoststep.subjects.containers.safetensors_file import SafetensorsFiles
from ghoststep.subjects.containers.sharded import check_against_index, read_index
from ghoststep.subjects.containers.torch_file import TorchFiles

_PART_OF = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.[a-z]+)")
_TRAINING_STATE = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "training_args*", "random_states*", "*optim_states*")
_READERS: Mapping[str, Callable[[Source, Iterable[str]], Container]] = {
    "safetensors": SafetensorsFiles,
    "pytorch": TorchFiles,
    "gguf": GgufFiles,
}
_TORCH_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The weight files of a checkpoint: kind "safetensors", "pytorch", "gguf" or "dcp", and the index if there is one."""

    kind: str
    files: tuple[str, ...]
    index: str | None = None

    @property
    def is_adapter(self) -> bool:
        """True for the files of a PEFT adapter."""
        return any(file.rpartition("/")[2].startswith("adapter_model.") for file in self.files)


def select_weights(files: Sequence[str]) -> Selection | None:
    """The weights among these names, or None if there are none."""
    top = [file for file in files if "/" not in file]
    return _safetensors(top) or _pytorch(top) or _gguf(top) or _distributed(top)


def select_file(file: str, kind: str) -> Selection:
    """A lone file (or a lone index) as the selection."""
    if file.endswith(".index.json"):
        return Selection(kind="pytorch" if ".bin." in file else "safetensors", files=(), index=file)
    return Selection(kind=kind, files=(file,))


def open_container(source: Source, selection: Selection) -> Container:
    """Read the headers of the selected files. Raises what their readers raise."""
    if selection.kind == "dcp":
        return DistributedCheckpoint(source, selection.files[0])
    reader = _READERS[selection.kind]
    if selection.index is not None:
        index = read_index(source, selection.index)
        container = reader(source, index.shards)
        check_against_index(source, index, container)
        return container
    _check_parts(source, selection.files)
    return reader(source, selection.files)


def _safetensors(top: Sequence[str]) -> Selection | None:
    found = _match(top, "*.safetensors")
    index = _index(top, "model.safetensors.index.json", "*.safetensors.index.json")
    if index is not None:
        return Selection(kind="safetensors", files=found, index=index)
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if name in found:
            return Selection(kind="safetensors", files=(name,))
    # consolidated*.safetensors are the same weights under the names of another library
    ours = tuple(file for file in found if not file.startswith("consolidated")) or found
    return Selection(kind="safetensors", files=ours) if ours else None


def _pytorch(top: Sequence[str]) -> Selection | None:
    found = _match(top, *_TORCH_PATTERNS)
    index = _index(top, "pytorch_model.bin.index.json", "*.bin.index.json")
    if index is not None:
        return Selection(kind="pytorch", files=found, index=index)
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        if name in found:
            return Selection(kind="pytorch", files=(name,))
    ours = tuple(file for file in found if not file.startswith("consolidated")) or found
    return Selection(kind="pytorch", files=ours) if ours else None


def _gguf(top: Sequence[str]) -> Selection | None:
    found = _match(top, "*.gguf")
    return Selection(kind="gguf", files=found) if found else None


def _distributed(top: Sequence[str]) -> Selection | None:
    return Selection(kind="dcp", files=(METADATA_FILE,)) if METADATA_FILE in top and _match(top, "*.distcp") else None


def _index(top: Sequence[str], usual: str, pattern: str) -> str | None:
    """The usual index, or the only one there is (a variant such as model.fp16.safetensors.index.json)."""
    if usual in top:
        return usual
    others = _match(top, pattern)
    return others[0] if len(others) == 1 else None


def _match(top: Iterable[str], *patterns: str) -> tuple[str, ...]:
    def counts(file: str) -> bool:
        lower = file.lower()
        ours = any(fnmatch.fnmatchcase(lower, pattern) for pattern in patterns)
        return ours and not any(fnmatch.fnmatchcase(lower, pattern) for pattern in _TRAINING_STATE)

    return tuple(sorted(file for file in top if counts(file)))


def _check_parts(source: Source, files: Sequence[str]) -> None:
    """Several files without an index: the parts of one split must be complete; several whole GGUF files are several models."""
    splits = {file: match for file in files if (match := _PART_OF.fullmatch(file))}
    if len(files) > 1 and not splits and files[0].endswith(".gguf"):
        raise CannotLook(
            f"{source.name}: {len(files)} GGUF files ({', '.join(files[:4])}): several models. Name one of the files."
        )
    for file, match in splits.items():
        parts = int(match["parts"])
        names = {
            f"{match['stem']}-{part:05d}-of-{match['parts']}{match['suffix']}" for part in range(1, min(parts, 99_999) + 1)
        }
        missing = sorted(names - set(source.files()))
        if missing:
            raise CannotLook(
                f"{source.name}: {file} is one of {parts} parts, {len(missing)} of them missing: "
                f"{', '.join(missing[:5])}. Copy them "
                "into the folder."
            )


def num_parts(file: str) -> int:
    """How many parts the split checkpoint has that this file is one of, by its name; 1 for a whole file."""
    match = _PART_OF.fullmatch(file)
    return int(match["parts"]) if match else 1


def no_weights_reason(source: Source) -> str:
    """Why a folder without weights cannot be measured, and where weights may be."""
    below = sorted(
        {file.rpartition("/")[0] for file in source.files() if "/" in file and select_weights([file.rpartition("/")[2]])}
    )
    hint = f" Weights stand in {', '.join(below[:5])}: name that folder." if below else ""
    return f"{source.name}: no weights in this folder.{hint} Supported: {SUPPORTED_FORMATS}."
