"""The vocabulary checks over every language model class of the installed transformers, at its default config.

These are healthy models: what is said about them above a note is listed here with the reason why it is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ghoststep.checks.vocab.broken_tie import broken_tie
from ghoststep.checks.vocab.shrunk_table import shrunk_table
from ghoststep.checks.vocab.special_token_disagreement import special_token_disagreement
from ghoststep.checks.vocab.token_id_out_of_range import token_id_out_of_range
from ghoststep.checks.vocab.unaligned_vocab import unaligned_vocab
from ghoststep.checks.vocab.unusable_config_value import unusable_config_value
from ghoststep.checks.vocab.vocab_size_disagreement import vocab_size_disagreement
from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.checkpoint import TensorInfo
from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.finding import Outcome, Severity
from ghoststep.instruments.declared import from_config
from ghoststep.instruments.inventory import tables
from ghoststep.instruments.tie import tie_state
from ghoststep.registry import Answer, Check, Found, Unknown
from tests.instruments.zoo import Exhibit, NoFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

IDS_OUTSIDE = {"ArceeForCausalLM", "Starcoder2ForCausalLM"}
"""GS005: special ids of the default config (128000, 50256) really lie outside the default table."""
FLAG_IGNORED = {
    "BigBirdPegasusForCausalLM", "CpmAntForCausalLM", "FlavaForPreTraining", "LukeForMaskedLM", "Pop2PianoForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
}  # fmt: skip
"""GS006: the flag in the saved config is true, the class does not tie, and both tables are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table whose values differ from those of every other table; two bytes a row stand for them."""

    info: TensorInfo
    value: int
    row_bytes: int = 2

    @property
    def num_rows(self) -> int:
        return self.info.shape[0]

    @property
    def num_dims(self) -> int:
        return self.info.shape[1]

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.full((stop - start, 2), self.value, np.uint8)


class Files(NoFiles):
    """A checkpoint of an exhibit: no two of its tables are equal."""

    def __init__(self, exhibit: Exhibit) -> None:
        self.tensors = list(exhibit.stored.tensors.values())

    def rows(self, name: str) -> Rows:
        at = next(i for i, tensor in enumerate(self.tensors) if tensor.name == name)
        return Rows(info=self.tensors[at], value=at % 251)


def answers(exhibit: Exhibit) -> Iterator[tuple[Check, Answer]]:
    """Every vocabulary check that needs no values, with a tokenizer of exactly the declared size."""
    declared = from_config(exhibit.config, file="config.json")
    yield unusable_config_value, unusable_config_value(declared)
    try:
        found = tables(exhibit.stored, declared)
    except CannotLook:
        return  # feature extractors, and decoders of sound alone
    size = declared.vocab_size or found.input.num_rows
    vocabulary = Vocabulary(file="tokenizer.json", kind="BPE", num_tokens=size, max_id=size - 1)
    none = Missing(reason="a base model", outcome=Outcome.NOT_APPLICABLE)
    for given in (vocabulary, none):
        yield vocab_size_disagreement, vocab_size_disagreement(found, declared, given)
    yield token_id_out_of_range, token_id_out_of_range(found, vocabulary, none, none)
    yield shrunk_table, shrunk_table(found, vocabulary)
    tie = tie_state(Files(exhibit), exhibit.stored, found, declared)
    yield special_token_disagreement, special_token_disagreement(declared, found, vocabulary, tie)
    yield broken_tie, broken_tie(found, tie)
    yield unaligned_vocab, unaligned_vocab(found, exhibit.stored, tie, none)


def loud(check: Check, said: Answer) -> bool:
    """True for an error, a warning, or a question left open."""
    if isinstance(said, Unknown):
        return True
    return isinstance(said, Found) and any((f.severity or check.severity) is not Severity.NOTE for f in said.findings)


@pytest.mark.slow
def test_healthy_models_are_told_nothing_above_a_note() -> None:
    pytest.importorskip("transformers")
    from tests.instruments.zoo import whole_zoo

    exhibits = [item for item in whole_zoo() if isinstance(item, Exhibit)]
    assert len(exhibits) > 150
    told: dict[str, set[str]] = {}
    for exhibit in exhibits:
        for check, said in answers(exhibit):
            if loud(check, said):
                told.setdefault(check.code, set()).add(exhibit.name)
    built = {exhibit.name for exhibit in exhibits}
    assert told == {"GS005": IDS_OUTSIDE & built, "GS006": FLAG_IGNORED & built}


def test_the_same_models_cut_short_are_told() -> None:
    """The test above can fail: eight table rows less than declared, in one class of each kind."""
    pytest.importorskip("transformers")
    from dataclasses import replace

    from tests.instruments.zoo import build

    for name in ("LlamaForCausalLM", "MambaForCausalLM", "T5ForConditionalGeneration"):
        exhibit = build(name, 2)
        names = (exhibit.input_name, exhibit.output_name)
        shapes = {n: (s[0] - 8, *s[1:]) if n in names else s for n, s in exhibit.shapes.items()}
        codes = {check.code for check, said in answers(replace(exhibit, shapes=shapes)) if loud(check, said)}
        assert codes == {"GS001", "GS002"}
        assert not any(loud(check, said) for check, said in answers(exhibit))
