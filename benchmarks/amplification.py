"""How hard small random models of many architectures amplify one near-zero input row, and whether the overflow is predicted.

    python benchmarks/amplification.py [--seeds 3] [--out benchmarks]

Three questions: the gradient of a row of norm 1e-30 at the first position and in the middle, three initialisations each, beside an
earlier measurement; the places where plain Transformers are not immune; and the norm below which the float32 norm of the whole
model's gradients is inf, predicted by `ghoststep.amplify` and found by bisection with real steps. Vocabulary 160, width 64, 2 x 16
tokens, default initialisation, fp32. Prints, and writes a table and two plots into `--out`. Figures, not timings.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import ghoststep
from ghoststep.evidence.amplification import FIRST, LEFT, MIDDLE, OVERFLOW_GRADIENT, PACKED

V, D, NORM, TOKEN = 160, 64, 1e-30, 17
Make = Callable[[int], Any]
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PLAIN: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "tie_word_embeddings": False, "use_cache": False, **SPECIAL}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 2 * D}
ATTENTION: dict[str, Any] = {**PLAIN, **HEADS, "max_position_embeddings": 256}
SSM: dict[str, Any] = {"state_size": 8, "time_step_rank": 4}
SSM2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 2 * D // 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16,
}  # fmt: skip


def _every(depth: int, period: int, kinds: tuple[str, str] = ("linear_attention", "full_attention")) -> list[str]:
    return [kinds[(i + 1) % period == 0] for i in range(depth)]


def _config(name: str, depth: int) -> tuple[Any, Any]:
    """(config, model class) of an architecture, in the notation of its own config."""
    n: dict[str, Any] = {"num_hidden_layers": depth}
    small_ssm2: dict[str, Any] = {"state_size": 16, "num_heads": 4, "head_dim": 2 * D // 4, "n_groups": 1, "chunk_size": 16}
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        "llama": lambda: (hf.LlamaConfig(**ATTENTION, **n), hf.LlamaForCausalLM),
        "gpt2": lambda: (hf.GPT2Config(vocab_size=V, n_embd=D, n_layer=depth, n_head=4, n_positions=256, tie_word_embeddings=False,
                                       resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **SPECIAL), hf.GPT2LMHeadModel),
        "gpt_neox": lambda: (hf.GPTNeoXConfig(**{k: v for k, v in ATTENTION.items() if k != "num_key_value_heads"}, **n),
                             hf.GPTNeoXForCausalLM),
        "olmo2": lambda: (hf.Olmo2Config(**ATTENTION, **n), hf.Olmo2ForCausalLM),
        "gemma3": lambda: (hf.Gemma3TextConfig(**ATTENTION, **n, head_dim=16), hf.Gemma3ForCausalLM),
        "mamba": lambda: (hf.MambaConfig(**PLAIN, **n, **SSM), hf.MambaForCausalLM),
        "falcon_mamba": lambda: (hf.FalconMambaConfig(**PLAIN, **n, **SSM), hf.FalconMambaForCausalLM),
        "mamba2": lambda: (hf.Mamba2Config(**PLAIN, **n, **small_ssm2), hf.Mamba2ForCausalLM),
        "falcon_h1": lambda: (hf.FalconH1Config(**ATTENTION, **n, **SSM2, mamba_d_ssm=2 * D), hf.FalconH1ForCausalLM),
        "bamba": lambda: (hf.BambaConfig(**ATTENTION, **n, **SSM2,
                                         attn_layer_indices=[i for i in range(depth) if i % 8 == 4] or [depth - 1]),
                          hf.BambaForCausalLM),
        "recurrent_gemma": lambda: (hf.RecurrentGemmaConfig(**PLAIN, **HEADS, **n, lru_width=D, attention_window_size=64),
                                    hf.RecurrentGemmaForCausalLM),
        "rwkv": lambda: (hf.RwkvConfig(vocab_size=V, hidden_size=D, **n, context_length=128, rescale_every=0, use_cache=False,
                                       tie_word_embeddings=False, bos_token_id=1, eos_token_id=2), hf.RwkvForCausalLM),
        "lfm2": lambda: (hf.Lfm2Config(**ATTENTION, **n, layer_types=_every(depth, 3, ("conv", "full_attention")), block_multiple_of=8),
                         hf.Lfm2ForCausalLM),
        "qwen3_5": lambda: (hf.Qwen3_5TextConfig(**ATTENTION, **n, **DELTA, layer_types=_every(depth, 4)), hf.Qwen3_5ForCausalLM),
        "minimax": lambda: (hf.MiniMaxConfig(**ATTENTION, **n, head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=16,
                                             layer_types=_every(depth, 8)), hf.MiniMaxForCausalLM),
    }  # fmt: skip
    return made[name]()


def build(name: str, depth: int, seed: int = 0) -> Any:
    """A random model in training mode."""
    torch.manual_seed(seed)
    config, kind = _config(name, depth)
    return kind(config).train()


CELLS = (
    # architecture, layers, earlier figures (largest entry of the gradient, one initialisation): first, middle
    ("gpt2", 12, 6e-02, 9e-02), ("gpt2", 24, 8e-02, 6e-02), ("llama", 12, 9e16, 4e-01), ("llama", 24, 6e27, 3e-01),
    ("gpt_neox", 12, 3e11, 7e-01), ("olmo2", 12, 4e10, 3e-02), ("gemma3", 4, 5e18, 1e03), ("gemma3", 12, 2e28, 3e02),
    ("mamba", 4, 4e00, 9e04), ("mamba", 12, 7e00, 7e14), ("falcon_mamba", 12, 6e00, 9e14), ("mamba2", 4, 8e00, 7e14),
    ("mamba2", 12, 2e01, 1e29), ("falcon_h1", 12, 2e10, 8e-02), ("bamba", 12, 6e00, 2e02), ("recurrent_gemma", 12, 9e11, 1e03),
    ("rwkv", 4, 2e11, 7e02), ("rwkv", 12, 5e28, 8e02), ("lfm2", 12, 4e03, 1e01), ("qwen3_5", 12, 8e03, 8e02),
    ("minimax", 4, 6e19, 7e19), ("minimax", 12, 1e28, 2e28),
    ("gpt_neox", 24, 8e23, 7e-01), ("olmo2", 24, 2e21, 6e-02), ("mamba", 24, 8e00, 5e28), ("mamba2", 24, 3e01, 9e28),
    ("falcon_h1", 24, 2e21, 4e-02),
)  # fmt: skip
PREDICTED = (("mamba2", 8, MIDDLE, 16), ("mamba2", 8, MIDDLE, 256), ("minimax", 4, MIDDLE, 16), ("llama", 24, FIRST, 16))
"""Architecture, layers, place, tokens an example."""


def at_norm(model: Any, seed: int, places: tuple[str, ...]) -> dict[str, float]:
    """The row's gradient at norm 1e-30, by place."""
    median = float(model.get_input_embeddings().weight.detach().norm(dim=1).median())
    found = ghoststep.amplify(model=model, norms=[NORM / median], places=places, seed=seed)
    return {p.name: p.readings[0].gradient for p in found.places}


