"""`pytorch_model.bin` and other files of `torch.save`: state dicts, sharded or not, and training checkpoints that hold one.

torch itself is not needed and nothing is unpickled: `pickle_reader` describes the contents, the data stay where they are. So
a 10 GB file opens in milliseconds, over HTTP ranges too, and its tables are views of the file. What the pickle may mention is
about what `torch.load(weights_only=True)` allows (`torch_pickle.is_known`); anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.subjects.base import RowStore, Source
from ghoststep.subjects.containers.base import Layout, find, num_elements, rows_of
from ghoststep.subjects.containers.torch_archive import Archive, read_archive
from ghoststep.subjects.containers.torch_pickle import TensorRecord, tensor_records


class TorchFiles:
    """One or several files of `torch.save` read as one checkpoint. Raises at construction what `read_archive` raises.

    Tensors that share a storage (tied weights) appear under each of their names. `num_bytes` counts a tensor's own elements.
    """

    format = "pytorch"

    def __init__(self, source: Source, files: Iterable[str]) -> None:
        self._source = source
        self._tensors: dict[str, TensorInfo] = {}
        self._records: dict[str, TensorRecord] = {}
        self._archives: dict[str, Archive] = {}
        for file in files:
            place = f"{source.name}: {file}"
            archive = self._archives[file] = read_archive(source, file)
            for record in tensor_records(archive.value, place):
                if record.name in self._tensors:
                    other = self._tensors[record.name].file
                    raise CannotLook(f"{place}: tensor {record.name[:80]!r} stands in {other} too. Check one file: name it.")
                check_storage(archive, record, place)
                self._records[record.name] = record
                self._tensors[record.name] = tensor_info(record, file)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every file."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, object]:
        """None in this format: {}."""
        return {}

    def rows(self, name: str) -> RowStore:
        """Raw rows of a stored matrix (a copy for each block if it was saved transposed)."""
        info = find(self._tensors, name)
        record = self._records[name]
        if record.unreadable is not None:
            raise CannotLook(
                f"{name} in {info.file} is a {record.unreadable}: only plain tensors are read. Save it as safetensors."
            )
        start = self._archives[info.file].start_of(record.key) + record.offset * record.item_bits // 8
        layout = Layout(start=start, strides=record.strides)
        return rows_of(self._source, info, layout, record.item_bits)


def tensor_info(record: TensorRecord, file: str) -> TensorInfo:
    """The public description of a record."""
    num_bytes = num_elements(record.shape) * record.item_bits // 8 if record.unreadable is None else 0
    return TensorInfo(name=record.name, shape=record.shape, dtype=record.dtype, file=file, num_bytes=num_bytes)


def check_storage(archive: Archive, record: TensorRecord, place: str) -> None:
    """`CannotLook` if the storage of a record is not in its file, `UnsafeInput` if it is shorter than the pickle says."""
    if record.unreadable is not None:
        return
    num_bytes = archive.storage_bytes.get(record.key)
    if num_bytes is None:
        raise CannotLook(f"{place}: the data of tensor {record.name[:80]!r} are missing. Download or save it again.")
    if num_bytes < (record.offset + record.span_elements) * record.item_bits // 8:
        raise UnsafeInput(
            f"{place}: tensor {record.name[:80]!r} needs a storage of {record.storage_bytes} bytes, the file "
            f"holds {num_bytes}: it "
            "is damaged or lies. Download or save it again."
        )
