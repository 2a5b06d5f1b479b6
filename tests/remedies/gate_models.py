"""Tiny models of several mixers, near misses of a gate, and a gated norm written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

Values = dict[str, Any]

BASE: Values = {"vocab_size": 160, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS: Values = {
    **BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
EXPERTS: Values = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
DELTA_NET: Values = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA: Values = {**BASE, "num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4}

SPECS: dict[str, tuple[str, Values]] = {
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "mamba2": ("Mamba2", {**BASE, "num_hidden_layers": 6, "state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 1,
                          "chunk_size": 16}),
    "bamba": ("Bamba", {**HEADS, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
                        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}),
    "qwen3_next": ("Qwen3Next", {**HEADS, **DELTA_NET, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {**HEADS, **DELTA_NET}),
    "xlstm": ("xLSTM", {**BASE, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16, "mode": "train",
                        "autocast_kernel_dtype": "float32", "ffn_round_up_to_multiple_of": 8}),
    "llama": ("Llama", {**HEADS, "num_hidden_layers": 2}),
    "mixtral": ("Mixtral", {**HEADS, "num_hidden_layers": 2, "num_local_experts": 2}),
    "gpt2": ("GPT2", {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
                      "eos_token_id": 2}),
}  # fmt: skip


def build(name: str, bias: float = 0.0, **changes: Any) -> nn.Module:
    """A tiny random model in training mode, untied; bias: standard deviation of the convolutions' biases."""
    kind, values = SPECS[name]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**values, "tie_word_embeddings": False, **changes})
    model: nn.Module = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for k, p in model.named_parameters():
            if k.endswith("conv1d.bias"):
                p.copy_(bias * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model.train()


def tokens() -> torch.Tensor:
    """Two sequences."""
    return torch.randint(10, 160, (2, 16), generator=torch.Generator().manual_seed(5))


def logits(model: nn.Module) -> torch.Tensor:
    """Of `tokens()`."""
    with torch.no_grad():
        return model(input_ids=tokens(), use_cache=False).logits  # type: ignore[no-any-return]


def num_hooks(model: nn.Module) -> int:
    """Forward hooks of every kind."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return sum(len(getattr(m, n)) for m in model.modules() for n in names)


def _by_hand(z: torch.Tensor) -> torch.Tensor:
    return z * torch.sigmoid(z)


class _Fused(torch.autograd.Function):
    """A kernel that computes the gate and the product at once."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(state, z)
        return state * nn.functional.silu(z)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, z = ctx.saved_tensors
        sigmoid = torch.sigmoid(z)
        return gradients[0] * z * sigmoid, gradients[0] * state * (sigmoid + z * sigmoid * (1 - sigmoid))


class NearMisses(nn.Module):
    """A mixer whose gate is "silu", an activation "module" that also serves the convolution, written "by hand", in a "fused"
    kernel, or missing (""). Around it a sigmoid before the state, a SiLU after a convolution, and a gate on an unmixed branch."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.inner, self.out, self.conv = nn.Linear(8, 32), nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.gate, self.act = gate, nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, beta, gate, side = self.inner(x).chunk(4, -1)
        value = self.act(self.conv(value.mT)[..., : x.shape[1]].mT)
        state = (value * torch.sigmoid(beta)).cumsum(1)
        side = side * nn.functional.silu(gate)
        if self.gate == "fused":
            state = _Fused.apply(state, gate)  # type: ignore[no-untyped-call]
        elif self.gate:
            kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "silu": nn.functional.silu,
                "module": self.act,
                "by hand": _by_hand,
            }
            state = state * kinds[self.gate](gate)
        output: torch.Tensor = self.out(state + side)
        return output


class Beside(nn.Module):
    """A mixer and a gated feed-forward layer side by side, and one norm over their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.feed_forward, self.norm = NearMisses("silu"), _FeedForward(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.mixer(x) + self.feed_forward(x))
        return output


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        output: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return output


class Net(nn.Module):
    """A table, one mixer beside the residual stream, and a head."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.table, self.mixer, self.head = nn.Embedding(50, 8), mixer, nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        output: torch.Tensor = self.head(x + self.mixer(x))
        return output


def next_token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean over the batch."""
    ids = batch["ids"]
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def hand_written(delta: float) -> Callable[..., torch.Tensor]:
    """A gated norm of one group with the floor, in float32 inside."""

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        z = gate.float()
        gated = hidden_states.float() * (z / (1 + torch.exp(-z)) + delta)
        gated = gated / (gated.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return self.weight * gated.to(hidden_states.dtype)  # type: ignore[no-any-return]

    return forward
