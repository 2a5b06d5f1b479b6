"""The first pass over a call: where its hidden states can be read, and which tables its tokens are looked up in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.instruments.live.calling import LiveCall, is_varied
from ghoststep.instruments.live.influence_attention import AttentionSeen, watch_attention
from ghoststep.instruments.live.outputs import vectors

if TYPE_CHECKING:
    import torch


class EnoughError(BaseException):
    """Raised by a hook once the readout is in hand: what comes after (head, loss) is not needed. The run suppresses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """Where the hidden states are read: a module's input or output. `name` for messages; `dtype` as the model computes them."""

    module: torch.nn.Module
    name: str
    is_input: bool
    dtype: torch.dtype


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """base: H float32 [B, T, D] at the readout. ids_BT: the token ids its positions stand for; tables: every module that looked
    them up. attention: what attention operations let through. num_streams: token sequences looked up (2: encoder and decoder);
    encoder_ids [B, S] and encoder_tables: the first of them where there are two.
    """

    base: torch.Tensor
    readout: Readout
    ids_BT: torch.Tensor
    tables: list[torch.nn.Module]
    attention: AttentionSeen
    num_streams: int
    encoder_ids: torch.Tensor | None
    encoder_tables: list[torch.nn.Module]


class _Noted:
    """What hooks saw during the surveyed call."""

    def __init__(self, call: LiveCall) -> None:
        self.call = call
        self.look_ups: list[LookUp] = []
        self.last: tuple[str, torch.nn.Module, torch.Tensor] | None = None
        self.heads: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(B, T) of the token look-ups so far, the latest first: a decoder's comes after its encoder's."""
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
            elif module is self.call.head:
                self.heads.append(given.detach() if isinstance(given, torch.Tensor) else output)
            elif not self.heads:
                hidden = self.hidden(output)
                self.last = self.last if hidden is None else (name, module, hidden)

        return note

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


def survey(core: torch.nn.Module, run: Callable[[], None], call: LiveCall) -> Survey:
    """The first pass, as far as the head: which tables are looked up, the hidden states at the best place to read them, what
    attention sees. `run` suppresses `EnoughError`."""
    import torch

    noted = _Noted(call)
    handles = [module.register_forward_hook(noted.hook(name)) for name, module in core.named_modules() if name]
    handles.append(core.register_forward_hook(lambda m, a, o: noted.outputs.append(o)))
    if call.head is not None and len(call.head_inputs) == 1:
        handles.append(call.head.register_forward_pre_hook(noted.at_head, with_kwargs=True))
    try:
        with watch_attention(*noted.sizes[0]) as attention:
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not noted.look_ups:
        raise CannotLook("the recorded call of the model looks no token ids up: there is no place to change a token at")
    base, readout = _readout(core, noted)
    ids_BT, tables = _main_stream(noted.look_ups, base.shape[0], base.shape[1], call)
    streams = [u.ids for u in noted.look_ups if u.is_plain and _is_token_stream(u, call)]
    num_streams = len({tuple(i.reshape(-1).tolist()) for i in streams})
    if num_streams > 1:
        attention.open_BTT = attention.empty_BT = None  # an encoder's masks are about other positions
    before = [
        i for i in streams if num_streams > 1 and i.dim() == 2 and i.shape[0] == ids_BT.shape[0] and not torch.equal(i, ids_BT)
    ]
    encoder_ids, encoder_tables = _tables(noted.look_ups, before[0]) if before else (None, [])
    return Survey(
        base=base, readout=readout, ids_BT=ids_BT, tables=tables, attention=attention, num_streams=num_streams,
        encoder_ids=encoder_ids, encoder_tables=encoder_tables,
    )  # fmt: skip


def _readout(core: torch.nn.Module, noted: _Noted) -> tuple[torch.Tensor, Readout]:
    """The head's input; without a head, or with several calls of it, the model's output; else the last module's output."""
    call = noted.call
    if call.head is not None and len(noted.heads) == 1:
        for size in noted.sizes:
            hidden = as_hidden(noted.heads[0], *size)
            if hidden is not None:
                readout = Readout(module=call.head, name=f"the input of {call.head_name}", is_input=True, dtype=hidden.dtype)
                return hidden.float().cpu(), readout
    hidden = noted.hidden(noted.outputs[-1]) if not noted.heads and noted.outputs else None
    if hidden is not None:
        readout = Readout(module=core, name="the model's output", is_input=False, dtype=hidden.dtype)
        return hidden.float().cpu(), readout
    if noted.last is None:
        raise DoesNotApply("positions have no hidden states of their own here: the embeddings are pooled at once")
    name, module, hidden = noted.last
    return hidden.float().cpu(), Readout(module=module, name=f"the output of {name}", is_input=False, dtype=hidden.dtype)


def _main_stream(look_ups: list[LookUp], batch: int, time: int, call: LiveCall) -> tuple[torch.Tensor, list[torch.nn.Module]]:
    """The token ids that the readout's positions stand for: the last look-up of its shape in a table of as many rows as the
    token table (a decoder's comes after its encoder's), and every table that the same ids were looked up in."""
    fitting = [u for u in look_ups if u.ids.numel() == batch * time and u.is_plain and _is_token_stream(u, call)]
    if not fitting:
        shapes = ", ".join(str(tuple(u.ids.shape)) for u in look_ups[:4])
        raise CannotLook(f"hidden states of {batch} examples and {time} positions, but the ids looked up have shapes {shapes}")
    return _tables(look_ups, fitting[-1].ids.reshape(batch, time))


def _is_token_stream(look_up: LookUp, call: LiveCall) -> bool:
    """True for the token table itself, and for another one of its size unless what it looks up counts up or stays the same: a
    position table may have as many rows as the vocabulary."""
    if getattr(look_up.module, "weight", None) is getattr(call.embedding, "weight", None):
        return True
    return look_up.num_rows == call.num_table_rows and is_varied(look_up.ids)


def _tables(look_ups: list[LookUp], ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.nn.Module]]:
    import torch

    same = [
        u for u in look_ups if u.is_plain and u.ids.numel() == ids.numel() and torch.equal(u.ids.reshape(-1), ids.reshape(-1))
    ]
    return ids.clone(), list(dict.fromkeys(u.module for u in same))


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
