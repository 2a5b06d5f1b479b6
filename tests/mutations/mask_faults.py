"""Faults of the attention mask (GS1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.mutations import attention, harm
from tests.mutations.architectures import (
    Arch,
    Setup,
    standard,
)
from tests.mutations.attention import tamper
from tests.mutations.fault import Fault
from tests.mutations.plain import MaskTransform, keep
from tests.mutations.planting import (
    SHARE,
    attends,
    bidirectional,
    has,
    on,
    predicts_next,
    tampered,
)


def future(name: str, transform: MaskTransform, *, gain: float = 1.0, bound: float = 1e-3, severity: str = "error") -> Fault:
    """A fault of the causal mask."""
    return Fault(
        name=name,
        family="mask",
        codes=("GS101",),
        make=on(
            lambda a: (predicts_next(a) if name != "with_padding_only" else a.intent == "causal") and has(a, "attention"),
            tampered(transform, gain),
        ),
        healthy=tampered(keep if gain == 1.0 else attention.soft(-1e4)),
        measure=harm.future_share,
        bound=bound,
        unit=SHARE,
        severity=severity,
    )


def zero_projections(arch: Arch) -> Setup:
    """Attention whose output projection starts at zero, behind an open mask."""
    model = tamper(arch, arch.build(), attention.no_causal)
    for layer in attention.output_projections(arch, model):
        with torch.no_grad():
            layer.weight.zero_()
            if layer.bias is not None:
                layer.bias.zero_()
    return standard(arch, model=model)


def after_some_training(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """The future's share once the projections have left zero."""
    torch.manual_seed(3)
    for layer in attention.output_projections(arch, broken["model"]):
        with torch.no_grad():
            layer.weight.normal_(std=0.2)
    return harm.future_share(arch, broken, healthy)


def _context(
    name: str, transform: MaskTransform, applies: Callable[[Arch], bool], codes: tuple[str, ...], why: str = ""
) -> Fault:
    return Fault(
        name=name,
        family="mask",
        codes=codes,
        make=on(applies, tampered(transform)),
        healthy=tampered(keep),
        measure=harm.context_lost,
        bound=0.3,
        unit="share of the visible context that is lost",
        why=why,
    )


def _seen_pads(
    name: str, transform: MaskTransform, codes: tuple[str, ...], side: str, applies: Callable[[Arch], bool]
) -> Fault:
    return Fault(
        name=name,
        family="mask",
        codes=codes,
        make=on(applies, tampered(transform, side=side)),
        healthy=tampered(keep, side=side),
        measure=harm.padding_share,
        bound=1e-3,
        unit="largest movement by a PAD, over the largest by a real token",
        why="the same mask hides the real tokens" if len(codes) > 1 else "",
    )


def _sdpa_fits(arch: Arch) -> bool:
    """Attention that takes a registered implementation, without biases or caps that one call of PyTorch's would lose."""
    return (
        predicts_next(arch)
        and has(arch, "attention")
        and not arch.traits & {"plain", "wrapped"}
        and arch.name
        not in (
            "t5",
            "gemma2",
        )
    )


FAULTS: tuple[Fault, ...] = (
    future("no_causal", attention.no_causal),
    future("inverted", attention.inverted),
    Fault(
        name="inverted_for_sdpa",
        family="mask",
        codes=("GS101",),
        make=on(_sdpa_fits, tampered(attention.inverted_for_sdpa)),
        healthy=tampered(keep),
        measure=harm.future_share,
        bound=1e-3,
        unit=SHARE,
    ),
    future("zero_one_added", attention.zero_one),
    future("soft_5", attention.soft(-5.0)),
    future("soft_10", attention.soft(-10.0)),
    future("soft_15_large_scores", attention.soft(-15.0), gain=8.0, bound=1e-5, severity="warning"),
    future("minus_1e4_reached", attention.soft(-1e4), gain=3e4),
    future("window_edge", attention.window_edge),
    future("chunk", attention.chunk),
    future("in_train_only", attention.in_train_only),
    future("with_padding_only", attention.with_padding_only),
    Fault(
        name="zero_projections",
        family="mask",
        codes=("GS101",),
        make=on(lambda a: predicts_next(a) and has(a, "attention"), zero_projections),
        healthy=tampered(keep),
        measure=after_some_training,
        bound=1e-3,
        unit=SHARE + ", once the projections have left zero",
        unknown_is_right=True,
    ),
    _seen_pads(
        "keys_inverted",
        attention.keys_inverted,
        ("GS102", "GS103", "GS107"),
        "right",
        lambda a: attends(a) and bidirectional(a),
    ),
    _seen_pads(
        "keys_inverted_left",
        attention.keys_inverted,
        ("GS102", "GS103", "GS107"),
        "left",
        lambda a: attends(a) and a.intent == "causal",
    ),
    _context(
        "keys_inverted_right",
        attention.keys_inverted,
        lambda a: attends(a) and a.intent == "causal" and not a.traits & {"wrapped", "prefix"},
        ("GS107", "GS103"),
        "no key is left, so no context is",
    ),
    _seen_pads("over_queries", attention.over_queries, ("GS102",), "right", lambda a: attends(a) and bidirectional(a)),
    _seen_pads(
        "over_queries_left",
        attention.over_queries,
        ("GS102",),
        "left",
        # Bloom's softmax averages over everything where a PAD's query sees nothing: there the future leaks too
        lambda a: attends(a) and a.intent == "causal" and not a.traits & {"wrapped", "prefix"},
    ),
    _context("only_self", attention.only_self, lambda a: attends(a) and a.intent != "contrastive", ("GS103",)),
    _context(
        "late_queries_blind",
        attention.late_queries_blind,
        lambda a: attends(a) and a.intent != "contrastive" and not has(a, "wrapped"),
        ("GS107", "GS103"),
        "what sees no key has no context",
    ),
)
