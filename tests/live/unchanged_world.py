"""Everything around a setup that must not change, as comparable values: bits, identities, states."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.live.unchanged_models import Drawing

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip


def bits(value: Any) -> Any:
    """The bytes of a tensor with shape and dtype; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_sparse:
        whole = value.detach().coalesce()
        return "sparse", bits(whole.indices()), bits(whole.values())
    flat = value.detach().contiguous().reshape(-1)
    return tuple(value.shape), value.dtype, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def contents(value: Any) -> Any:
    """A nested copy in which tensors are identity and bits."""
    if isinstance(value, torch.Tensor):
        return id(value), bits(value)
    if isinstance(value, Mapping):
        return id(value), [(id(k) if isinstance(k, torch.Tensor) else k, contents(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [contents(v) for v in value]
    if isinstance(value, torch.Generator):
        return id(value), bits(value.get_state())
    if isinstance(value, np.random.Generator):
        return id(value), repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return id(value), hash(value.getstate())
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _is_the_librarys(hook: Any) -> bool:
    """transformers installs its hooks for captured outputs at the first forward and keeps a flag that it did."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _module(name: str, module: torch.nn.Module) -> dict[str, Any]:
    own = set(vars(torch.nn.Module()))
    kept: dict[str, Any] = {
        f"{name}: mode": module.training,
        f"{name}: class": type(module),
        f"{name}: buffers": contents(dict(module._buffers))[1],
        f"{name}: non-persistent": sorted(module._non_persistent_buffers_set),
        f"{name}: forward": "forward" in vars(module),
        f"{name}: hooks": [sorted((k, id(h)) for k, h in getattr(module, h_dict).items() if not _is_the_librarys(h)) for h_dict in HOOKS
                           if not callable(getattr(module, h_dict)) and not isinstance(getattr(module, h_dict), bool)],
    }  # fmt: skip
    for key, value in vars(module).items():
        if key not in own and key != "_output_capturing_hooks_installed":
            # What a plain attribute holds is what counts; a list may have been filled again.
            kept[f"{name}: attribute {key}"] = list(value) if type(value).__name__ == "deque" else contents(value)
    return kept


def _optimizer(index: int, optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return {
        f"optimizer {index}: state": contents(optimizer.state)[1],
        f"optimizer {index}: groups": [contents(g) for g in optimizer.param_groups],
        f"optimizer {index}: lists": [id(g["params"]) for g in optimizer.param_groups],
        f"optimizer {index}: own": {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float))},
        f"optimizer {index}: names": sorted(vars(optimizer)),
        f"optimizer {index}: hooks": [list(optimizer._optimizer_step_post_hooks), list(optimizer._optimizer_step_pre_hooks)],
        f"optimizer {index}: step": getattr(vars(optimizer).get("step"), "__qualname__", None),
    }


def surroundings() -> dict[str, Any]:
    """Of the process: randomness, modes, filters, handlers."""
    return {
        "rng torch": bits(torch.get_rng_state()),
        "rng numpy": hash(str(np.random.get_state())),
        "rng python": hash(random.getstate()),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention kernels": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math")],
        "filters": list(warnings.filters),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "patched": (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad, torch.nn.Module.__call__,
                    torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.softmax, torch.nn.functional.cross_entropy),
    }  # fmt: skip


def world(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by name; equal dicts mean that nothing changed."""
    model, kept = given["model"], surroundings()
    for name, module in model.named_modules():
        kept.update(_module(name or "root", module))
    for name, p in model.named_parameters():
        kept[f"{name}: value"] = id(p), p.data_ptr(), p.requires_grad, bits(p)
        kept[f"{name}: gradient"] = None if p.grad is None else (id(p.grad), bits(p.grad))
        kept[f"{name}: hooks"] = (
            list(p._backward_hooks or ()),
            list(getattr(p, "_post_accumulate_grad_hooks", None) or ()),
        )
    optimizers = given.get("optimizer")
    for i, one in enumerate(optimizers if isinstance(optimizers, list) else [optimizers] if optimizers is not None else []):
        kept.update(_optimizer(i, one))
    for key in ("scheduler", "scaler"):
        if given.get(key) is not None:
            kept[key] = repr(given[key].state_dict())
    kept["batches"] = [contents(b) for b in given["batches"]]
    if isinstance(given.get("loss_fn"), Drawing):
        kept["loss"] = bits(given["loss_fn"].generator.get_state())
    return kept


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of what differs, with short values."""
    names = [n for n in {**before, **after} if before.get(n, "absent") != after.get(n, "absent")]
    return [f"{n}: {str(before.get(n, 'absent'))[:90]} → {str(after.get(n, 'absent'))[:90]}" for n in names]
