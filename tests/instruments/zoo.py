"""A zoo of architectures: every language model class of the installed transformers, built on the meta device.

Nothing is downloaded and no weight is allocated: a class is built from its default config with few layers, and only names,
shapes and the config are kept. What `save_pretrained` would leave out (tied parameters) is left out here too. The truth comes
from the model itself: the parameters behind `get_input_embeddings()` and `get_output_embeddings()`, and its module classes.

Run as a script, it prints the score over the whole zoo: `python tests/instruments/zoo.py [NAME...]`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ghoststep.evidence.checkpoint import StoredTensors, TensorInfo
from ghoststep.evidence.wiring import Mixing, Tie

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a zoo never fetches: classes that ask the Hub are skipped

RECURRENT_CLASSES = re.compile(
    r"MambaMixer|BambaMixer|Mamba2Mixer|MambaLayer|GatedDeltaNet|DeltaAttention|RecurrentBlock|RwkvSelfAttention|xLSTMLayer"
    r"|LightningAttention|[^n]ShortConv$|LinearAttention$|MambaDecoderLayer|FalconH1Mixer"
)
"""Names of module classes that mix positions by a recurrence or a gated convolution: the truth, for the tests only."""
SOFTMAX_CLASSES = re.compile(r"Attention$|SelfAttention$")
OTHER_STACK = re.compile(r"vision|visual|audio|speech|codec|qformer|image|talker|token2wav")
OVERRIDES: Mapping[str, Mapping[str, object]] = {
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"head_dim": 128, "num_key_value_heads": 8},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "BambaForCausalLM": {"attn_layer_indices": [2]},
    "JambaForCausalLM": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "KimiLinearForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "ZambaForCausalLM": {"num_hidden_layers": 18},
}
"""What some default configs lack; and hybrids with both kinds of layer among the four that are built."""
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks",
              "num_decoder_layers", "num_encoder_layers", "depth")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One built class: what its checkpoint would store, and the truth. Names are None where there is no such table."""

    name: str
    config: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    input_name: str | None
    output_name: str | None
    tied: bool
    aliases: tuple[str, ...] = ()
    output_aliases: tuple[str, ...] = ()
    has_input_getter: bool = True
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: frozenset[str] = frozenset()

    @property
    def mixing(self) -> Mixing | None:
        """The wiring class by the module classes of the text layers; None where nothing is called attention or a recurrence."""
        found = [set(classes) for name, classes in self.layers.items() if not OTHER_STACK.search(name)]
        recurrent = [c for c in found if any(RECURRENT_CLASSES.search(one) for one in c)]
        if not recurrent:
            return Mixing.ATTENTION if any("Attention" in one for one in self.classes) else None
        softmax = [any(SOFTMAX_CLASSES.search(o) and not RECURRENT_CLASSES.search(o) for o in c) for c in recurrent]
        return Mixing.ATTENTION_BESIDE if all(softmax) else Mixing.RECURRENT_GATED

    @property
    def stored(self) -> StoredTensors:
        """The stored tensors as a safetensors folder would show them (dtype bf16)."""
        return stored_of(self.shapes)


def stored_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "bf16", container: str = "safetensors") -> StoredTensors:
    """Stored tensors with these names and shapes; two bytes a value."""
    tensors = {
        name: TensorInfo(name=name, shape=tuple(shape), dtype=dtype, file="model.safetensors", num_bytes=2 * _count(shape))
        for name, shape in shapes.items()
    }
    return StoredTensors(format=container, tensors=tensors)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def class_names() -> list[str]:
    """Every class behind the causal, masked, seq2seq, image-text, audio-text and backbone mappings, sorted, each once."""
    from transformers.models.auto import modeling_auto as auto

    names: set[str] = set()
    for mapping in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
                    "SPEECH_SEQ_2_SEQ", "PRETRAINING"):  # fmt: skip
        table = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        for value in table.values():
            names.update((value,) if isinstance(value, str) else value)
    return sorted(names)


def small_config(config_class: type[Any], depth: int, overrides: Mapping[str, object]) -> Any:
    """The default config with `depth` layers, also in its nested configs, as far as the class accepts it."""
    attempts = [{"num_hidden_layers": depth, **overrides}, dict(overrides), {}]
    for extra in attempts:
        with contextlib.suppress(Exception):
            config = config_class(**extra)
            break
    else:
        config = config_class()
    if "num_hidden_layers" in overrides:
        return config
    for part in (config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))):
        _shrink(part, depth)
    return config


