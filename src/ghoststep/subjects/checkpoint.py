"""A checkpoint as a subject: a folder, a file, or a revision on the Hub, read without building the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from ghoststep.errors import CannotLook, SubjectError
from ghoststep.evidence.checkpoint import StoredTensors
from ghoststep.finding import SubjectInfo
from ghoststep.subjects.base import RowStore, Source
from ghoststep.subjects.containers.base import SUPPORTED_FORMATS, Container
from ghoststep.subjects.containers.foreign import foreign_kind, suffix_kind, weight_kind
from ghoststep.subjects.containers.select import (
    Selection,
    no_weights_reason,
    num_parts,
    open_container,
    select_file,
    select_weights,
)
from ghoststep.subjects.local import LocalSource
from ghoststep.subjects.spooled import SpooledRows

HUB_PREFIX = "hf:"
ADAPTER_CONFIG = "adapter_config.json"
_LIMIT_BYTES = 64 << 20
_SELF_DESCRIBING_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", ADAPTER_CONFIG)


class Checkpoint:
    """Files of one model. Headers are read on the first question about tensors and kept; tables are read on demand.

    `source` gives the raw files; `name` is what the user wrote. Threads may ask at once.
    """

    kind = "checkpoint"

    def __init__(self, source: Source, *, name: str | None = None, selection: Selection | None = None) -> None:
        self.source = source
        self.name = name if name is not None else source.name
        self._selection = selection if selection is not None else select_weights(source.files())
        self._lock = threading.Lock()
        self._container: Container | None = None
        self._failure: CannotLook | None = None
        self._stored: StoredTensors | None = None
        self._fetched: dict[str, SpooledRows] = {}

    def info(self) -> SubjectInfo:
        """Kind, name, and the format, files and parameters as far as they can be read. Cost: the headers, once.

        `source` is there when it says more than the name (the commit of a Hub revision). Weights that a PyTorch file stores
        once under two names count twice.
        """
        where = {"source": self.source.name} if self.source.name != self.name else {}
        try:
            stored = self.stored()
        except CannotLook:
            return SubjectInfo(kind=self.kind, name=self.name, facts={**where, "files": len(self.source.files())})
        facts: dict[str, str | int | float | bool] = {
            **where,
            "format": stored.format,
            "weight_files": len({tensor.file for tensor in stored.tensors.values()}),
            "tensors": len(stored.tensors),
            "parameters": stored.num_parameters,
        }
        if stored.base_model is not None:
            facts["base_model"] = stored.base_model
        return SubjectInfo(kind=self.kind, name=self.name, facts=facts)

    def stored(self) -> StoredTensors:
        """Every stored tensor by its real name, from the headers alone; kept after the first call.

        `CannotLook` when there are no weights, a shard is missing or a file is cut short; `UnsafeInput` when a header lies, a
        pickle asks for code or a name leaves the folder. The same error comes again on the next call.
        """
        container = self._open()
        if self._stored is None:
            self._stored = StoredTensors(format=container.format, tensors=container.tensors, base_model=self._base_model())
        return self._stored

    @property
    def unreadable(self) -> str | None:
        """Why weights that are there cannot be read (damaged, hostile, refused), None if they can or there are none."""
        if self._selection is None:
            return None
        try:
            self._open()
        except CannotLook as failure:
            return str(failure)
        return None

    def rows(self, tensor_name: str) -> RowStore:
        """Raw rows of the stored matrix of this name; `CannotLook` if there is none, or it is no matrix.

        Over a network the matrix is fetched once, at the first row asked for, into a temporary file that all callers share.
        """
        store = self._open().rows(tensor_name)
        if not self.source.is_remote:
            return store
        with self._lock:
            return self._fetched.setdefault(tensor_name, SpooledRows(store))

    def metadata(self) -> Mapping[str, object]:
        """GGUF key-values (token lists are tuples), `__metadata__` of safetensors, {} otherwise or when nothing can be read."""
        try:
            return self._open().metadata
        except CannotLook:
            return {}

    def read_bytes(self, file: str, *, limit_bytes: int = _LIMIT_BYTES) -> bytes | None:
        """A whole file, None when there is none of this name; `CannotLook` when it is larger than `limit_bytes`."""
        if file not in self.source.files():
            return None
        return self.source.read_whole(file, limit_bytes=limit_bytes)

    def read_json(self, file: str, *, limit_bytes: int = _LIMIT_BYTES) -> dict[str, object] | None:
        """A JSON object, None when there is no such file; `CannotLook` when it is too large, no JSON or no object."""
        data = self.read_bytes(file, limit_bytes=limit_bytes)
        if data is None:
            return None
        try:
            parsed = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError, MemoryError) as error:
            why = "nests too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise CannotLook(f"{self.name}: {file} is not valid JSON ({why}). Download or save it again.") from None
        if not isinstance(parsed, dict):
            raise CannotLook(f"{self.name}: {file} holds a JSON {type(parsed).__name__}, expected an object.")
        return parsed

    def _open(self) -> Container:
        with self._lock:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            if self._container is None:
                try:
                    if self._selection is None:
                        raise CannotLook(no_weights_reason(self.source))
                    self._container = open_container(self.source, self._selection)
                except CannotLook as failure:
                    self._failure = failure
                    raise
            return self._container

    def _base_model(self) -> str | None:
        """What an adapter was trained on, as its config names it ("" when the config does not say); None for whole models."""
        if self._selection is None or not self._selection.is_adapter:
            return None
        config = self.read_json(ADAPTER_CONFIG) or {}
        return str(config.get("base_model_name_or_path") or "")


def open_checkpoint(spec: str, *, offline: bool = False) -> Checkpoint:
    """Open a folder, a weight file, or `hf:org/name[@rev]`.

    `SubjectError` when there is nothing, nothing readable, or only files of another framework; the message names the supported
    formats. Weights that are damaged or hostile still open: what can be read (config, tokenizer) is read, and
    `Checkpoint.stored` says what is wrong. A folder with a config or tokenizer and no weights opens too.
    """
    if spec.startswith(HUB_PREFIX):
        from ghoststep.subjects.hub import HubSource  # lazy: a local folder needs no network code

        hub = HubSource(spec[len(HUB_PREFIX) :], offline=offline)
        return _open_folder(hub, spec)
    path = Path(spec).expanduser()
    try:
        if path.is_dir():
            return _open_folder(LocalSource(path, name=spec), spec)
        if path.is_file():
            return _open_file(path, spec)
        is_there = path.exists() or path.is_symlink()
    except (OSError, ValueError) as error:
        raise SubjectError(f"{spec!r} cannot be opened: {error}.") from error
    if is_there:
        raise SubjectError(f"{spec} is neither a folder nor a regular file (a pipe, a device or a broken link).")
    hint = (
        f" A model on the Hub is written {HUB_PREFIX}{spec}."
        if spec.count("/") == 1 and not spec.startswith(("/", "."))
        else ""
    )
    raise SubjectError(f"{spec} does not exist: expected a checkpoint folder or a weight file.{hint}")


def _open_folder(source: Source, spec: str) -> Checkpoint:
    files = source.files()
    if not files:
        raise SubjectError(f"{spec} is an empty folder: expected config.json and weights. Supported: {SUPPORTED_FORMATS}.")
    selection = select_weights(files)
    if selection is None:
        foreign = {file: kind for file in files if "/" not in file and (kind := suffix_kind(file)) is not None}
        if foreign:
            found = ", ".join(f"{file} ({kind})" for file, kind in list(foreign.items())[:3])
            raise SubjectError(f"{spec} holds {found}, which is not supported. Convert it to one of: {SUPPORTED_FORMATS}.")
        if not any(file in files for file in _SELF_DESCRIBING_FILES):
            raise SubjectError(no_weights_reason(source))
    return Checkpoint(source, name=spec, selection=selection)


def _open_file(path: Path, spec: str) -> Checkpoint:
    folder, file = path.parent, path.name
    if file.endswith(".index.json"):
        return Checkpoint(LocalSource(folder, name=spec), name=spec, selection=select_file(file, ""))
    if file == ".metadata":
        return _open_folder(LocalSource(folder, name=spec), spec)
    source = LocalSource(folder, name=spec, only=file)
    if not source.size(file):
        raise SubjectError(f"{spec} is an empty file. Download or save it again.")
    kind = weight_kind(source, file)
    if kind is None:
        found = foreign_kind(source, file)
        if found:
            raise SubjectError(f"{spec} is {found}, which is not supported. Convert it to one of: {SUPPORTED_FORMATS}.")
        if file.endswith(".py"):
            raise SubjectError(
                f"{spec} is Python code; expected the function in it that returns a setup (model, batch, loss): "
                f"ghoststep check {spec}:setup"
            )
        raise SubjectError(
            f"{spec} is no weight file of a known format: name a weight file or the checkpoint's folder. Supported: "
            f"{SUPPORTED_FORMATS}."
        )
    if num_parts(file) > 1:  # a part alone would look like a model without a head
        raise SubjectError(f"{spec} is one of {num_parts(file)} parts of a checkpoint: name the folder that holds all of them.")
    if kind == "gguf":  # describes itself; files beside it may belong to another model
        source = LocalSource(folder, name=spec, only=file, with_companions=False)
    return Checkpoint(source, name=spec, selection=select_file(file, kind))
