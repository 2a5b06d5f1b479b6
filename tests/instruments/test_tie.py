"""Flag × stored tensors × equality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import StoredTensors, TensorInfo
from ghoststep.evidence.wiring import Tie, TieState
from ghoststep.instruments.declared import from_config
from ghoststep.instruments.inventory import tables
from ghoststep.instruments.tie import tie_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

R, D = 300, 16
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CAUSAL = ("XForCausalLM",)


@dataclass
class Rows:
    """A table in memory; counts the rows that were asked for."""

    info: TensorInfo
    values: NDArray[np.generic]
    asked: int = 0
    num_rows: int = field(init=False)
    num_dims: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows, self.num_dims = self.values.shape
        self.row_bytes = self.values.dtype.itemsize * self.num_dims

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        self.asked += stop - start
        return self.values[start:stop].view(np.uint8).reshape(stop - start, -1)


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even, by torch."""
    import torch

    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


class Model:
    """A checkpoint of a few arrays."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[np.generic]],
        container: str = "safetensors",
        base: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        kinds = {"float32": "f32", "float16": "f16", "uint16": "bf16", "uint8": "q8_0"}
        infos = {
            n: TensorInfo(name=n, shape=a.shape, dtype=kinds[str(a.dtype)], file="m", num_bytes=a.nbytes)
            for n, a in arrays.items()
        }
        self.stores = {n: Rows(info=infos[n], values=a) for n, a in arrays.items() if a.ndim == 2}
        self.stored = StoredTensors(format=container, tensors=infos, base_model=base)
        self.files = dict(files or {})

    def read_bytes(self, file: str, **_: object) -> bytes | None:
        return self.files.get(file)

    def rows(self, name: str) -> Rows:
        return self.stores[name]


def judge(
    arrays: Mapping[str, NDArray[np.generic]],
    flag: bool | None,
    architectures: tuple[str, ...] = CAUSAL,
    *,
    config: bool = True,
    container: str = "safetensors",
    base: str | None = None,
    files: Mapping[str, bytes] | None = None,
) -> TieState:
    model = Model(arrays, container, base, files)
    values: dict[str, object] = {"vocab_size": R, "hidden_size": D, "architectures": list(architectures)}
    values.update({} if flag is None else {"tie_word_embeddings": flag})
    declared = from_config(values, file="config.json") if config else Missing(reason="no config")
    found: TieState = tie_state(model, model.stored, tables(model.stored, declared), declared)
    return found


@pytest.fixture
def table() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((R, D)).astype(np.float32)


def changed(table: NDArray[np.float32], *rows: int) -> NDArray[np.float32]:
    copy = table.copy()
    copy[list(rows)] += 1
    return copy


def test_flag_true_and_two_different_tables(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table, HEAD: changed(table, 7, 299)}, True)
    assert (found.tie, found.num_different_rows, found.first_different_row) == (Tie.BROKEN_FLAG_TRUE, 2, 7)
    assert "config.json says tie_word_embeddings=true" in found.reason
    assert "2 table rows differ, the first is 7" in found.reason


def test_flag_true_and_equal_copies(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table, HEAD: table.copy()}, True)
    assert (found.tie, found.num_different_rows, found.first_different_row) == (Tie.TIED, 0, None)
    assert "stored twice" in found.reason


def test_flag_true_and_one_table(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table}, True)
    assert (found.tie, found.num_different_rows) == (Tie.TIED, None)


def test_flag_false_and_two_tables_reads_only_what_it_must(table: NDArray[np.float32]) -> None:
    model = Model({EMBED: np.tile(table, (20, 16)), HEAD: np.tile(table, (20, 16)) + 1})
    declared = from_config({"vocab_size": 6000, "hidden_size": 256, "tie_word_embeddings": False}, file="config.json")
    found = tie_state(model, model.stored, tables(model.stored, declared), declared)
    assert (found.tie, found.num_different_rows, found.first_different_row) == (Tie.UNTIED, None, 0)
    assert model.rows(EMBED).asked < 6000


def test_flag_false_and_equal_tables_is_untied_and_said(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table, HEAD: table.copy()}, False)
    assert (found.tie, found.num_different_rows) == (Tie.UNTIED, 0)
    assert "copied from the input" in found.reason


def test_undeclared_is_decided_by_the_tensors(table: NDArray[np.float32]) -> None:
    for config in (True, False):
        one = judge({EMBED: table}, None, config=config)
        copies = judge({EMBED: table, HEAD: table.copy()}, None, config=config)
        two = judge({EMBED: table, HEAD: changed(table, 3)}, None, config=config)
        assert (one.tie, copies.tie, two.tie) == (Tie.TIED, Tie.TIED, Tie.UNTIED)
        assert all("undeclared, decided by the tensors" in state.reason for state in (one, copies, two))
        assert {one.declared, copies.declared, two.declared} == {None}


@pytest.mark.parametrize("architectures", [CAUSAL, ("GPT2LMHeadModel",), ("XForConditionalGeneration",), ("XForMaskedLM",), ()])
def test_flag_false_and_head_missing(table: NDArray[np.float32], architectures: tuple[str, ...]) -> None:
    found = judge({EMBED: table}, False, architectures)
    assert found.tie is Tie.BROKEN_HEAD_MISSING
    assert "random values" in found.reason


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize(
    ("arrays", "architectures"),
    [({"embeddings.word_embeddings.weight": (R, D)}, ("BertModel",)), ({"wte.weight": (R, D)}, ("GPT2Model",)),
     ({"wte.weight": (R, D)}, ()), ({"embed_tokens.weight": (R, D)}, ("XForCausalLM",)),
     ({EMBED: (R, D), "score.weight": (1, D)}, ("XForSequenceClassification",)), ({EMBED: (R, D), "score.weight": (1, D)}, ()),
     ({EMBED: (R, D), "v_head.summary.weight": (1, D)}, ("XRewardModel",)),
     ({"roberta.embeddings.word_embeddings.weight": (R, D), "classifier.out_proj.weight": (2, D)}, ())],
)  # fmt: skip
def test_models_without_a_head(
    arrays: Mapping[str, tuple[int, int]], architectures: tuple[str, ...], flag: bool | None, table: NDArray[np.float32]
) -> None:
    found = judge({n: table[: s[0]] for n, s in arrays.items()}, flag, architectures)
    assert found.tie is Tie.NO_HEAD, found.reason


def test_the_bias_of_a_head_proves_one(table: NDArray[np.float32]) -> None:
    arrays = {"bert.embeddings.word_embeddings.weight": table, "cls.predictions.bias": np.zeros(R, np.float32)}
    assert judge(arrays, True, ("BertForPreTraining",)).tie is Tie.TIED
    assert judge(arrays, False, ("BertForPreTraining",)).tie is Tie.BROKEN_HEAD_MISSING


def test_adapter_has_no_head_of_its_own(table: NDArray[np.float32]) -> None:
    found = judge({f"base_model.model.{EMBED}": table}, False, base="org/base")
    assert found.tie is Tie.NO_HEAD
    assert "adapter" in found.reason


def test_gguf_without_output_is_tied(table: NDArray[np.float32]) -> None:
    assert judge({"token_embd.weight": table}, None, (), container="gguf").tie is Tie.TIED
    two = judge({"token_embd.weight": table, "output.weight": changed(table, 0)}, None, (), container="gguf")
    assert two.tie is Tie.UNTIED


def test_copy_in_another_precision_is_a_copy(table: NDArray[np.float32]) -> None:
    same = judge({EMBED: table, HEAD: bf16(table)}, True)
    assert same.tie is Tie.TIED
    assert "as f32 and bf16" in same.reason
    other = judge({EMBED: table, HEAD: bf16(changed(table, 5))}, True)
    assert (other.tie, other.num_different_rows, other.first_different_row) == (Tie.BROKEN_FLAG_TRUE, 1, 5)
    half = judge({EMBED: bf16(table), HEAD: table.astype(np.float16)}, False)
    assert half.tie is Tie.UNTIED


def test_nan_of_the_same_bits_is_equal(table: NDArray[np.float32]) -> None:
    table[4, 4] = np.nan
    assert judge({EMBED: table, HEAD: table.copy()}, True).tie is Tie.TIED
    assert judge({EMBED: table, HEAD: bf16(table)}, True).tie is Tie.TIED


def test_other_row_counts(table: NDArray[np.float32]) -> None:
    longer = np.concatenate([table, table[:2]])
    broken = judge({EMBED: longer, HEAD: table}, True)
    assert (broken.tie, broken.num_different_rows, broken.first_different_row) == (Tie.BROKEN_FLAG_TRUE, 2, 300)
    assert "302 and 300 table rows" in broken.reason
    assert judge({EMBED: longer, HEAD: table}, False).tie is Tie.UNTIED


def test_other_dims_cannot_be_one_table(table: NDArray[np.float32]) -> None:
    wide = np.concatenate([table, table], axis=1)
    found = judge({EMBED: wide, HEAD: table}, True)
    assert (found.tie, found.num_different_rows, found.first_different_row) == (Tie.BROKEN_FLAG_TRUE, R, 0)
    assert "cannot be one table, with 32 and 16 dims" in found.reason
    for flag in (False, None):
        other = judge({EMBED: wide, HEAD: table}, flag)
        assert (other.tie, other.num_different_rows) == (Tie.UNTIED, None)
        assert "not compared: 32 and 16 dims" in other.reason


def test_packed_table_of_other_dims_is_no_proof(table: NDArray[np.float32]) -> None:
    with pytest.raises(CannotLook, match="cannot be compared"):
        judge({EMBED: table, HEAD: np.zeros((R, D // 2), np.uint8)}, True)


POOLED = b'[{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]'
SPARSE = (
    b'[{"type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},'
    b' {"type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]'
)


@pytest.mark.parametrize("flag", [True, False, None])
def test_an_embedding_model_whatever_its_architecture_says_uses_no_head(table: NDArray[np.float32], flag: bool | None) -> None:
    found = judge({EMBED: table}, flag, files={"modules.json": POOLED})
    assert found.tie is Tie.NO_HEAD
    assert "modules.json pools the backbone's output" in found.reason


@pytest.mark.parametrize("content", [SPARSE, b"", b"{}", b'["Pooling"]', b'[{"type": 3}]', b"[", b"\xff", b"[" * 100_000])
def test_other_lists_of_modules_prove_nothing(table: NDArray[np.float32], content: bytes) -> None:
    assert judge({EMBED: table}, False, files={"modules.json": content}).tie is Tie.BROKEN_HEAD_MISSING


def test_a_stored_head_is_judged_beside_a_list_of_modules(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table, HEAD: changed(table, 7)}, True, files={"modules.json": POOLED})
    assert found.tie is Tie.BROKEN_FLAG_TRUE


def test_packed_table_cannot_be_compared(table: NDArray[np.float32]) -> None:
    packed = np.zeros((R, D), np.uint8)
    with pytest.raises(CannotLook, match="cannot be compared"):
        judge({EMBED: table, HEAD: packed}, True)
    assert judge({EMBED: table, HEAD: packed}, False).tie is Tie.UNTIED


def test_gguf_tables_of_two_block_types(table: NDArray[np.float32]) -> None:
    blocks = np.zeros((R, D), np.uint8)
    found = judge({"token_embd.weight": blocks, "output.weight": table}, None, (), container="gguf")
    assert found.tie is Tie.UNTIED
    assert "q8_0 and f32" in found.reason
    with pytest.raises(CannotLook, match="cannot be compared"):
        judge({"token_embd.weight": blocks, "output.weight": table}, True, (), container="gguf")


def test_decoder_with_its_own_table(table: NDArray[np.float32]) -> None:
    arrays = {"model.encoder.embed_tokens.weight": table, "model.decoder.embed_tokens.weight": changed(table, *range(R))}
    own = judge(arrays, True, ("XForConditionalGeneration",))
    assert own.tie is Tie.UNTIED
    assert "the decoder's own table" in own.reason
    assert judge(dict.fromkeys(arrays, table), True, ("XForConditionalGeneration",)).tie is Tie.TIED
    assert judge(arrays, False, ("XForConditionalGeneration",)).tie is Tie.BROKEN_HEAD_MISSING


def test_contradicting_flags_leave_it_to_the_tensors(table: NDArray[np.float32]) -> None:
    model = Model({EMBED: table})
    text = {"vocab_size": R, "hidden_size": D, "tie_word_embeddings": True}
    config = {"architectures": ["XForConditionalGeneration"], "tie_word_embeddings": False, "text_config": text}
    declared = from_config(config, file="config.json")
    found = tie_state(model, model.stored, tables(model.stored, declared), declared)
    assert (found.tie, found.declared) == (Tie.TIED, None)
    assert "the flags contradict each other" in found.reason


def test_numbered_heads_are_not_called_missing(table: NDArray[np.float32]) -> None:
    found = judge({EMBED: table, "lm_heads.0.weight": table + 1, "lm_heads.1.weight": table + 2}, False)
    assert found.tie is Tie.UNTIED