def _shrink(part: Any, depth: int) -> None:
    for key in DEPTH_KEYS:
        value = getattr(part, key, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > depth:
            with contextlib.suppress(Exception):
                setattr(part, key, depth)


def build(name: str, depth: int = 4, **overrides: object) -> Exhibit:
    """Build one class on the meta device. Raises whatever the class raises when its default config cannot be built."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = small_config(cls.config_class, depth, {**OVERRIDES.get(name, {}), **overrides})
        with torch.device("meta"):
            model = cls(config)
    return exhibit(name, model)


def exhibit(name: str, model: Any) -> Exhibit:
    """What a checkpoint of this model would store, and the truth about it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dropped = set(getattr(model, "all_tied_weights_keys", {}) or {})
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key not in dropped}
    first = _table_of(model, "get_input_embeddings")
    last = _table_of(model, "get_output_embeddings")
    input_names = [n for n, p in parameters.items() if p is first and n in shapes]
    tied_target = _tied_to(model, parameters, last)
    tied = last is not None and (last is first or tied_target is first)
    output_names = [n for n, p in parameters.items() if p is last and n in shapes]
    layers = {n: tuple(type(m).__name__ for _, m in module.named_modules()) for n, module in model.named_modules()
              if re.fullmatch(r".*\b(layers|blocks|h|layer|mixers)\.\d+", n)}  # fmt: skip
    return Exhibit(
        name=name,
        config={**model.config.to_dict(), "architectures": [name]},
        shapes=shapes,
        input_name=input_names[0] if input_names else None,
        classes=frozenset(type(m).__name__ for m in model.modules()),
        has_input_getter=first is not None,
        output_aliases=tuple(output_names[1:]),
        output_name=None if tied or not output_names else output_names[0],
        tied=tied,
        aliases=tuple(input_names[1:]),
        layers=layers,
    )


def _table_of(model: Any, getter: str) -> Any:
    with contextlib.suppress(Exception):
        return getattr(getattr(model, getter)(), "weight", None)
    return None


def _tied_to(model: Any, parameters: Mapping[str, Any], last: Any) -> Any:
    mapping = getattr(model, "all_tied_weights_keys", {}) or {}
    for target, source in mapping.items():
        if last is not None and parameters.get(target) is last:
            return parameters.get(source)
    return None


def whole_zoo(names: list[str] | None = None) -> Iterator[Exhibit | tuple[str, str]]:
    """Every exhibit, or (name, why it could not be built)."""
    for name in names or class_names():
        try:
            yield build(name)
        except Exception as error:
            yield name, f"{type(error).__name__}: {str(error)[:150]}"


class NoFiles:
    """The place of a checkpoint with no file beside its weights."""

    def read_bytes(self, file: str, **_: object) -> None:
        """There is none."""


def score(exhibit: Exhibit) -> tuple[str, ...]:
    """What the instruments get wrong about this exhibit, in words; () when all is right. Judged with and without the config."""
    from ghoststep.errors import CannotLook
    from ghoststep.evidence.base import Missing
    from ghoststep.instruments.declared import from_config
    from ghoststep.instruments.inventory import tables
    from ghoststep.instruments.tie import tie_state
    from ghoststep.instruments.wiring import mixing_class

    misses: list[str] = []
    for declared in (from_config(exhibit.config, file="config.json"), Missing(reason="no config")):
        how = "names only" if isinstance(declared, Missing) else "with config"
        try:
            found = tables(exhibit.stored, declared)
        except CannotLook as reason:
            if exhibit.has_input_getter:
                misses.append(f"{how}: no table: {reason}")
        else:
            if exhibit.has_input_getter and found.input.tensor.name not in (exhibit.input_name, *exhibit.aliases):
                misses.append(f"{how}: input {found.input.tensor.name}, truth {exhibit.input_name}")
            output = found.output.tensor.name if found.output else None
            if exhibit.has_input_getter and output not in (exhibit.output_name, *exhibit.output_aliases):
                misses.append(f"{how}: output {output}, truth {exhibit.output_name}")
            if found.output is None:  # no table has to be read
                state = tie_state(NoFiles(), exhibit.stored, found, declared)
                if state.tie in (Tie.BROKEN_FLAG_TRUE, Tie.BROKEN_HEAD_MISSING):
                    misses.append(f"{how}: a healthy tie called broken: {state.reason}")
        try:
            mixing: Mixing | None = mixing_class(exhibit.stored, declared).mixing
        except CannotLook:
            mixing = None
        if mixing is not exhibit.mixing:
            misses.append(f"{how}: mixing {mixing}, truth {exhibit.mixing}")
    return tuple(misses)


def main(names: list[str]) -> int:
    """Print the score over the zoo (or over these classes)."""
    built, right, unbuilt, without = 0, 0, 0, 0
    for item in whole_zoo(names or None):
        if isinstance(item, tuple):
            unbuilt += 1
            print("not built:", *item)
            continue
        built += 1
        without += not item.has_input_getter
        misses = score(item)
        right += not misses
        for miss in misses:
            print(f"{item.name}: {miss}")
    print(f"{right} of {built} right; {without} of them give no input table to compare with; {unbuilt} could not be built")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
