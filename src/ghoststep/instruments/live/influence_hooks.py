"""What hooks see while a call runs: look-ups of ids, the hidden states behind them, the inputs of the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.calling import LiveCall, is_varied
from ghoststep.instruments.live.influence_attention import AttentionSeen
from ghoststep.instruments.live.outputs import vectors

if TYPE_CHECKING:
    import torch


class EnoughError(BaseException):
    """Raised by a hook once the readout is in hand: what comes after (head, loss) is not needed. The run suppresses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """Where the hidden states are read: a module's input or output. `name` for messages; `dtype` as the model computes them.

    which: the number of the module's call that counts (from 0), or None for the last one that fits.
    """

    module: torch.nn.Module
    name: str
    is_input: bool
    dtype: torch.dtype
    which: int | None = None


def as_hidden(tensor: torch.Tensor, batch: int, time: int) -> torch.Tensor | None:
    """[B, T, D] from [B, T, D], [B*T, D], [T, B, D], or [B, P + T, D] with P virtual tokens before; None for other shapes."""
    if tensor.dim() == 2 and tensor.shape[0] == batch * time:
        return tensor.reshape(batch, time, -1)
    if tensor.dim() != 3:
        return None
    if tensor.shape[0] == batch and tensor.shape[1] >= time:
        return tensor[:, tensor.shape[1] - time :]
    if tensor.shape[0] == time and tensor.shape[1] == batch:
        return tensor.transpose(0, 1)
    return None


def hidden_tensor(output: Any, batch: int, time: int) -> torch.Tensor | None:
    """The first floating [B, T, D] tensor of a module's output (`last_hidden_state` by name first), or None."""
    import torch

    named = [getattr(output, "last_hidden_state", None), getattr(output, "logits", None)]
    if isinstance(output, (tuple, list)):
        named += list(output[:4])
    elif isinstance(output, Mapping):
        named += list(output.values())
    for value in (output, *named):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3:
            fits = value.shape[0] == batch and value.shape[1] >= time
            fits = fits or (value.shape[0] == time and value.shape[1] == batch)
            if fits and value.shape[-1] > 1:
                return value
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """One look-up of integers in a table during the surveyed call. `is_plain`: what came out are the rows of these ids (a
    position table may be handed the ids for their shape only)."""

    module: torch.nn.Module
    ids: torch.Tensor
    num_rows: int
    is_plain: bool


@dataclass(slots=True, kw_only=True)
class Stretch:
    """What ran between the look-up of one text and that of another: the last hidden states of its shape, and where."""

    ids: torch.Tensor
    hidden: torch.Tensor | None = None
    name: str = ""
    module: torch.nn.Module | None = None
    which: int = 0


