"""Loops with several optimizers, and with models of other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.watch.loops import VOCAB, Loop, TinyLM, next_token_loss, tokens


class MuonLike(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made orthogonal, as Muon's is."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 2e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.add_(x, alpha=-group["lr"])


def two_optimizers() -> Loop:
    model = TinyLM()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "block" in n]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [MuonLike(matrices), torch.optim.AdamW(others, lr=3e-3)]

    def step(i: int) -> Tensor:
        for o in optimizers:
            o.zero_grad()
        loss = next_token_loss(model(tokens(i)), tokens(i))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
        return loss

    return Loop(models=[model], optimizers=[optimizers], step=step)


def sparse() -> Loop:
    model = TinyLM()
    model.embed = nn.Embedding.from_pretrained(model.embed.weight.detach(), freeze=False, sparse=True)  # type: ignore[no-untyped-call]
    rest = [p for p in model.parameters() if p is not model.embed.weight]
    optimizers = [torch.optim.SparseAdam([model.embed.weight], lr=1e-3), torch.optim.AdamW(rest, lr=3e-3)]

    def step(i: int) -> Tensor:
        for o in optimizers:
            o.zero_grad()
        for j in range(2):  # uncoalesced gradients add up
            loss = next_token_loss(model(tokens(2 * i + j)), tokens(2 * i + j)) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        for o in optimizers:
            o.step()
        return loss

    return Loop(models=[model], optimizers=[optimizers], step=step)


def lora() -> Loop:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    adapted: Any = get_peft_model(
        model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"])
    )
    return hugging_face(adapted)


def mixture() -> Loop:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hugging_face(MixtralForCausalLM(config))


def hugging_face(model: Any, *, lr: float = 3e-3, generates: bool = True) -> Loop:
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step(i: int) -> Tensor:
        made.zero_grad()
        ids = tokens(i, first=3)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        if generates and i % 20 == 10:
            model.eval()
            model.generate(input_ids=ids[:, :4], attention_mask=torch.ones_like(ids[:, :4]), max_new_tokens=3, do_sample=True)
            model.train()
        return loss

    return Loop(models=[model], optimizers=[[made]], step=step)
