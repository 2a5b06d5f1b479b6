"""One call of the model, repeated with some tokens replaced or with its gradient taken: the passes behind influence.

The arguments are the user's own, untouched: the tokens change where the input embedding looks them up, so masks, positions and
labels stay what the user made them. Every pass starts from the same random state and buffers: dropout falls the same way, and
two passes of equal tokens are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook
from ghoststep.instruments.live.calling import LiveCall, eager
from ghoststep.instruments.live.influence_attention import AttentionSeen
from ghoststep.instruments.live.influence_hooks import EnoughError, as_hidden, hidden_tensor
from ghoststep.instruments.live.influence_survey import survey
from ghoststep.instruments.live.outputs import vectors, with_vectors
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import users_code

if TYPE_CHECKING:
    import torch


class Probe:
    """Runs passes of one recorded call. H is float32 [B, T, D] at the readout.

    time_first: the model's tensors are [T, B, ...]; ids_BT, base, H and gradients are turned round to [B, T, ...].
    ids_BT: the token ids of the look-up that the readout belongs to. num_forward / num_backward count. `stochastic`: a pass drew
    random numbers.
    """

    def __init__(
        self, call: LiveCall, *, which: int = 0, training: bool | None = None, stream: torch.Tensor | None = None
    ) -> None:
        import torch

        if call.embedding is None:
            raise CannotLook("no module of the model looks token ids up: there is no place to change a token at")
        self.core, self.call = call.core, call.calls[which]
        self.training = self.core.training if training is None else training
        self.num_forward = self.num_backward = 0
        self.stochastic = self.time_first = False
        self._random = torch.get_rng_state()
        self._generator = torch.Generator().manual_seed(0)
        with self.quiet():
            seen = survey(self.core, self.run, call, stream)
        self.base, self.readout, self.attention = seen.base, seen.readout, seen.attention
        self.ids_BT, self.tables, self.num_streams = seen.ids_BT, seen.tables, seen.num_streams
        self.encoder_ids, self._encoder_tables = seen.encoder_ids, seen.encoder_tables
        self.streams, self.position_sizes = seen.streams, seen.position_sizes

    def turned(self) -> Probe:
        """The same probe with batch and time exchanged, sharing what was measured."""
        other = copy.copy(self)
        other.time_first = not self.time_first
        other.ids_BT, other.base = self.ids_BT.T.contiguous(), self.base.transpose(0, 1).contiguous()
        other.encoder_ids = None if self.encoder_ids is None else self.encoder_ids.T.contiguous()
        other.attention = AttentionSeen(num_operations=self.attention.num_operations, num_choices=self.attention.num_choices)
        return other

    def encoder_hidden(self, replaced_BS: torch.Tensor) -> torch.Tensor:
        """The decoder's H after other tokens were put into the encoder's ids [B, S]. One forward."""
        assert self.encoder_ids is not None  # the caller looked
        return self.hidden_with(self.encoder_ids, self._encoder_tables, replaced_BS)

    def hidden_with(self, ids: torch.Tensor, tables: list[torch.nn.Module], replaced: torch.Tensor) -> torch.Tensor:
        """H after other tokens were put in place of these ids, which the call looks up in these tables. One forward."""
        other = copy.copy(self)
        other.ids_BT, other.tables = ids, tables
        hidden = other.hidden(replaced)
        self.num_forward = other.num_forward
        return hidden

    @property
    def encoder_tables(self) -> list[torch.nn.Module]:
        """The modules that looked the encoder's ids up."""
        return self._encoder_tables

    @property
    def _layout(self) -> tuple[int, int]:
        """The first two sizes of the model's own tensors."""
        batch, time = int(self.base.shape[0]), int(self.base.shape[1])
        return (time, batch) if self.time_first else (batch, time)

    def _turn(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self.time_first else tensor

    def run(self, *, grad: bool = False) -> None:
        """One forward in the recorded mode. Hooks are the caller's."""
        import torch

        torch.set_rng_state(self._random)
        self.num_forward += 1
        with contextlib.suppress(EnoughError), users_code(), torch.set_grad_enabled(grad):
            self.core(*self.call.args, **dict(self.call.kwargs))
        self.stochastic |= not torch.equal(torch.get_rng_state(), self._random)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Everything as it was afterwards; parameters take no gradient meanwhile; the model is in the probe's mode."""
        with untouched(self.core), eager():
            for p in self.core.parameters():
                p.requires_grad_(False)
            if self.training != self.core.training:
                self.core.train(self.training)
            yield

    def hidden(self, replaced_BT: torch.Tensor | None = None) -> torch.Tensor:
        """H with these token ids (None: the user's own). One forward up to the readout."""
        caught: list[torch.Tensor] = []
        with self.quiet(), self._feeding(replaced_BT), self._reading(caught):
            self.run()
        return self._shaped(caught)

    def hidden_of(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], shape: tuple[int, int]) -> torch.Tensor:
        """H [B', T', D] of a call with other arguments, in eval mode. One forward of those examples; not counted."""
        import torch

        caught: list[torch.Tensor] = []
        looked_up: list[int] = []
        with self.quiet(), self._reading(caught, shape), self._counting(looked_up):
            self.core.eval()
            with contextlib.suppress(EnoughError), users_code(), torch.no_grad():
                self.core(*arguments[0], **arguments[1])
        hidden = as_hidden(caught[-1], *shape) if caught else None
        if hidden is None:
            raise CannotLook(f"{self.readout.name} gives no hidden states of {shape[1]} positions when a text is run alone")
        if caught[-1].dim() == 3 and caught[-1].shape[1] > shape[1] and shape[0] * shape[1] not in looked_up:
            # Which of them are the text's own: the last, behind virtual tokens, or the first, before pads of the model's own?
            raise CannotLook(f"the model fills a text of {shape[1]} tokens up by itself, to {caught[-1].shape[1]} positions")
        return hidden.detach().float().cpu()

    @contextlib.contextmanager
    def _counting(self, looked_up: list[int]) -> Iterator[None]:
        """How many ids each look-up takes."""

        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            looked_up.extend(a.numel() for a in args[:1])

        handles = [table.register_forward_pre_hook(hook) for table in self.tables]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gradient(self, targets: list[tuple[int, int]]) -> torch.Tensor:
        """L2 norms [B, T] of d (sum over targets of r · H[target]) / d embedding output, r random of norm 1. One forward, one
        backward."""
        return self.gradients([targets])[0]

    def gradients(self, groups: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
        """The same for each group of targets. One forward for all of them, one backward each."""
        import torch

        caught: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []
        with self.quiet(), self._leaves(leaves), self._reading(caught):
            self.run(grad=True)
            hidden = self._shaped(caught, detach=False)
            if not leaves or not hidden.requires_grad:
                raise CannotLook("no gradient flows from the hidden states to the input embedding")
            found = []
            for left, targets in zip(range(len(groups))[::-1], groups, strict=True):
                direction = torch.randn(hidden.shape[-1], generator=self._generator).to(hidden)
                direction = direction / direction.norm()
                with torch.enable_grad():
                    total = torch.stack([hidden[b, t] @ direction for b, t in targets]).sum()
                with users_code():
                    total.backward(retain_graph=left > 0)  # type: ignore[no-untyped-call]
                self.num_backward += 1
                norms = torch.zeros(self._layout)
                for leaf in leaves:
                    if leaf.grad is not None:
                        norms += leaf.grad.detach().double().reshape(*self._layout, -1).norm(dim=-1).float().cpu()
                    leaf.grad = None
                found.append(self._turn(norms))
        return found

    @contextlib.contextmanager
    def _feeding(self, replaced_BT: torch.Tensor | None) -> Iterator[None]:
        handles = []
        if replaced_BT is not None:
            for table in self.tables:
                handles.append(table.register_forward_pre_hook(self._replace(replaced_BT)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _replace(self, replaced_BT: torch.Tensor) -> Any:

        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not self._is_mine(args[0] if args else None):
                return None
            given = args[0]
            return (self._turn(replaced_BT).to(given).reshape(given.shape), *args[1:])

        return hook

    def _is_mine(self, given: Any) -> bool:
        import torch

        if not isinstance(given, torch.Tensor) or given.is_floating_point():
            return False
        flat, mine = given.detach().reshape(-1), self._turn(self.ids_BT).reshape(-1)
        return flat.shape == mine.shape and bool(torch.equal(flat.cpu().long(), mine))

    @contextlib.contextmanager
    def _leaves(self, leaves: list[torch.Tensor]) -> Iterator[None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._is_mine(args[0] if args else None):
                return None
            leaf = vectors(output).detach().clone().requires_grad_(True)
            leaves.append(leaf)
            return with_vectors(output, leaf.clone())  # some models scale the embeddings in place, which a leaf forbids

        handles = [table.register_forward_hook(hook) for table in self.tables]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _reading(self, caught: list[torch.Tensor], shape: tuple[int, int] | None = None) -> Iterator[None]:
        module, is_input = self.readout.module, self.readout.is_input
        batch, time = shape or self._layout
        numbers = itertools.count()

        def before(m: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(args[0] if args else next(iter(kwargs.values())))
            raise EnoughError

        def after(m: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            number = next(numbers)
            tensor = hidden_tensor(output, batch, time)
            if tensor is not None and self.readout.which in (None, number):
                caught.append(tensor)

        handle = module.register_forward_pre_hook(before, with_kwargs=True) if is_input else module.register_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()

    def _shaped(self, caught: list[torch.Tensor], *, detach: bool = True) -> torch.Tensor:
        if not caught:
            raise CannotLook(f"{self.readout.name} was not reached in a second run of the same call")
        tensor = as_hidden(caught[-1], *self._layout)
        tensor = None if tensor is None else self._turn(tensor)
        if tensor is None or tensor.shape != self.base.shape:
            raise CannotLook(f"{self.readout.name} changed its shape in a second run of the same call")
        return tensor.detach().float().cpu() if detach else tensor
