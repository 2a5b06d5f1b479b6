"""Faults of who sees whom (GS1) outside the attention mask: routing, recurrence, documents, examples, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutations import harm
from tests.mutations.architectures import (
    Arch,
    Setup,
    standard,
)
from tests.mutations.fault import Fault
from tests.mutations.planting import (
    SHARE,
    bidirectional,
    has,
    layers,
    mlps,
    on,
    packed_batch,
)


def mixers(change: Callable[[Any, Tensor], Any]) -> Callable[[Arch], Setup]:
    """Every state-space mixer's forward replaced by `change(forward, x)`, x [B, T, D]."""

    def make(arch: Arch) -> Setup:
        model = arch.build()
        for module in model.modules():
            if isinstance(getattr(module, "conv1d", None), nn.Conv1d):
                _replace(module, change)
        return standard(arch, model=model)

    return make


def _replace(module: Any, change: Callable[[Any, Tensor], Any]) -> None:
    forward = module.forward

    def changed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return change(lambda x: forward(x, *args, **kwargs), hidden_states)

    module.forward = changed


def both_ways(forward: Any, x: Tensor) -> Any:
    """A second scan from the end, as vision models have it."""
    return forward(x) + forward(x.flip(1)).flip(1)


def shifted_ahead(forward: Any, x: Tensor) -> Any:
    """A token shift in the wrong direction: half of each input is the next token's."""
    return forward((x + torch.cat([x[:, 1:], x[:, -1:]], 1)) / 2)


def routed(choose: Callable[[Tensor], Tensor]) -> Callable[[Arch], Setup]:
    """Each MLP runs only on the tokens that `choose(scores [B, T]) -> weight [B, T]` keeps."""

    def make(arch: Arch) -> Setup:
        model = arch.build()
        torch.manual_seed(5)
        for mlp in mlps(model):
            _route(mlp, torch.randn(32), choose)
        return standard(arch, model=model)

    return make


def _route(mlp: Any, probe: Tensor, choose: Callable[[Tensor], Tensor]) -> None:
    forward = mlp.forward

    def changed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = forward(x, *args, **kwargs)
        weight = choose((x * probe).sum(-1))[..., None].to(x.dtype)
        if args and isinstance(args[0], Tensor) and args[0].shape == x.shape:  # a residual that this MLP adds itself
            return args[0] + (out - args[0]) * weight
        return (out[0] * weight, *out[1:]) if isinstance(out, tuple) else out * weight

    mlp.forward = changed