def spread(values: list[float]) -> str:
    """The median over the seeds with the smallest and the largest."""
    return f"{statistics.median(values):.1e} ({min(values):.0e} to {max(values):.0e})"


def table(seeds: int) -> list[str]:
    """Architectures at two positions."""
    lines = ["| architecture | layers | first position | earlier | middle | earlier |", "|---|---|---|---|---|---|"]
    far = []
    for name, depth, *earlier in CELLS:
        found = [at_norm(build(name, depth, seed), seed, (FIRST, MIDDLE)) for seed in range(seeds)]
        cells = []
        for place, before in zip((FIRST, MIDDLE), earlier, strict=True):
            values = [f[place] for f in found]
            cells += [spread(values), f"{before:.0e}"]
            far.append(abs(math.log10(statistics.median(values) / before)))
        lines.append(f"| {name} | {depth} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    far.sort()
    lines += [
        "", f"Distance of the {len(far)} medians from the earlier figures, in powers of ten: median {statistics.median(far):.2f}, "
        f"90 % below {far[int(0.9 * len(far))]:.2f}, largest {far[-1]:.2f}. The earlier figure is the largest entry of one "
        "gradient, ours its L2 norm (up to 8 times as large at width 64).",
    ]  # fmt: skip
    return lines


def not_immune(seeds: int) -> list[str]:
    """Plain Transformers, where a token sees nothing but itself."""
    names = (FIRST, PACKED, LEFT, MIDDLE)
    lines = ["| model | layers | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for name, depth in (("llama", 24), ("gemma3", 6), ("gpt2", 24)):
        found = [at_norm(build(name, depth, seed), seed, names) for seed in range(seeds)]
        lines.append(
            f"| {name} | {depth} | " + " | ".join(spread([f[n] for f in found]) if n in found[0] else "" for n in names) + " |"
        )
        print(lines[-1], flush=True)
    return lines


def overflows(model: Any, ids: torch.Tensor, norm: float) -> bool:
    """One real step with TOKEN's row at this norm: is torch's norm of all gradients infinite?"""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        kept = weight[TOKEN].clone()
        weight[TOKEN] = (kept.double() / kept.double().norm() * norm).float()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        weight[TOKEN] = kept
    return bool(total.isinf())


def prediction(name: str, depth: int, place: str, length: int, seed: int) -> tuple[float, float]:
    """(predicted, bisected) norm below which the step is zeroed."""
    model = build(name, depth, seed)
    ids = torch.randint(20, V, (2, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 0 if place == FIRST else length // 2] = TOKEN
    batch = {"input_ids": ids, "labels": ids.clone()}
    found = ghoststep.amplify(model=model, batch=batch, rows=[TOKEN], places=[place])
    low, high = 1e-26, 1e-15  # overflows at the lower one, not at the upper one
    if not overflows(model, ids, low) or overflows(model, ids, high):
        return found.place(place).critical_norm(OVERFLOW_GRADIENT), math.nan
    while high / low > 1.1:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if overflows(model, ids, middle) else (low, middle)
    return found.place(place).critical_norm(OVERFLOW_GRADIENT), math.sqrt(low * high)


def thresholds(seeds: int) -> list[str]:
    """Predicted beside bisected."""
    lines = ["| model | layers | place | N | seed | predicted | bisected | ratio |", "|---" * 8 + "|"]
    for name, depth, place, length in PREDICTED:
        for seed in range(seeds):
            predicted, bisected = prediction(name, depth, place, length, seed)
            ratio = predicted / bisected
            lines.append(
                f"| {name} | {depth} | {place} | {2 * length - 2} | {seed} | {predicted:.2e} | {bisected:.2e} | {ratio:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    start = time.process_time()
    pictures = []
    for name, depth in (("llama", 24), ("mamba2", 12)):
        sweep = ghoststep.amplify(model=build(name, depth))
        (given.out / f"amplification_{name}.svg").write_text(sweep.to_svg(), encoding="utf-8")
        pictures.append(f"![{name}, {depth} layers](amplification_{name}.svg)")
        print(sweep.to_text(100), flush=True)
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {hf.__version__}"
    parts = [
        "# Amplification of one near-zero input row", "", "Written by `scripts/bench amplification`: small random models (width 64, "
        f"vocabulary 160, 2 x 16 tokens, fp32, default initialisation), {versions}. Gradient of the row, L2 norm; median of "
        f"{given.seeds} initialisations, with the smallest and the largest.", "", "## A row of norm 1e-30", "", *table(given.seeds), "",
        "## Plain Transformers are not immune", "", *not_immune(given.seeds), "", "## The norm below which a step is zeroed", "",
        "Predicted: the law gradient = c / (N · norm) as `ghoststep.amplify` found it, at 1.84e19. Bisected: real steps with the "
        "row in the table, until `clip_grad_norm_` of the whole model returns inf. To be within a factor of 3.", "",
        *thresholds(given.seeds), "", "## Two sweeps", "", *pictures,
    ]  # fmt: skip
    print(f"{time.process_time() - start:.0f} s of CPU time")
    (given.out / "amplification_table.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
