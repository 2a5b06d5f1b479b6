"""Look-alikes whose loss, schedule or optimizer is the unusual part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.live.influence_faults import prefix as prefix_mask
from tests.live.influence_models import D, V
from tests.live.look_alike_setups import END, EOS, Given, diffusion_loss, hf, ids_of, masked_batch, setup, tiny
from tests.live.test_xray_faults import Words


class Ends(Words):
    """A tokenizer whose end of turn is another token than EOS."""

    def __init__(self) -> None:
        super().__init__(size=V)
        self.all_special_ids = [0, 1, EOS, END]
        self.additional_special_tokens_ids = [END]


def stopping(*, supervised: bool) -> Given:
    """Texts end with another stop token than EOS; with a mistake, that token carries no loss."""
    batches = [ids_of(seed, end=END if supervised else EOS) for seed in (0, 1)]
    for b in batches:
        if not supervised:
            b["labels"] = b["labels"].masked_fill(b["input_ids"] == EOS, -100)
    model: Any = hf("Llama", eos_token_id=[EOS, END] if supervised else EOS)
    return setup(model, tokenizer=Ends() if supervised else Words(size=V), batches=batches)


def several_stops() -> Given:
    model: Any = hf("Llama", eos_token_id=[EOS, END])
    return setup(model, tokenizer=Ends())


def uneven_micro_batches() -> Given:
    """One batch of long and one of short texts, each with a mean of its own."""
    return setup(tiny(), batches=[ids_of(0), ids_of(1, lengths=(5, 5, 4, 4))], accumulation_steps=2)


def frozen_rows(*, weight_decay: float) -> Given:
    """The first rows of the table take no gradient, by a hook: kept as they are, unless decay shrinks them."""
    model: Any = tiny()
    keep = torch.ones(V, 1)
    keep[:30] = 0
    model.embed.weight.register_hook(lambda g: g * keep)
    return setup(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay))


def scheduled(factor: Callable[[int], float]) -> Given:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return setup(model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def scaled(scale: float) -> Given:
    """A loss scale that overflows float16 at first and then settles."""
    model = tiny()
    return setup(model, scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100))


def always_skipped() -> Given:
    model: Any = tiny()
    model.head.weight.register_hook(lambda g: torch.full_like(g, torch.inf))
    return setup(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16))


def prefix() -> Given:
    """The prompt sees itself both ways and carries no loss."""
    batches = [ids_of(seed) for seed in (0, 1)]
    for b in batches:
        b["labels"][:, :5] = -100
    return setup(tiny(prefix_mask), batches=batches)


def prefix_trained() -> Given:
    """The same mask, but the prompt is trained on too."""
    return setup(tiny(prefix_mask))


def bert() -> Given:
    return setup(_masked_lm(), batches=[masked_batch(0), masked_batch(1)])


def bert_unmasked_labels() -> Given:
    """Every token carries loss, also those it sees."""
    return setup(_masked_lm(), batches=[ids_of(0), ids_of(1)])


def _masked_lm() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).train()  # type: ignore[no-any-return]


def _translation(seed: int) -> Given:
    source, target = ids_of(seed), ids_of(seed + 10)
    return {**source, "labels": target["labels"]}


def t5() -> Given:
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"decoder_start_token_id": 0}
    config = transformers.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=EOS, **size,
    )  # fmt: skip
    return setup(transformers.T5ForConditionalGeneration(config).train(), batches=[_translation(0), _translation(1)])


def bart() -> Given:
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=V, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=EOS,
        decoder_start_token_id=EOS, init_std=0.2,
    )  # fmt: skip
    return setup(transformers.BartForConditionalGeneration(config).train(), batches=[_translation(0), _translation(1)])


def diffusion() -> Given:
    def all_real(ids: torch.Tensor, keep: Any, at: Any) -> Any:
        eye = torch.eye(ids.shape[1]).bool()
        return keep.bool()[:, None, None, :].expand(len(ids), 1, ids.shape[1], -1) | eye

    return setup(tiny(all_real), loss_fn=diffusion_loss, batches=[masked_batch(i, kept_share=0, noisy=True) for i in (0, 1)])


def memorised() -> Given:
    """A model that knows its batches: the loss hardly moves any more."""
    model: Any = tiny()
    batches = [ids_of(0), ids_of(1)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(150):
        optimizer.zero_grad()
        model(**batches[i % 2]).loss.backward()
        optimizer.step()
    return setup(model, batches=batches, optimizer=optimizer)


def preference() -> Given:
    """Chosen answers above rejected ones; at the start policy and reference agree: the loss is ln 2."""
    import copy

    model: Any = tiny()
    reference = copy.deepcopy(model).requires_grad_(False).eval()

    def logp(m: Any, b: Given) -> Any:
        steps = m(b["input_ids"], b["attention_mask"]).logits[:, :-1].log_softmax(-1)
        each = steps.gather(-1, b["input_ids"][:, 1:, None])[..., 0]
        return (each * (b["labels"][:, 1:] >= 0)).sum(1)

    def loss(m: Any, b: Given) -> torch.Tensor:
        ahead = logp(m, b)
        with torch.no_grad():
            base = logp(reference, b)
        margin = (ahead - base)[:2] - (ahead - base)[2:]
        return -functional.logsigmoid(0.1 * margin).mean()

    batches = [ids_of(seed, lengths=(16, 14, 16, 14)) for seed in (0, 1)]
    for b in batches:
        b["input_ids"][2:, :5] = b["input_ids"][:2, :5]
        b["labels"] = torch.where(b["attention_mask"] == 1, b["input_ids"], -100)
        b["labels"][:, :5] = -100
    return setup(model, batches=batches, loss_fn=loss, intent="rl")


def equal_rewards() -> Given:
    """All answers of a group have the same reward: every advantage is 0, and so is every gradient of this batch."""

    def loss(m: Any, b: Given) -> Any:
        steps = m(b["input_ids"], b["attention_mask"]).logits[:, :-1].log_softmax(-1)
        each = steps.gather(-1, b["input_ids"][:, 1:, None])[..., 0]
        reward = torch.ones(len(each))
        advantage = (reward - reward.mean())[:, None]
        return -(advantage * (each - each.detach()).exp() * b["attention_mask"][:, 1:]).sum() / b["attention_mask"].sum()

    return setup(tiny(), loss_fn=loss, intent="rl")


def textual_inversion() -> Given:
    """One trainable tensor, added to the embedding of one token; everything else is frozen."""
    model: Any = tiny()
    model.requires_grad_(False)
    model.concept = nn.Parameter(0.1 * torch.randn(D, generator=torch.Generator().manual_seed(3)))

    def add(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> Any:
        return out + (args[0] == 7)[..., None] * model.concept

    model.embed.register_forward_hook(add)
    batches = [ids_of(0), ids_of(1)]
    for b in batches:
        b["input_ids"][:, 3] = 7
        b["labels"][:, 3] = 7
    return setup(model, batches=batches, optimizer=torch.optim.AdamW([model.concept], lr=5e-3))


class LowPrecision(torch.optim.Optimizer):
    """SGD on bfloat16 with a rate that plain rounding swallows; "kahan" keeps the lost part, "stochastic" rounds at random."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 2e-6})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._one(p, -group["lr"] * p.grad.float().sign())

    def _one(self, p: torch.Tensor, change: torch.Tensor) -> None:
        if self.kind == "kahan":
            state = self.state[p]
            lost = state.setdefault("lost", torch.zeros_like(p, dtype=torch.float32))
            exact = p.float() + lost + change
            p.copy_(exact)
            lost.copy_(exact - p.float())
        elif self.kind == "stochastic":
            exact = (p.float() + change).view(torch.int32)
            noise = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
            p.copy_(((exact + noise) & -65536).view(torch.float32))
        else:
            p.copy_(p.float() + change)


def low_precision(kind: str) -> Given:
    model = tiny().bfloat16()
    return setup(model, optimizer=LowPrecision(model.parameters(), kind))


def common_vector() -> Given:
    """One large vector in every row of the table: every cosine is near 1, and nothing is wrong."""
    model: Any = tiny()
    with torch.no_grad():
        model.embed.weight += 3.0 * torch.randn(D, generator=torch.Generator().manual_seed(2))
    return setup(model)
