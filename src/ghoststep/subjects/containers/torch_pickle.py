"""From the inert contents of a PyTorch pickle to tensors: names, shapes, dtypes, storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.containers.base import MAX_DIMENSION, brief, num_elements
from ghoststep.subjects.containers.pickle_reader import Call, Name, Persistent

DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("f64", 64), "float32": ("f32", 32), "float16": ("f16", 16), "bfloat16": ("bf16", 16),
    "int64": ("i64", 64), "int32": ("i32", 32), "int16": ("i16", 16), "int8": ("i8", 8), "uint8": ("u8", 8),
    "uint16": ("u16", 16), "uint32": ("u32", 32), "uint64": ("u64", 64), "bool": ("bool", 8),
    "complex64": ("c64", 64), "complex128": ("c128", 128), "complex32": ("c32", 32),
    "float8_e4m3fn": ("f8_e4m3", 8), "float8_e5m2": ("f8_e5m2", 8), "float8_e8m0fnu": ("f8_e8m0", 8),
    "float8_e4m3fnuz": ("f8_e4m3fnuz", 8), "float8_e5m2fnuz": ("f8_e5m2fnuz", 8), "float4_e2m1fn_x2": ("f4-packed", 8),
}  # fmt: skip
"""torch dtype → (name here, bits of an element)."""

STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_UNTYPED = "UntypedStorage"

_PLAIN_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_OTHER_TENSORS = (
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._tensor._rebuild_from_type_v2",
)
_HARMLESS = (
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
    "builtins.set",
    "__builtin__.set",
    "_codecs.encode",
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "torch.Size",
    "torch.device",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.strided",
)
_MAX_DEPTH = 4


def is_known(name: Name) -> bool:
    """True for the names that files of weights mention. They are only recognised, never imported or called."""
    full = str(name)
    if name.module in ("torch", "torch.storage", "torch.cuda"):
        return name.attribute in STORAGES or name.attribute in (_UNTYPED, *DTYPES) or full in _HARMLESS
    return full in (*_PLAIN_TENSORS, *_PARAMETERS, *_OTHER_TENSORS, *_HARMLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor as the pickle describes it: a strided window (offset and strides in elements) of the storage `key`.

    `unreadable` names the kind of a tensor that is no such window (sparse, torch-quantised, a subclass), else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bits: int
    key: str
    offset: int
    strides: tuple[int, ...]
    storage_bytes: int
    unreadable: str | None = None

    @property
    def span_elements(self) -> int:
        """Elements from the first to the last one, both included (0 for an empty tensor)."""
        if num_elements(self.shape) == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def entries(value: object) -> Mapping[object, object] | None:
    """The items of a dictionary or of an `OrderedDict` call, else None."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Call) and value.target.attribute in ("OrderedDict", "defaultdict", "dict"):
        return value.items
    return None


def tensor_records(value: object, place: str) -> tuple[TensorRecord, ...]:
    """Every tensor of a state dict, or of a training checkpoint that holds one, by name.

    A dictionary that has tensors itself is the state dict; otherwise those one level down count, with their key in front
    unless there is only one of them ("state_dict", "model", ...).
    """
    top = entries(value)
    if top is None:
        raise CannotLook(f"{place} holds no dictionary of tensors (a state dict): save `model.state_dict()` instead.")
    if any(_is_tensor(item) for item in top.values()):
        return tuple(_records(top, "", place, 0))
    nested = {key: inner for key, item in top.items() if (inner := entries(item)) and any(map(_is_tensor, inner.values()))}
    if not nested:
        raise CannotLook(f"{place} holds no tensors (keys: {brief([str(key)[:40] for key in top])}): expected a state dict.")
    found: list[TensorRecord] = []
    for key, inner in nested.items():
        found.extend(_records(inner, "" if len(nested) == 1 else f"{str(key)[:200]}.", place, 0))
    return tuple(found)


def single_tensor(value: object, name: str, place: str) -> TensorRecord:
    """The record of a file that holds one tensor."""
    record = _record(name, value, place)
    if record is None:
        raise CannotLook(f"{place} holds no tensor, expected one.")
    return record