class Noted:
    """What hooks saw during the surveyed call. `stream`: the one text whose hidden states and attention count, if not all do."""

    def __init__(self, call: LiveCall, stream: torch.Tensor | None) -> None:
        self.call, self.stream = call, stream
        self.stretch: Stretch | None = None
        self.wanted: Stretch | None = None
        self.num_calls: dict[torch.nn.Module, int] = {}
        self.attention = AttentionSeen()
        self.attention_wanted = AttentionSeen()
        self.look_ups: list[LookUp] = []
        self.last: tuple[str, torch.nn.Module, torch.Tensor] | None = None
        self.heads: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(B, T) of the token look-ups so far, the latest first: a decoder's comes after its encoder's."""
        if self.stream is not None:
            return [(int(self.stream.shape[0]), int(self.stream.shape[1]))]
        rows = self.call.num_table_rows
        found = [u.ids for u in self.look_ups if u.num_rows == rows and u.is_plain] or list(self.call.ids)
        return [(i.shape[0], i.shape[-1]) if i.dim() > 1 else (1, i.shape[0]) for i in found[::-1]]

    def hook(self, name: str) -> Callable[..., None]:
        import torch

        def note(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            given, weight = (args[0] if args else None), getattr(module, "weight", None)
            if isinstance(given, torch.Tensor) and not given.is_floating_point() and isinstance(weight, torch.Tensor):
                if weight.dim() == 2 and given.dim() in (1, 2):
                    ids, rows = given.detach().cpu().long(), int(weight.shape[0])
                    plain = module is self.call.embedding or _are_rows(weight, given, vectors(output))
                    self.look_ups.append(LookUp(module=module, ids=ids, num_rows=rows, is_plain=plain))
                    self.begin(self.look_ups[-1])
            elif module is self.call.head:
                self.heads.append(given.detach() if isinstance(given, torch.Tensor) else output)
            elif not self.heads:
                hidden = self.hidden(output)
                self.last = self.last if hidden is None else (name, module, hidden)
                if hidden is not None and self.stretch is not None and self.stretch is self.wanted:
                    self.wanted.hidden, self.wanted.name, self.wanted.module = hidden, name, module
                    self.wanted.which = self.num_calls.get(module, 0)
            self.num_calls[module] = self.num_calls.get(module, 0) + 1

        return note

    def begin(self, look_up: LookUp) -> None:
        """Another text is looked up: what runs from here on is its own, until the next one."""
        if self.stream is None or not look_up.is_plain or not is_token_stream(look_up, self.call):
            return
        if self.stretch is not None and is_same(self.stretch.ids, look_up.ids):
            return
        if self.stretch is not None and self.stretch is self.wanted:
            self.attention_wanted = replace(self.attention)
        self.stretch = Stretch(ids=look_up.ids)
        if is_same(look_up.ids, self.stream):
            self.wanted = self.stretch
            seen, none = self.attention, AttentionSeen()
            seen.open_BTT, seen.empty_BT = none.open_BTT, none.empty_BT
            seen.num_operations, seen.num_choices = none.num_operations, none.num_choices

    def of_stream(self) -> tuple[torch.Tensor, Readout, AttentionSeen]:
        """Hidden states of the one text, where they are read, and what attention let through meanwhile."""
        found = self.wanted
        if found is None or found.hidden is None or found.module is None:
            raise CannotLook("no module gives hidden states of this text alone")
        readout = Readout(
            module=found.module, name=f"the output of {found.name}", is_input=False, dtype=found.hidden.dtype, which=found.which
        )
        seen = self.attention if self.stretch is found else self.attention_wanted
        return found.hidden.float().cpu(), readout, seen

    def at_head(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop before the head, the last and often the largest product, where its only call takes every position."""
        import torch

        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, torch.Tensor) and any(as_hidden(given, *size) is not None for size in self.sizes):
            self.heads.append(given.detach())
            raise EnoughError

    def hidden(self, output: Any) -> torch.Tensor | None:
        """The [B, T, D] of an output, for whichever look-up it belongs to (a decoder's before its encoder's)."""
        for size in self.sizes:
            tensor = hidden_tensor(output, *size)
            if tensor is not None:
                return as_hidden(tensor.detach(), *size)
        return None


def is_token_stream(look_up: LookUp, call: LiveCall) -> bool:
    """True for the token table itself, and for another one of its size unless what it looks up counts up or stays the same: a
    position table may have as many rows as the vocabulary."""
    if getattr(look_up.module, "weight", None) is getattr(call.embedding, "weight", None):
        return True
    return look_up.num_rows == call.num_table_rows and is_varied(look_up.ids)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.shape == other.shape and torch.equal(one, other)


def _are_rows(weight: torch.Tensor, ids: torch.Tensor, output: Any) -> bool:
    """True if the output's vectors point where the table's rows of these ids do (a scale in between is fine)."""
    import torch

    flat = ids.detach().reshape(-1)[:16].long()
    if not isinstance(output, torch.Tensor) or output.dim() < 2 or output.shape[-1] != weight.shape[-1]:
        return False
    vectors = output.detach().reshape(-1, output.shape[-1])[: len(flat)].float()
    if not len(flat) or int(flat.max()) >= weight.shape[0] or int(flat.min()) < 0 or len(vectors) < len(flat):
        return False
    rows = weight.detach()[flat.to(weight.device)].float()
    return bool((torch.nn.functional.cosine_similarity(rows, vectors.to(rows.device), dim=-1) > 0.99).float().mean() > 0.5)
