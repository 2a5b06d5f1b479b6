"""The first pass over a call: where its hidden states can be read, and which tables its tokens are looked up in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.instruments.live.calling import LiveCall
from ghoststep.instruments.live.influence_attention import AttentionSeen, watch_attention
from ghoststep.instruments.live.influence_hooks import LookUp, Noted, Readout, as_hidden, is_token_stream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """base: H float32 [B, T, D] at the readout. ids_BT: the token ids its positions stand for; tables: every module that looked
    them up. attention: what attention operations let through. num_streams: token sequences looked up (2: encoder and decoder);
    encoder_ids [B, S] and encoder_tables: the first of them where there are two. streams: ids and tables of each, in order.
    position_sizes: lengths of look-ups that count 0, 1, 2, ...
    """

    base: torch.Tensor
    readout: Readout
    ids_BT: torch.Tensor
    tables: list[torch.nn.Module]
    attention: AttentionSeen
    num_streams: int
    encoder_ids: torch.Tensor | None
    encoder_tables: list[torch.nn.Module]
    streams: list[tuple[torch.Tensor, list[torch.nn.Module]]]
    position_sizes: frozenset[int]


def survey(core: torch.nn.Module, run: Callable[[], None], call: LiveCall, stream: torch.Tensor | None = None) -> Survey:
    """The first pass, as far as the head: which tables are looked up, the hidden states at the best place to read them, what
    attention sees. `run` suppresses `EnoughError`. `stream`: the ids of one of several texts, to be read by itself."""
    noted = Noted(call, stream)
    handles = [module.register_forward_hook(noted.hook(name)) for name, module in core.named_modules() if name]
    handles.append(core.register_forward_hook(lambda m, a, o: noted.outputs.append(o)))
    if call.head is not None and len(call.head_inputs) == 1 and stream is None:
        handles.append(call.head.register_forward_pre_hook(noted.at_head, with_kwargs=True))
    try:
        with watch_attention(*noted.sizes[0]) as attention:
            noted.attention = attention
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not noted.look_ups:
        raise CannotLook("the recorded call of the model looks no token ids up: there is no place to change a token at")
    if stream is not None:
        base, readout, attention = noted.of_stream()
        return _survey_of(noted, base, readout, attention, *_tables(noted.look_ups, stream), [stream])
    base, readout = _readout(core, noted)
    ids_BT, tables = _main_stream(noted.look_ups, base.shape[0], base.shape[1], call)
    streams = [u.ids for u in noted.look_ups if u.is_plain and is_token_stream(u, call)]
    return _survey_of(noted, base, readout, attention, ids_BT, tables, streams)


def _survey_of(
    noted: Noted, base: torch.Tensor, readout: Readout, attention: AttentionSeen, ids_BT: torch.Tensor,
    tables: list[torch.nn.Module], streams: list[torch.Tensor],
) -> Survey:  # fmt: skip
    import torch

    different = list({tuple(i.reshape(-1).tolist()): i for i in streams}.values())
    if len(different) > 1:
        attention.open_BTT = attention.empty_BT = None  # an encoder's masks are about other positions
    before = [
        i
        for i in streams
        if len(different) > 1 and i.dim() == 2 and i.shape[0] == ids_BT.shape[0] and not torch.equal(i, ids_BT)
    ]
    encoder_ids, encoder_tables = _tables(noted.look_ups, before[0]) if before else (None, [])
    counting = [u.ids for u in noted.look_ups if u.ids.shape[-1] > 1 and _counts_up(u.ids)]
    return Survey(
        base=base, readout=readout, ids_BT=ids_BT, tables=tables, attention=attention, num_streams=len(different),
        encoder_ids=encoder_ids, encoder_tables=encoder_tables, streams=[_tables(noted.look_ups, i) for i in different],
        position_sizes=frozenset(int(i.shape[-1]) for i in counting),
    )  # fmt: skip


def _counts_up(ids: torch.Tensor) -> bool:
    return bool((ids[..., 1:] - ids[..., :-1] == 1).all())


def _readout(core: torch.nn.Module, noted: Noted) -> tuple[torch.Tensor, Readout]:
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
    fitting = [u for u in look_ups if u.ids.numel() == batch * time and u.is_plain and is_token_stream(u, call)]
    if not fitting:
        shapes = ", ".join(str(tuple(u.ids.shape)) for u in look_ups[:4])
        raise CannotLook(f"hidden states of {batch} examples and {time} positions, but the ids looked up have shapes {shapes}")
    return _tables(look_ups, fitting[-1].ids.reshape(batch, time))


def _tables(look_ups: list[LookUp], ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.nn.Module]]:
    import torch

    same = [
        u for u in look_ups if u.is_plain and u.ids.numel() == ids.numel() and torch.equal(u.ids.reshape(-1), ids.reshape(-1))
    ]
    return ids.clone(), list(dict.fromkeys(u.module for u in same))