def _records(items: Mapping[object, object], prefix: str, place: str, depth: int) -> Iterator[TensorRecord]:
    for key, value in items.items():
        name = f"{prefix}{key if isinstance(key, str) else brief(key)}"
        record = _record(name, value, place)
        if record is not None:
            yield record
        elif depth < _MAX_DEPTH and (inner := entries(value)):
            yield from _records(inner, f"{name}.", place, depth + 1)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Call) and str(value.target) in (*_PLAIN_TENSORS, *_PARAMETERS, *_OTHER_TENSORS)


def _record(name: str, value: object, place: str) -> TensorRecord | None:
    for _ in range(_MAX_DEPTH):  # a parameter wraps its tensor
        if not _is_tensor(value) or not isinstance(value, Call):
            return None
        if str(value.target) in _PARAMETERS:
            value = value.args[0] if value.args else None
        elif value.target.attribute == "_rebuild_from_type_v2" and _wraps_plain_tensor(value):
            value = Call(value.args[0], value.args[2])  # type: ignore[arg-type]
        else:
            break
    if not isinstance(value, Call):
        return None
    if str(value.target) in _OTHER_TENSORS:
        kind = value.target.attribute.removeprefix("_rebuild_")
        return TensorRecord(
            name=name, shape=(), dtype=kind, item_bits=8, key="", offset=0, strides=(), storage_bytes=0, unreadable=kind
        )
    return _strided(name, value, place)


def _wraps_plain_tensor(call: Call) -> bool:
    """True for a parameter or tensor that carries attributes beside its plain data."""
    if len(call.args) < 3 or not isinstance(call.args[0], Name) or not isinstance(call.args[2], tuple):
        return False
    return str(call.args[0]) in _PLAIN_TENSORS and str(call.args[1]) in ("torch.Tensor", "torch.nn.parameter.Parameter")


def _strided(name: str, call: Call, place: str) -> TensorRecord:
    where = f"{place}: tensor {name[:80]!r}"
    if len(call.args) < 4:
        raise UnsafeInput(f"{where} is described by {len(call.args)} values, expected storage, offset, sizes and strides.")
    storage, offset, shape, strides = call.args[:4]
    shape, strides = sizes_of(shape), sizes_of(strides)
    if shape is None or strides is None or len(shape) != len(strides) or len(shape) > 64 or sizes_of((offset,)) is None:
        raise UnsafeInput(f"{where} has sizes or strides that are no whole numbers from 0 to 2^48.")
    key = storage.key if isinstance(storage, Persistent) else None
    if not (isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[1], Name)):
        raise UnsafeInput(f"{where} has no storage.")
    storage_name = key[1].attribute
    if storage_name == _UNTYPED:
        named = (arg.attribute for arg in call.args[4:] if isinstance(arg, Name) and arg.attribute in DTYPES)
        dtype_name = next(named, "uint8")
    else:
        dtype_name = STORAGES.get(storage_name, "")
    if dtype_name not in DTYPES or not isinstance(key[2], (str, int)) or sizes_of((key[4],)) is None:
        raise CannotLook(f"{where} lies in a {brief(storage_name)} that is not known here. Save the checkpoint as safetensors.")
    dtype, item_bits = DTYPES[dtype_name]
    storage_bytes = int(key[4]) * (1 if storage_name == _UNTYPED else item_bits // 8)
    record = TensorRecord(
        name=name,
        shape=shape,
        dtype=dtype,
        item_bits=item_bits,
        key=str(key[2]),
        offset=int(str(offset)),
        strides=strides,
        storage_bytes=storage_bytes,
    )
    if (record.offset + record.span_elements) * item_bits > storage_bytes * 8:
        raise UnsafeInput(f"{where} of shape {brief(shape)} reaches past its storage of {storage_bytes} bytes: the file lies.")
    return record


def sizes_of(value: object) -> tuple[int, ...] | None:
    """Whole numbers from 0 to 2^48 as a tuple (from a tuple, a list or a `torch.Size` call), else None."""
    if isinstance(value, Call) and value.target.attribute == "Size" and value.args:
        value = value.args[0]
    if not isinstance(value, (tuple, list)):
        return None
    return tuple(value) if all(type(item) is int and 0 <= item <= MAX_DIMENSION for item in value) else None
