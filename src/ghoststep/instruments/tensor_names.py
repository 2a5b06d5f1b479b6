"""What the name of a stored tensor says about its place in the model.

No model names here: only the words that authors of any model use for an embedding, a head, a position table, a modality or a
layer container. A word is evidence, never a proof; `inventory` and `wiring` weigh it with shapes and the config.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADAPTER = re.compile(r"^(?:base_model\.model\.)+|^(?:_orig_mod|module)\.|^_fsdp_wrapped_module\.")
_WRAPPERS = re.compile(
    r"\.(?:modules_to_save\.[^.]+|modules_to_save|base_layer|parametrizations|original|_orig_mod|default)(?=\.|$)"
)
_WRAPPED = re.compile(r"module|_orig_mod|base_|param|original|default")
_LAYER = re.compile(
    r"^(?P<stack>(?:.*?\.)?(?:\w*layers|layer|blocks|block|blk|h|mixers|attentions))\.(?P<index>\d+)\.(?P<rest>.+)$"
)
_MODALITY = re.compile(
    r"vision|visual|image|img|audio|speech(?!t)|sound|video|pixel|patch|codec|codebook|\bvq|vqmodel|quantiz|speaker|talker"
    r"|token2wav|code2wav|qformer|projector|connector|resampler|perceiver_|diffusion|\bdit\b|entit|siglip|\bvit\b|sam_"
    r"|depth_decoder|code_predictor|acoustic|protein|wave|\bmimi\b|\bflow|generation_(?:emb|head)"
)
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|mtp_\w+|medusa\w*|eagle\w*|draft\w*|nextn\w*)(?:\.|$)")
_POSITION = re.compile(
    r"^(?:wpe|w?pos(?:ition(?:al|s)?)?|(?:\w+_)?pos(?:itions?|itional)?_(?:emb\w*|table|encod\w*|enc)|embed_pos\w*|abs_pos\w*"
    r"|positions?_emb\w*|pe|rel\w*_pos\w*|relative\w*|position_embd)$"
)
_KIND = re.compile(
    r"token_type|segment|type_emb|type_vocab|lang(?:uage)?_emb|time_emb|row_emb|column_emb|shape_emb|pronun|hash|per_layer|value_emb"
    r"|temporal|tile|label_emb|class_emb|turn_emb|sentence_|step_emb|level_emb"
)
STRONG_INPUT = re.compile(
    r"^(?:embed_tokens|wte|word_embeddings?|tok_embeddings?|token_embeddings?|token_embedding_table|tokens_embed|embed_in"
    r"|token_embd|tok_emb|token_emb|word_emb|input_embeddings?|word_embedding_layer|word_embedder|shared|in_embed\w*)$"
)
WEAK_INPUT = re.compile(
    r"^(?:embeddings?|embedding_layer|embedder|embed|emb|embd|encoder_emb\w*|\w+_embed_tokens|\w*word_emb\w*)$"
)
STRONG_OUTPUT = re.compile(
    r"^(?:lm_heads?|output|output_layer|embed_out|output_projection|proj_out|unembed\w*|output_embeddings?|lm_loss|vocab_proj\w*"
    r"|to_logits|logits?_proj\w*|out_embed\w*|vocab_head|lm_projection|head|ff_out|prediction_head)$"
)
WEAK_OUTPUT = re.compile(r"^(?:decoder|proj|generator|logits?|linear|dense|fc|predictor|out_proj|predictions|w_out)$")
_NOT_VOCABULARY = re.compile(
    r"^(?:score|classifier|classification_head|v_head|value_head|reward\w*|regression\w*|qa_outputs|cls_head|num_labels|pooler|rank\w*)$"
)
_LEAVES = ("weight", "qweight", "weight_packed", "kernel", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A tensor name taken apart. `module` is the path of the module that owns it ("model.embed_tokens"), wrappers removed.

    `leaf` is the last part ("weight"), `own` the last part of the module path ("embed_tokens"). The flags say which words
    stand in it; `in_layer` is True below a numbered layer.
    """

    full: str
    module: str
    leaf: str
    own: str
    in_layer: bool
    modality: bool
    position: bool
    other_kind: bool
    draft: bool
    not_vocabulary: bool
    numbered: bool

    @property
    def depth(self) -> int:
        """Number of module path parts."""
        return self.module.count(".") + 1

    @property
    def is_plain(self) -> bool:
        """True unless a word says that it is no table over text tokens."""
        return not self.modality and self.is_plain_apart_from_modality

    @property
    def is_plain_apart_from_modality(self) -> bool:
        """`is_plain`, but words such as "visual" are allowed: they may only be part of the model's own prefix."""
        return not (self.in_layer or self.position or self.other_kind or self.draft or self.not_vocabulary or self.numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerName:
    """A tensor of a numbered layer: `stack` "model.layers", `index` 3, `rest` "self_attn.q_proj.weight"."""

    stack: str
    index: int
    rest: str


def unwrap(name: str) -> str:
    """The name without what wrappers (adapters, compile, DDP, FSDP, parametrizations) put around it."""
    if not _WRAPPED.search(name):  # nearly all names: keeps 100,000 names of a large mixture of experts quick
        return name
    previous = ""
    while previous != name:
        previous = name
        name = _ADAPTER.sub("", name)
    return _WRAPPERS.sub("", name)


def parse(name: str) -> Name:
    """Take a tensor name apart; never fails, whatever the string. Cost: a few regular expressions, linear in its length."""
    plain = unwrap(name[:1000])
    parts = plain.split(".")
    leaf = parts[-1]
    if leaf in _LEAVES and len(parts) > 1:
        module = parts[:-1]
    elif leaf == "bias" or re.search(r"\d|scale|zero|absmax|quant|g_idx|lora_|state", leaf):
        module = parts[:-1] or [leaf]
    else:  # a parameter without a module of its own: its name is the word to judge
        module, leaf = parts, "weight"
    path = ".".join(module)
    lowered = [part.lower() for part in module]
    numbered = lowered[-1].isdigit() and len(lowered) > 1  # one of a list: a codebook, one head of several
    lowered = lowered[:-1] if numbered else lowered
    return Name(
        full=name,
        module=path,
        leaf=leaf,
        own=lowered[-1],
        in_layer=_LAYER.match(plain) is not None,
        modality=_MODALITY.search(path.lower()) is not None,
        position=any(_POSITION.match(part) for part in lowered[-2:]),
        other_kind=any(_KIND.search(part) for part in lowered[-2:]),
        draft=_DRAFT.search(path.lower()) is not None,
        not_vocabulary=any(_NOT_VOCABULARY.match(part) for part in lowered),
        numbered=numbered,
    )


def layer_of(name: str) -> LayerName | None:
    """The numbered layer that a tensor belongs to, by the first numbered container of its name; None outside layers."""
    match = _LAYER.match(unwrap(name[:1000]))
    if match is None or len(match["index"]) > 6:
        return None
    return LayerName(stack=match["stack"], index=int(match["index"]), rest=match["rest"])


def is_modality(path: str) -> bool:
    """True if a path speaks of images, sound, patches, codecs or other things that are not text tokens."""
    return _MODALITY.search(path.lower()) is not None


def is_draft(path: str) -> bool:
    """True if a path speaks of a draft or multi-token head."""
    return _DRAFT.search(path.lower()) is not None
