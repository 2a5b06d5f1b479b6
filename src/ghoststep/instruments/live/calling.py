"""How the user's loss calls the model: which arguments, where the token ids go in, where the head is, where the logits come out.

Found by running the loss once under hooks, not from names: the input embedding is the module that looks the ids up, the head is
the last module that turns a hidden state into one number a class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghoststep.errors import CannotLook, SetupCannotRun
from ghoststep.evidence.base import Evidence
from ghoststep.instruments.live.kept_batches import fresh
from ghoststep.instruments.live.outputs import find_logits, num_places, vectors
from ghoststep.instruments.live.untouched import untouched
from ghoststep.instruments.live.users_errors import as_it_is, guard_look_ups, need_scalar, parts_alone, with_graph_if_need_be
from ghoststep.registry import instrument
from ghoststep.subjects.setup import Setup
from ghoststep.subjects.setup_batches import Batch, PlacedBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of the root model: its arguments as they came, what it returned, and the mode it was in."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCall(Evidence):
    """What one run of the user's loss on the first batch showed. Holds live tensors and modules: for instruments, not for checks.

    model: the root as given. core: without DDP and torch.compile wrappers (hooks sit on it). wrappers: their names.
    calls: every call of the core, in order (a contrastive setup has several). loss: the scalar, detached; loss_error: why there
    is none. embedding: the module that looked the token ids up, or None; ids: one int64 tensor [B, T] a look-up.
    head: the module whose output's last dimension is the number of classes, or None if the loss never called one;
    head_inputs / head_outputs: its detached tensors, one a call. num_classes: classes of the head or of the logits.
    logits: the logits tensor in the last call's output (detached), or None.
    """

    model: torch.nn.Module
    core: torch.nn.Module
    wrappers: tuple[str, ...]
    calls: tuple[ModelCall, ...]
    loss: torch.Tensor | None
    loss_error: str | None
    embedding: torch.nn.Module | None
    embedding_name: str
    ids: tuple[torch.Tensor, ...]
    head: torch.nn.Module | None
    head_name: str
    head_inputs: tuple[torch.Tensor, ...]
    head_outputs: tuple[torch.Tensor, ...]
    num_classes: int | None
    logits: torch.Tensor | None

    @property
    def num_table_rows(self) -> int | None:
        """Rows of the input embedding's table."""
        weight = getattr(self.embedding, "weight", None)
        return None if weight is None else int(weight.shape[0])


def unwrap(model: torch.nn.Module) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The module inside DDP, FSDP1-like and torch.compile wrappers, and the wrappers' class names. PEFT stays: it is the model."""
    wrappers: list[str] = []
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None or not callable(inner):
            return model, tuple(wrappers)
        wrappers.append(type(model).__name__)
        model = inner


