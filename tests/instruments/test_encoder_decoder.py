"""Encoder-decoders are told by the config's flag, else by an attention across; codecs and towers of images are none."""

from __future__ import annotations

import pytest

from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import Declared
from ghoststep.evidence.wiring import MixingClass
from ghoststep.instruments.declared import from_config, from_gguf
from ghoststep.instruments.wiring import mixing_class
from tests.instruments.zoo import stored_of

NO_CONFIG = Missing(reason="no config")
T5 = ("encoder.block.0.layer.0.SelfAttention.q.weight", "decoder.block.0.layer.0.SelfAttention.q.weight",
      "decoder.block.0.layer.1.EncDecAttention.q.weight")  # fmt: skip
BART = ("model.encoder.layers.0.self_attn.q_proj.weight", "model.decoder.layers.0.self_attn.q_proj.weight",
        "model.decoder.layers.0.encoder_attn.q_proj.weight")  # fmt: skip
JOINED = ("encoder.bert.encoder.layer.0.attention.self.query.weight", "decoder.bert.encoder.layer.0.attention.self.query.weight",
          "decoder.bert.encoder.layer.0.crossattention.self.query.weight")  # fmt: skip
TEXT = ("text_encoder.layers.0.self_attn.q_proj.weight", "text_decoder.layers.0.self_attn.q_proj.weight",
        "text_decoder.layers.0.cross_attention.q_proj.weight")  # fmt: skip
GGUF = ("enc.blk.0.attn_q.weight", "dec.blk.0.attn_q.weight", "dec.blk.0.cross_attn_q.weight")

FUNNEL = ("funnel.encoder.blocks.0.0.attention.q_head.weight", "funnel.decoder.layers.0.attention.q_head.weight")
TOWER = ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "language_model.decoder.layers.0.self_attn.q_proj.weight",
         "language_model.decoder.layers.0.encoder_attn.q_proj.weight")  # fmt: skip
CODEC = ("codec_model.encoder.layers.0.self_attn.q_proj.weight", "codec_model.decoder.layers.0.cross_attn.q_proj.weight",
         "model.layers.0.self_attn.q_proj.weight")  # fmt: skip
DECODER = ("model.decoder.layers.0.self_attn.q_proj.weight", "model.decoder.layers.0.encoder_attn.q_proj.weight")


def judge(names: tuple[str, ...], declared: Declared | Missing = NO_CONFIG) -> MixingClass:
    found: MixingClass = mixing_class(stored_of(dict.fromkeys(names, (8, 8))), declared)
    return found


@pytest.mark.parametrize("names", [T5, BART, JOINED, TEXT, GGUF])
def test_by_names(names: tuple[str, ...]) -> None:
    found = judge(names)
    assert (found.is_encoder_decoder, found.causal) == (True, None)
    assert f"an encoder-decoder: {names[0]} and {names[2]}" in found.reason


@pytest.mark.parametrize("names", [FUNNEL, TOWER, CODEC, DECODER])
def test_look_alikes(names: tuple[str, ...]) -> None:
    assert not judge(names).is_encoder_decoder


def test_the_outer_flag_counts_before_the_names_and_an_inner_false_says_nothing() -> None:
    def flag(**values: object) -> bool:
        return judge(BART, from_config(values, file="config.json")).is_encoder_decoder

    inner: dict[str, object] = {"vocab_size": 64, "hidden_size": 8}
    assert flag(is_encoder_decoder=True)
    assert not flag(is_encoder_decoder=False)
    assert flag(decoder={**inner, "is_encoder_decoder": False})
    assert judge(DECODER, from_config({"text_config": {**inner, "is_encoder_decoder": True}}, file="c")).is_encoder_decoder
    assert not judge(DECODER, from_config({"is_encoder_decoder": "yes"}, file="c")).is_encoder_decoder


def test_where_decoding_starts_is_declared() -> None:
    found = from_config({"decoder_start_token_id": 0}, file="config.json", generation={"decoder_start_token_id": [2]})
    assert (found.decoder_start_token_ids, found.generation["decoder_start"]) == ((0,), (2,))
    assert from_config({"decoder": {"decoder_start_token_id": 5, "vocab_size": 9}}, file="c").decoder_start_token_ids == (5,)
    assert from_config({}, file="config.json").decoder_start_token_ids == ()
    gguf = from_gguf({"general.architecture": "t5", "t5.decoder_start_token_id": 0})
    assert gguf.decoder_start_token_ids == (0,)
