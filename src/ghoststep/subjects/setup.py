"""A setup as a subject: the user's own model, batch, loss and optimizer, as a function of theirs returns them.

Running that function runs the user's code; nothing else of theirs is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ghoststep.errors import SubjectError, UsageError
from ghoststep.finding import SubjectInfo
from ghoststep.run_folder import loading
from ghoststep.subjects.setup_batches import Batch, make_batches
from ghoststep.subjects.setup_values import a, check_objects, check_pad_id, check_roles, users_file

if TYPE_CHECKING:
    import torch

INTENTS = ("causal", "prefix", "masked", "seq2seq", "contrastive", "rl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is about to be trained, and how. Only `model` is required; each check that needs something that is missing says so.

    model: `torch.nn.Module`, also wrapped (DDP, PEFT, `torch.compile`), in the mode it will train in.
    batches: dicts or tuples of tensors as fed to the model or to `loss_fn`; the first one is the one that instruments look at.
    loss_fn: `loss_fn(model, batch) -> scalar tensor`. Without it the model's own `.loss` (or first scalar output) is used.
    train_step: `train_step(model, optimizer, batch)`, one whole step of the user's own; its result is the logged loss.
    optimizer, scheduler, scaler: as they will be used. max_grad_norm: the bound handed to clipping.
    accumulation_steps: micro-batches an optimizer step; consecutive batches are one window. total_steps: optimizer steps of the
    whole run. pad_token_id: overrides the tokenizer's and the config's.
    token_roles: int tensor [batch, time] or a name of a batch entry: 0 prompt, 1 answer, 2 template (first batch).
    intent: one of "causal", "prefix", "masked", "seq2seq", "contrastive", "rl"; None lets the instruments find out.
    save, load: `save(model, folder)` and `load(folder) -> model`.
    """

    kind: ClassVar[str] = "setup"

    model: torch.nn.Module
    batches: tuple[Batch, ...] = ()
    loss_fn: Callable[[Any, Any], Any] | None = None
    train_step: Callable[[Any, Any, Any], Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    total_steps: int | None = None
    tokenizer: Any = None
    checkpoint_dir: str | None = None
    corpus: Iterable[str] | None = None
    pad_token_id: int | None = None
    token_roles: Any = None
    intent: str | None = None
    save: Callable[[Any, str], Any] | None = None
    load: Callable[[str], Any] | None = None
    name: str = "setup"
    fast: bool = False

    def info(self) -> SubjectInfo:
        """What was given, and the model's class and size. Cost: counts parameters."""
        import torch

        parameters = [p for p in self.model.parameters() if not torch.nn.parameter.is_lazy(p)]
        facts: dict[str, str | int | float | bool] = {
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "mode": "train" if self.model.training else "eval",
            "batches": len(self.batches),
        }
        return SubjectInfo(kind=self.kind, name=self.name, facts=facts)


_KEYS = tuple(f.name for f in fields(Setup) if f.name not in ("name", "fast", "batches"))
SETUP_KEYS = (*_KEYS, "batch", "batches")
"""Keys of the mapping that a setup function may return."""


def make_setup(given: Mapping[str, Any], *, name: str = "setup", fast: bool = False, also_known: Sequence[str] = ()) -> Setup:
    """A `Setup` from a mapping with `batch` or `batches`; `UsageError` names unknown keys, a missing model, wrong values.

    With both `batch` and `batches`, the batch comes first and is not repeated. A tokenizer given as a path or name is loaded
    from files on this machine. `also_known` are names that a mistyped key may have meant beside those of a setup.
    """
    import torch

    unknown = sorted(set(map(str, given)) - set(SETUP_KEYS))
    if unknown:
        raise UsageError(f"{name}: {_unknown(unknown, also_known)}; a setup has some of {', '.join(SETUP_KEYS)}")
    if given.get("model") is None:
        raise UsageError(f"{name}: `model` is missing; a setup needs at least a model (torch.nn.Module)")
    if not isinstance(given["model"], torch.nn.Module):
        raise UsageError(f"{name}: `model` is {a(given['model'])}; expected a torch.nn.Module")
    if given.get("intent") not in (None, *INTENTS):
        raise UsageError(f"{name}: intent {given['intent']!r} is unknown; expected one of {', '.join(INTENTS)}")
    for key in ("loss_fn", "train_step", "save", "load"):
        if given.get(key) is not None and not callable(given[key]):
            raise UsageError(f"{name}: `{key}` is {a(given[key])}; expected a function")
    check_objects(given, name)
    values = {k: v for k, v in given.items() if k in _KEYS and v is not None}
    if isinstance(values.get("tokenizer"), (str, Path)):
        values["tokenizer"] = load_tokenizer(str(values["tokenizer"]), name)
    batches = make_batches(given, name)
    check_roles(values.get("token_roles"), batches, name)
    check_pad_id(values.get("pad_token_id"), given["model"], batches, name)
    return Setup(**values, batches=batches, name=name, fast=fast)


def _unknown(unknown: Sequence[str], also_known: Sequence[str]) -> str:
    import difflib  # lazy: only on the error path

    parts = []
    for key in unknown:
        near = difflib.get_close_matches(key, [*SETUP_KEYS, *also_known], n=1)
        parts.append(repr(key) + (f" (did you mean {near[0]}?)" if near else ""))
    return f"unknown {'key' if len(parts) == 1 else 'keys'} {', '.join(parts)}"


def load_tokenizer(given: str, name: str) -> Any:
    """A tokenizer.json, a folder, or a name whose files are on this machine already; the network is never asked."""
    place = Path(given)
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        if place.is_dir() or not place.exists():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(given, local_files_only=True, trust_remote_code=False)  # type: ignore[no-untyped-call, unused-ignore]
    except ImportError:
        if not file.is_file():
            raise UsageError(
                f"{name}: tokenizer {given!r} needs transformers to be loaded; give the tokenizer itself"
            ) from None
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{name}: tokenizer {given!r} cannot be loaded from files on this machine ({type(error).__name__}: {text}); "
            "give a folder, a tokenizer.json or the tokenizer itself"
        ) from error
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"{name}: tokenizer {given!r} is not a tokenizer.json ({text})") from error


