"""Which module trains, seen without touching the script.

A module trains when gradients are enabled in its forward and an optimizer holds some of its parameters; a teacher, a reference
model and an evaluation are not that. Calls are looked at only while some optimizer holds parameters that no watch covers: from the
creation of an optimizer to the first training forward. Calls nest, and the outermost one comes first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ghoststep.launch import owners
from ghoststep.launch.session import Session, current

if TYPE_CHECKING:
    import torch

PATIENCE = 20
"""Steps of an optimizer without any module that runs its parameters, after which nobody waits for one any more."""

SATELLITE = 0.1
"""A module that shares its optimizer with a watched one and holds less than this of its elements is no model (a learnt temperature)."""


def install() -> None:
    """Called once, when torch has just been imported."""
    Discovery(current()).install()


class Discovery:
    """The optimizers of this process, and which of their parameters nobody watches yet."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: list[weakref.ref[Any]] = []
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, torch.Tensor] = {}
        self._is_stale = False
        self._ignored: set[int] = set()
        self._without: set[int] = set()  # modules, by id, without any waiting parameter
        self._lookout: _Lookout | None = None
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """See optimizers being made and stepping from now on."""
        from torch.optim import Optimizer
        from torch.optim.optimizer import register_optimizer_step_post_hook

        original = Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.guarded(self.optimizer_made, optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        handle = register_optimizer_step_post_hook(self.after_step)
        self._undo += [handle.remove, lambda: setattr(Optimizer, "__init__", original)]

    def remove(self) -> None:
        """Take everything away again; the watches that were opened stay."""
        self._disarm()
        while self._undo:
            self._undo.pop()()

    def guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call; a fault of ours ends the search and never reaches the script."""
        if self._session.fault:
            return
        try:
            function(*args)
        except Exception as error:
            self._session.fault = f"{function.__name__}: {type(error).__name__}: {error}"
            self._disarm()

    def optimizer_made(self, optimizer: Any) -> None:
        """Its parameters are waited for from now on."""
        self._optimizers = [r for r in self._optimizers if r() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self._num_steps[optimizer] = 0
        self._is_stale = True
        self._arm()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The global hook after every optimizer's step."""
        import torch

        if torch.compiler.is_compiling():
            return
        self.guarded(self._after_step, optimizer)
        self._session.stop_if_asked()

    def _after_step(self, optimizer: Any) -> None:
        self._session.stepped(optimizer)
        if optimizer not in self._num_steps:  # unpickled or copied: `__init__` did not run
            self.optimizer_made(optimizer)
        self._num_steps[optimizer] += 1
        if self._lookout is None or self._num_steps[optimizer] not in (1, PATIENCE):
            return
        self._refresh()
        left = {id(p): p for p in _trainable(optimizer) if id(p) in self._waiting}
        if left and self._num_steps[optimizer] == 1:
            # No call was seen: the optimizer was made after the forward, or is a copy. Its first step is lost to us.
            root = owners.covering(left)
            if root is not None:
                self._open(root)
        elif left:
            self._ignored |= set(left)
            self._session.num_unowned += len(left)
            self._is_stale = True
            self._refresh()

    def about_to_call(self, module: torch.nn.Module) -> None:
        """Before a module's forward and its hooks, while one is waited for."""
        import torch

        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._is_stale or id(module) not in self._without:
            self.guarded(self._look_at, module)

    def _look_at(self, module: torch.nn.Module) -> None:
        self._refresh()
        if not any(id(p) in self._waiting for p in module.parameters()):
            self._without.add(id(module))
            return
        # A part called on its own (`model.encoder(x)`, then `model.head(h)`): the whole is what trains.
        held = {id(p) for p in module.parameters()}
        wanted = {i: p for o in self._alive() if any(id(p) in held for p in _trainable(o)) for i, p in self._of(o)}
        root = module if held >= set(wanted) else owners.covering(wanted, module) or module
        self._open(root)

    def _open(self, root: torch.nn.Module) -> None:
        held = {id(p): p for p in root.parameters()}
        optimizers = [o for o in self._alive() if any(id(p) in held for p in _trainable(o))]
        if self._is_satellite(held, optimizers) or not self._session.open(root, optimizers):
            self._ignored |= set(held)
        self._is_stale = True
        self._refresh()

    def _is_satellite(self, held: Mapping[int, torch.Tensor], optimizers: list[Any]) -> bool:
        if not any(self._session.knows(o) for o in optimizers):
            return False
        every = sum(p.numel() for o in optimizers for p in _trainable(o))
        return sum(p.numel() for p in held.values()) < SATELLITE * every

    def _alive(self) -> list[Any]:
        return [o for r in self._optimizers if (o := r()) is not None]

    def _of(self, optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
        return ((id(p), p) for p in _trainable(optimizer) if id(p) in self._waiting)

    def _refresh(self) -> None:
        """Look anew at what is waited for, and tell the watches about optimizers of theirs."""
        if not self._is_stale:
            return
        self._is_stale = False
        self._without.clear()
        watched = self._session.watched() | self._ignored
        self._waiting = {id(p): p for o in self._alive() for p in _trainable(o) if id(p) not in watched}
        for optimizer in self._alive():
            self._session.offer(optimizer)
        if not self._waiting:
            self._disarm()

    def _arm(self) -> None:
        if self._lookout is None:
            self._lookout = _Lookout(self.about_to_call)

    def _disarm(self) -> None:
        if self._lookout is not None:
            self._lookout.remove()
            self._lookout = None


class _Lookout:
    """Stands in for `Module.__call__` and hands out the original at each look-up, after telling of it.

    So no frame of ours is in a traceback of the script's, torch.compile finds the function that it knows, and it does not warn as
    it does about global hooks of modules; the hooks that a watch sets are there for the call under way.
    """

    def __init__(self, tell: Callable[[torch.nn.Module], None]) -> None:
        import torch

        self._tell = tell
        self._original: Any = vars(torch.nn.Module)["__call__"]
        torch.nn.Module.__call__ = self  # type: ignore[method-assign, assignment]

    def __get__(self, module: torch.nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self._original
        try:
            frame = sys._getframe(1)
            # The compiler takes the method to look at it. `OptimizedModule.__call__` is a call.
            if frame.f_code.co_name == "__call__" or not frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
                self._tell(module)
        except Exception:  # ours, and whatever it is, the module gets called
            return self._original.__get__(module, kind)
        return self._original.__get__(module, kind)

    def remove(self) -> None:
        """Put the original back, unless somebody else has put something there."""
        import torch

        if vars(torch.nn.Module).get("__call__") is self:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]


def _trainable(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