def expert_choice(scores: Tensor) -> Tensor:
    """The half of each sequence with the largest scores: later tokens take earlier ones' places."""
    kept = scores >= scores.topk(scores.shape[1] // 2, dim=1).values[:, -1:]
    return scores.sigmoid() * kept


def token_choice(scores: Tensor) -> Tensor:
    """Each token decides for itself."""
    return scores.sigmoid() * (scores > 0)


def reversed_priority(scores: Tensor) -> Tensor:
    """An expert takes eight tokens of the flattened batch, and serves the last ones first."""
    wanted = (scores > 0).flatten().long()
    later = wanted.flip(0).cumsum(0).flip(0) - wanted
    return scores.sigmoid() * ((wanted == 1) & (later < 8)).view_as(scores)


def packed(isolated: bool) -> Callable[[Arch], Setup]:
    """Packed documents; not isolated when a customary mask of ones comes with them, or the plain model ignores the restarts."""

    def make(arch: Arch) -> Setup:
        batches = [packed_batch(s) for s in range(3)]
        model: Any = arch.build()
        if "plain" in arch.traits:
            model.trunk.isolate_documents = isolated
        elif not isolated:
            batches = [{**b, "attention_mask": torch.ones_like(b["input_ids"])} for b in batches]
        return standard(arch, model=model, batches=batches)

    return make


def reshaped(x: Tensor) -> Tensor:
    """[B, T, D] read as [T, B, D] and back without the transpose."""
    return x.transpose(0, 1).reshape(x.shape)


def over_batch(x: Tensor) -> Tensor:
    """Normalised over the examples instead of the features."""
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def over_features(x: Tensor) -> Tensor:
    """The healthy twin of `over_batch` and `batch_norm`."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


def batch_norm(x: Tensor) -> Tensor:
    """Statistics over all tokens of the batch, as BatchNorm has them in train mode."""
    flat = x.flatten(0, 1)
    return ((flat - flat.mean(0)) / (flat.std(0) + 1e-5)).view_as(x)


def after_first_layer(change: Callable[[Tensor], Tensor]) -> Callable[[Arch], Setup]:
    """`change` on the hidden states [B, T, D] that leave the first layer."""

    def make(arch: Arch) -> Setup:
        model = arch.build()
        layer = layers(model)[0]
        forward = layer.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        layer.forward = changed
        return standard(arch, model=model)

    return make


def order_blind(arch: Arch) -> Setup:
    """A position table that was loaded as zeros."""
    model = arch.build()
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "trunk.positions")):
            with torch.no_grad():
                module.weight.zero_()
    return standard(arch, model=model)


def order_gain(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """1 − (movement by exchanging two words here) / (in the healthy twin), in eval mode."""
    moved = []
    for setup in (broken, healthy):
        setup["model"].eval()
        batch = setup["batches"][0]
        ids = batch["input_ids"].clone()
        ids[:, [2, 5]] = ids[:, [5, 2]]
        change = (harm.outputs(arch, setup, {**batch, "input_ids": ids}) - harm.outputs(arch, setup, batch)).abs()
        moved.append((change[:, 0] if arch.intent != "contrastive" else change).max().item())
    return 1 - moved[0] / moved[1]


def left_without_positions(arch: Arch) -> Setup:
    """Left pads, and positions counted from the first PAD."""
    batches = [{k: v for k, v in arch.batch(s, "left").items() if k != "position_ids"} for s in range(3)]
    return standard(arch, batches=batches)


def against_right(arch: Arch, broken: Setup, healthy: Setup) -> float:
    """Logits of the same examples, left-padded as here, against right-padded."""
    for setup in (broken, healthy):
        setup["model"].eval()
    return harm.output_change(arch, broken, {**healthy, "batches": [arch.batch(0)]})


def recurrent_left(masked: bool) -> Callable[[Arch], Setup]:
    """Left pads that run through the state, with or without the mask that keeps them out."""

    def make(arch: Arch) -> Setup:
        drop = {"position_ids"} if masked else {"position_ids", "attention_mask"}
        batches = [{k: v for k, v in arch.batch(s, "left").items() if k not in drop} for s in range(3)]
        return standard(arch, batches=batches)

    return make


def _mix(name: str, change: Callable[[Tensor], Tensor], twin: Callable[[Arch], Setup], codes: tuple[str, ...]) -> Fault:
    return Fault(
        name=name,
        family="examples",
        codes=codes,
        make=on(lambda a: a.intent != "seq2seq", after_first_layer(change)),
        healthy=twin,
        measure=harm.other_example_share,
        bound=1e-3,
        unit="largest movement in another example, over the largest in the own one",
        why="the same layer also brings later tokens to earlier positions" if len(codes) > 1 else "",
    )


def _mixer(name: str, change: Callable[[Any, Tensor], Any]) -> Fault:
    return Fault(
        name=name,
        family="recurrent",
        codes=("GS101",),
        make=on(lambda a: has(a, "recurrent"), mixers(change)),
        healthy=standard,
        measure=harm.future_share,
        bound=1e-3,
        unit=SHARE,
    )


def _routing(name: str, choose: Callable[[Tensor], Tensor], applies: Callable[[Arch], bool]) -> Fault:
    return Fault(
        name=name,
        family="routing",
        codes=("GS101",),
        make=on(lambda a: a.intent == "causal" and applies(a) and bool(mlps(a.build())), routed(choose)),
        healthy=routed(token_choice),
        measure=harm.future_share,
        bound=1e-3,
        unit=SHARE,
    )


FAULTS: tuple[Fault, ...] = (
    _mixer("both_ways", both_ways),
    _mixer("shifted_ahead", shifted_ahead),
    Fault(
        name="pads_in_the_state",
        family="recurrent",
        codes=("GS102",),
        make=on(lambda a: has(a, "recurrent"), recurrent_left(False)),
        healthy=recurrent_left(True),
        measure=harm.padding_share,
        bound=1e-3,
        unit="largest movement by a PAD, over the largest by a real token",
    ),
    _routing("expert_choice", expert_choice, lambda a: True),
    _routing("reversed_priority", reversed_priority, lambda a: has(a, "moe") or has(a, "plain")),
    Fault(
        name="packs_not_honoured",
        family="documents",
        codes=("GS104",),
        make=on(lambda a: has(a, "packs"), packed(False)),
        healthy=packed(True),
        measure=harm.document_share,
        bound=1e-3,
        unit="largest movement in a later document, over the largest in the own one",
    ),
    _mix("reshape", reshaped, standard, ("GS105", "GS101")),
    _mix("norm_over_batch", over_batch, after_first_layer(over_features), ("GS105",)),
    _mix("batch_norm", batch_norm, after_first_layer(over_features), ("GS105", "GS101")),
    Fault(
        name="left_pads_absolute",
        family="positions",
        codes=("GS106",),
        make=on(lambda a: has(a, "absolute"), left_without_positions),
        healthy=lambda a: standard(a, side="left" if a.intent == "causal" else "right"),
        measure=against_right,
        bound=0.1,
        unit="largest change of a logit against right padding, in standard deviations",
    ),
    Fault(
        name="order_blind",
        family="positions",
        codes=("GS108",),
        make=on(bidirectional, order_blind),
        healthy=standard,
        measure=order_gain,
        bound=0.9,
        unit="share of the effect of word order that is lost",
    ),
)
