"""Reads the pickles inside PyTorch files without executing them.

A pickle is a program. This reader knows only the instructions that build plain data and turns every class or function the
program names into an inert `Name`, every call into an inert `Call`. Nothing is imported or called, so no file can run code;
names outside the list of the container are refused all the same, since no weights need them.
Time and memory are proportional to the bytes of the pickle, and bounded.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.containers.base import brief


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function named by the pickle, never looked up."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(slots=True, eq=False)
class Call:
    """A call or an object that the pickle asked for: what to call, with what, and the state set afterwards."""

    target: Name
    args: tuple[object, ...]
    state: object = None
    items: dict[object, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to data outside the pickle (torch: a storage)."""

    key: object


class _Mark:
    __slots__ = ()


_MARK = _Mark()
_GETATTR = Name("builtins", "getattr")
"""Python 3.11.0 to 3.11.3 pickle an enum member as `getattr(Class, "MEMBER")`."""
_MAX_INSTRUCTIONS = 20_000_000
_MAX_STACK = 1 << 18
_KEY_TYPES = (str, int, float, bytes, bool, type(None), Call, Name)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, *_BYTES))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME"))


class _Machine:
    """The stack machine. One method an instruction that does more than push a constant."""

    def __init__(self, allowed: Callable[[Name], bool], place: str) -> None:
        self._allowed, self._place = allowed, place
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self, stream: io.BytesIO) -> object:
        """Execute up to STOP and return the one value left."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > _MAX_INSTRUCTIONS or len(self._stack) > _MAX_STACK:
                raise UnsafeInput(
                    f"{self._place}: its pickle has over {_MAX_INSTRUCTIONS} instructions or {_MAX_STACK} "
                    "values on its stack; no "
                    "state dict needs that. Not read further."
                )
            name = opcode.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._memo[int(argument)] = self._stack[-1]  # type: ignore[arg-type]
            elif name == "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self._stack.append(self._memo[int(argument)])  # type: ignore[arg-type]
            elif name in _TUPLES:
                size = _TUPLES[name]
                self._stack[-size:] = [tuple(self._stack[-size:])]
            elif name not in _IGNORED and name != "STOP":
                step = getattr(self, f"_do_{name.lower()}", None)
                if step is None:
                    raise UnsafeInput(
                        f"{self._place} uses the pickle instruction {name}, which no saved weights need. Not run."
                    )
                step(argument)
        if len(self._stack) != 1:
            raise ValueError("the pickle leaves more than one value")
        return self._stack[0]

    def _pop_to_mark(self) -> list[object]:
        position = len(self._stack) - 1
        while self._stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("no mark on the stack")
        items = self._stack[position + 1 :]
        del self._stack[position:]
        return items

    def _push_name(self, module: object, attribute: object) -> None:
        name = Name(str(module), str(attribute))
        if name == _GETATTR:  # described, never called: see `_do_reduce`
            self._stack.append(name)
            return
        if not self._allowed(name):
            raise UnsafeInput(
                f"{self._place} is a pickle that asks for {brief(str(name))}: loading it could run code. "
                "Nothing was executed. If "
                "you trust its author, load it in a sandbox and save it as safetensors."
            )
        self._stack.append(name)

    def _do_mark(self, _: object) -> None:
        self._stack.append(_MARK)

    def _do_empty_dict(self, _: object) -> None:
        self._stack.append({})

    def _do_empty_list(self, _: object) -> None:
        self._stack.append([])

    def _do_empty_set(self, _: object) -> None:
        self._stack.append([])

    def _do_global(self, argument: object) -> None:
        module, _, attribute = str(argument).partition(" ")
        self._push_name(module, attribute)

    def _do_stack_global(self, _: object) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(module, str) and isinstance(attribute, str)):
            raise ValueError("a name that is no text")
        self._push_name(module, attribute)

    def _do_tuple(self, _: object) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _do_reduce(self, _: object) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        if not (isinstance(target, Name) and isinstance(args, tuple)):
            raise ValueError("a call of something that is no name")
        if target == _GETATTR:
            if not (len(args) == 2 and isinstance(args[0], Name) and args[0] != _GETATTR and isinstance(args[1], str)):
                raise UnsafeInput(
                    f"{self._place} is a pickle that asks for builtins.getattr of something that is no known class: loading it "
                    "could run code. Nothing was executed."
                )
            self._stack.append(Name(args[0].module, f"{args[0].attribute}.{args[1]}"))
            return
        self._stack.append(Call(target, args))

    _do_newobj = _do_reduce

    def _do_build(self, _: object) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Call):
            target.state = state

    def _do_binpersid(self, _: object) -> None:
        self._stack.append(Persistent(self._stack.pop()))

    def _do_append(self, _: object) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _do_appends(self, _: object) -> None:
        self._extend(self._pop_to_mark())

    _do_additems = _do_appends

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError("items appended to something that is no list")
        target.extend(items)

    def _do_setitem(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _do_setitems(self, _: object) -> None:
        self._update(self._pop_to_mark())

    def _update(self, flat: list[object]) -> None:
        target = self._stack[-1]
        entries = target.items if isinstance(target, Call) else target
        if not isinstance(entries, dict) or len(flat) % 2:
            raise ValueError("entries for something that is no mapping")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, _KEY_TYPES):  # hashing nested tuples of a hostile pickle can take for ever
                raise ValueError(f"a key of type {type(key).__name__}")
            entries[key] = value


def read_pickle(data: bytes, *, allowed: Collection[str] | Callable[[Name], bool], place: str) -> tuple[object, int]:
    """The value that the first pickle in `data` describes, and the number of bytes it takes.

    `allowed` holds the dotted names it may mention, or decides each. Raises `UnsafeInput` for other names and for instructions
    that plain data does not need, `CannotLook` for a damaged pickle.
    """
    decide = allowed if callable(allowed) else (lambda name: str(name) in allowed)
    stream = io.BytesIO(data)
    try:
        value = _Machine(decide, place).run(stream)
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        Warning,
    ) as error:  # Warning: bad escapes under -W error
        why = str(error)[:120] or type(error).__name__
        raise CannotLook(f"{place} holds a damaged pickle ({why}). Download or save it again.") from None
    return value, stream.tell()