def compute_loss(setup: Setup, batch: Batch, model: torch.nn.Module | None = None) -> torch.Tensor:
    """The user's own scalar loss on a batch: `loss_fn`, else `.loss` (or "loss", or the first scalar) of the model's output.

    Raises `CannotLook` when there is neither; errors of the user's code come through.
    """
    import torch

    model = setup.model if model is None else model
    if setup.loss_fn is not None:
        return need_scalar(setup.loss_fn(model, fresh(batch)))
    output = call_model(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple):
        loss = next((o for o in output if isinstance(o, torch.Tensor) and o.numel() == 1), None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CannotLook("the model returns no loss for this batch, and the setup has no loss_fn(model, batch) -> loss")
    return loss.reshape(())


def call_model(model: torch.nn.Module, batch: Batch) -> Any:
    """`model(**batch)`; `model(*batch)` for a tuple, as far as the model takes; `model(ids)` for a module that takes one tensor."""
    import inspect

    core, _ = unwrap(model)
    if isinstance(batch, PlacedBatch):
        return model(*list(batch.values())[: num_places(core)])
    parameters = inspect.signature(core.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or {p.name for p in parameters} & set(batch):
        accepted = {p.name for p in parameters}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return model(**{k: v for k, v in batch.items() if takes_all or k in accepted})
    return model(next(iter(batch.values())))


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """A compiled model ignores hooks set after compilation: run it eagerly meanwhile. Costs no recompilation.

    Also keeps `nn.TransformerEncoder` off its inference path, which skips modules, their hooks and functions, and which
    training never takes.
    """
    import torch

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@instrument
def live_call(setup: Setup) -> LiveCall:
    """Run the loss once (one forward, no backward) under hooks. Nothing is changed; see `untouched`."""
    import torch

    if not setup.batches:
        raise CannotLook("the setup has no batch")
    core, wrappers = unwrap(setup.model)
    calls: list[ModelCall] = []
    seen = _Seen()
    handles = [m.register_forward_hook(_watch(seen, name), with_kwargs=True) for name, m in core.named_modules() if name]
    handles += guard_look_ups(core)
    handles.append(core.register_forward_hook(
        lambda m, a, k, o: calls.append(ModelCall(args=a, kwargs=dict(k), output=o, training=m.training)), with_kwargs=True
    ))  # fmt: skip
    loss, error = None, None
    try:
        with untouched(setup, learn=True), eager(), torch.no_grad():
            try:
                with as_it_is(setup):
                    loss = with_graph_if_need_be(
                        lambda: compute_loss(setup, setup.batches[0]).detach(), seen.forget, calls.clear
                    )
            except SetupCannotRun:
                raise
            except CannotLook as reason:
                error = str(reason)
            if not calls:  # not as the setup runs: what this raises is no failure of theirs
                with parts_alone(seen.tables, [n for n, _, _ in seen.projections]):
                    call_model(setup.model, setup.batches[0])
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise CannotLook("the loss never calls the model's forward: hooks see nothing")
    embedding_name, ids = seen.token_look_ups()
    head_name, head_inputs, head_outputs = seen.head()
    modules = dict(core.named_modules())
    logits = find_logits(calls[-1].output, head_outputs[-1].shape[-1] if head_outputs else None)
    classes = head_outputs[-1].shape[-1] if head_outputs else None if logits is None else logits.shape[-1]
    return LiveCall(
        model=setup.model, core=core, wrappers=wrappers, calls=tuple(calls), loss=loss, loss_error=error,
        embedding=modules.get(embedding_name) if ids else None, embedding_name=embedding_name, ids=tuple(ids),
        head=modules.get(head_name) if head_outputs else None, head_name=head_name, head_inputs=tuple(head_inputs),
        head_outputs=tuple(head_outputs), num_classes=classes, logits=logits,
    )  # fmt: skip


class _Seen:
    """What passed through the modules during one run."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.look_ups: list[tuple[str, torch.Tensor, int]] = []
        self.proven: set[str] = set()
        self.tables: dict[str, int] = {}
        self.projections: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def token_look_ups(self) -> tuple[str, list[torch.Tensor]]:
        """The embedding that looked integers up and has the largest table (position and type tables are smaller)."""
        by_name: dict[str, list[tuple[torch.Tensor, int]]] = {}
        for name, ids, rows in self.look_ups:
            by_name.setdefault(name, []).append((ids, rows))
        if not by_name:
            return "", []
        best = max(by_name, key=lambda n: self._rank(n, *by_name[n][0]))
        # A decoder with a table of its own looks up after its encoder, other tokens, and the head stands over its positions.
        name, first = best, by_name[best][0]
        for n, ((ids, rows), *_) in by_name.items():
            if self._rank(n, ids, rows)[:3] == self._rank(best, *first)[:3] == (True, True, True) and not _equal(ids, first[0]):
                name = n
        # Encoder and decoder may each have a module of their own around one shared table.
        return name, [ids for n, ids, _ in self.look_ups if self.tables.get(n) == self.tables.get(name)]

    def _rank(self, name: str, ids: torch.Tensor, rows: int) -> tuple[bool, bool, bool, int, int]:
        """How much speaks for this look-up being that of the tokens that the head predicts.

        A position module may be handed the token ids too, and its table may be the larger one: see what it looked up.
        """
        varied = is_varied(ids)  # a table of segments may have as many rows as a hidden state is wide
        under_head = varied and any(
            o.shape[:-1] == ids.shape and _is_head_width(i.shape[-1], o.shape[-1], rows) for _, i, o in self.projections
        )
        return name in self.proven, varied, under_head, len(set(ids.flatten().tolist())), rows

    def head(self) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
        """The last projection that is as wide as the table, or nearly so and wider than its input (a padded or cut head)."""
        table = self.token_look_ups()[0]
        rows = max((r for n, _, r in self.look_ups if n == table), default=0)
        wide = [(n, i, o) for n, i, o in self.projections if _is_head_width(i.shape[-1], o.shape[-1], rows)]
        if not wide or self._returns_to_stream(wide[-1][0]):
            return "", [], []
        name = wide[-1][0]
        return name, [i for n, i, _ in wide if n == name], [o for n, _, o in wide if n == name]

    def _returns_to_stream(self, name: str) -> bool:
        """A feed-forward layer as wide as a small vocabulary: after it, another projection leads back to the width it came from."""
        last = max(k for k, (n, _, _) in enumerate(self.projections) if n == name)
        _, given, output = self.projections[last]
        back = output.shape[-1], given.shape[-1]
        return any((i.shape[-1], o.shape[-1]) == back for _, i, o in self.projections[last + 1 :])


def _is_head_width(num_inputs: int, num_outputs: int, rows: int) -> bool:
    return num_outputs == rows > 0 or (num_outputs >= 0.9 * rows > 0 and num_outputs > num_inputs)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def is_varied(ids: torch.Tensor) -> bool:
    """False for 0, 1, 2, ... (also restarting) and for constants: positions and types, not tokens."""
    flat = ids.reshape(-1, ids.shape[-1]) if ids.dim() > 1 else ids.reshape(1, -1)
    if flat.shape[-1] < 2:
        return True
    if len(set(flat.flatten().tolist())) < 3:
        return False  # segments or flags
    steps = flat[:, 1:] - flat[:, :-1]
    # Positions of packed or left-padded examples restart now and then, but mostly count up.
    return not bool(((steps == 1) | (steps == 0)).all()) and 2 * int((steps == 1).sum()) <= steps.numel()


def _is_look_up(ids: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> bool:
    """True if the first outputs are the table rows of these ids, up to one factor each (scaled embeddings)."""
    few = ids.detach().reshape(-1)[:8]
    if (
        output.shape[:-1] != ids.shape
        or output.shape[-1] != weight.shape[1]
        or not bool(((few >= 0) & (few < len(weight))).all())
    ):
        return False
    rows, seen = weight.detach()[few.long()].double(), output.detach().reshape(-1, output.shape[-1])[:8].double()
    product = (rows * seen).sum(dim=1).abs()
    return bool((product >= 0.99 * rows.norm(dim=1) * seen.norm(dim=1) - 1e-12).all())


def _watch(seen: _Seen, name: str) -> Callable[..., None]:
    import torch

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        weight = getattr(module, "weight", None)
        if isinstance(given, torch.Tensor) and not given.is_floating_point():
            output = vectors(output)
        if not isinstance(given, torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return
        if not given.is_floating_point():
            seen.look_ups.append((name, given.detach(), int(weight.shape[0])))
            seen.tables[name] = weight.data_ptr()
            if _is_look_up(given, weight, output):
                seen.proven.add(name)
        elif given.shape[:-1] == output.shape[:-1] and not any(True for _ in module.children()):
            seen.projections.append((name, given.detach(), output.detach()))

    return hook
