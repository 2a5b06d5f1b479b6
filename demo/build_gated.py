"""Builds a small untied gated checkpoint with decayed rows of real tokens. It is BUILT: nobody trained or published it.

    python demo/build_gated.py OUT [--tokenizer model.gguf]

24 Mamba layers of random weights, an input table and a head of their own, a real tokenizer (from the metadata of the GGUF
file; without one, a byte-level BPE trained here on this project's documentation). Six ordinary tokens get table rows whose L2
norms have decayed to 1e-12 and 1e-30, one further token a table row of exact zeros: the state that weight decay leaves behind
for tokens that the training text never contained. Every other table row is healthy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_DIMS, NUM_LAYERS, STATE_SIZE, KERNEL, DT_RANK = 128, 24, 16, 4, 8
WORDS = (
    " river",
    " garden",
    " winter",
    " silver",
    " market",
    " bridge",
    " planet",
    " candle",
    " forest",
    " letter",
    " the",
    " and",
)
DECAYED_NORMS = (1e-12, 1e-12, 1e-12, 1e-30, 1e-30, 1e-30, 0.0)
CONTROL_TOKEN = 3  # GGUF's tokenizer.ggml.token_type


def tokenizer_from_gguf(path: Path) -> tuple[Any, dict[str, Any]]:
    """The tokenizer that a GGUF file of a byte-level BPE model carries, and its tokenizer_config.json."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    values = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "pre", "tokens", "merges", "token_type")}
    if values["model"] != "gpt2" or values["pre"] != "smollm":
        raise SystemExit(
            f"{path.name}: its tokenizer is {values['model']!r}/{values['pre']!r}; this demo knows gpt2/smollm only"
        )
    tokens: list[str] = values["tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, values["token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in fields:
            config[role] = tokens[int(fields[f"tokenizer.ggml.{key}"].contents())]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"].contents()
    return tokenizer, config


def tokenizer_from_docs() -> tuple[Any, dict[str, Any]]:
    """A byte-level BPE trained on this project's own documentation, for machines that cannot fetch the GGUF file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]
    texts += [word for word in WORDS for _ in range(50)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def choose_tokens(tokenizer: Any) -> list[tuple[str, int]]:
    """As many ordinary words as there are norms, each one token of its own that text really produces."""
    encoded = [(word, tokenizer.encode("a" + word, add_special_tokens=False).ids) for word in WORDS]
    single = [(word, ids[1]) for word, ids in encoded if len(ids) == 2]
    if len(single) < len(DECAYED_NORMS):
        raise SystemExit(f"only {len(single)} of the demo's words are one token each; needs {len(DECAYED_NORMS)}")
    return single[: len(DECAYED_NORMS)]


def build_tensors(num_tokens: int, decayed: dict[int, float]) -> dict[str, Any]:
    """Random weights of a Mamba model in bf16, and the decayed rows (id → L2 norm) in its input table."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.02) -> Any:
        return torch.randn(*shape, generator=generator) * std

    inner = 2 * NUM_DIMS
    table = normal(num_tokens, NUM_DIMS)
    for token_id, norm in decayed.items():
        # In float64: 1e-30 divided by a float32 norm of 1e-30 would already be coarse.
        row = table[token_id].double()
        table[token_id] = (row / row.norm() * norm).float()
    tensors = {"backbone.embeddings.weight": table, "lm_head.weight": normal(num_tokens, NUM_DIMS)}
    tensors["backbone.norm_f.weight"] = torch.ones(NUM_DIMS)
    for layer in range(NUM_LAYERS):
        prefix = f"backbone.layers.{layer}."
        tensors[prefix + "norm.weight"] = torch.ones(NUM_DIMS)
        tensors[prefix + "mixer.A_log"] = torch.arange(1, STATE_SIZE + 1).float().log().repeat(inner, 1)
        tensors[prefix + "mixer.D"] = torch.ones(inner)
        tensors[prefix + "mixer.in_proj.weight"] = normal(2 * inner, NUM_DIMS)
        tensors[prefix + "mixer.conv1d.weight"] = normal(inner, 1, KERNEL, std=0.3)
        tensors[prefix + "mixer.conv1d.bias"] = torch.zeros(inner)
        tensors[prefix + "mixer.x_proj.weight"] = normal(DT_RANK + 2 * STATE_SIZE, inner)
        tensors[prefix + "mixer.dt_proj.weight"] = normal(inner, DT_RANK, std=0.3)
        tensors[prefix + "mixer.dt_proj.bias"] = normal(inner, std=0.1) - 4.0
        tensors[prefix + "mixer.out_proj.weight"] = normal(NUM_DIMS, inner)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def build(out: Path, gguf: Path | None) -> list[tuple[str, int, float]]:
    """Write the checkpoint; returns (word, token id, norm of its table row) of the rows that were decayed."""
    from safetensors.torch import save_file

    tokenizer, tokenizer_config = tokenizer_from_gguf(gguf) if gguf else tokenizer_from_docs()
    chosen = [(word, i, norm) for (word, i), norm in zip(choose_tokens(tokenizer), DECAYED_NORMS, strict=True)]
    num_tokens = tokenizer.get_vocab_size()
    roles = {
        role: tokenizer.token_to_id(tokenizer_config[f"{role}_token"])
        for role in ("bos", "eos")
        if f"{role}_token" in tokenizer_config
    }
    config = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": num_tokens,
        "hidden_size": NUM_DIMS,
        "num_hidden_layers": NUM_LAYERS,
        "state_size": STATE_SIZE,
        "conv_kernel": KERNEL,
        "expand": 2,
        "intermediate_size": 2 * NUM_DIMS,
        "time_step_rank": DT_RANK,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{f"{role}_token_id": token_id for role, token_id in roles.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2), encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(
        build_tensors(num_tokens, {i: norm for _, i, norm in chosen}), out / "model.safetensors", metadata={"format": "pt"}
    )
    return chosen


def main() -> int:
    """Build and say what was done."""
    parser = argparse.ArgumentParser(description="Build the demo's untied gated checkpoint with decayed rows.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file whose tokenizer to use")
    arguments = parser.parse_args()
    for word, token_id, norm in build(arguments.out, arguments.tokenizer):
        print(f"  table row {token_id:>6} of token {word!r:<10} set to L2 norm {norm:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