def open_setup(spec: str, *, fast: bool = False) -> Setup:
    """Run the function that `spec` names, `path.py:function` or `module:function`, and take what it returns.

    `SubjectError` when file, module or function is missing, or the function raises or calls `sys.exit`.
    """
    place, _, function_name = spec.rpartition(":")
    with loading(place):
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        function = getattr(module, function_name, None)
        if not callable(function):
            known = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise SubjectError(f"{place} has no function {function_name!r}; it has: {known or 'none'}")
        with users_file(place, f"in {function_name}()"):
            returned = function()
    if isinstance(returned, Setup):
        return returned
    if not isinstance(returned, Mapping):
        raise SubjectError(f"{spec} returned {a(returned)}; expected a mapping with `model`, `batch`, ...")
    return make_setup(returned, name=spec, fast=fast)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SubjectError(f"{path} does not exist; a setup is written path.py:function")
    spec = importlib.util.spec_from_file_location(f"ghoststep_setup_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours import as when it is run as a script
    try:
        with users_file(str(path), "while being imported"):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        with users_file(f"module {name!r}", "while being imported"):
            return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def is_setup_spec(spec: str) -> bool:
    """True for `path.py:function` and `module:function`, not for paths, `hf:...` or Windows drives."""
    place, colon, function = spec.rpartition(":")
    return bool(colon) and function.isidentifier() and place != "hf" and (place.endswith(".py") or _is_dotted(place))


def _is_dotted(place: str) -> bool:
    parts: Sequence[str] = place.split(".")
    return len(place) > 1 and all(p.isidentifier() for p in parts)
