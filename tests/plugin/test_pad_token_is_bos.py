"""The check's own four cases: broken, healthy twin, near miss, not applicable."""

from acme_checks.pad_token_is_bos import pad_token_is_bos

from ghoststep.evidence.tokenizer import Vocabulary
from ghoststep.registry import Clear, Found, NotApplicable


def a_vocabulary(**special_ids: int) -> Vocabulary:
    return Vocabulary(file="tokenizer.json", kind="bpe", num_tokens=100, max_id=99, special_ids=special_ids)


def test_broken_one_id_for_both_roles_is_found() -> None:
    said = pad_token_is_bos(a_vocabulary(bos=1, eos=2, pad=1))
    assert isinstance(said, Found)
    assert said.findings[0].where.token_id == 1


def test_healthy_twin_is_clear() -> None:
    assert isinstance(pad_token_is_bos(a_vocabulary(bos=1, eos=2, pad=3)), Clear)


def test_near_miss_padding_that_is_eos_is_clear() -> None:
    assert isinstance(pad_token_is_bos(a_vocabulary(bos=1, eos=2, pad=2)), Clear)


def test_without_a_padding_token_it_does_not_apply() -> None:
    assert pad_token_is_bos(a_vocabulary(bos=1, eos=2)) == NotApplicable(reason="the tokenizer has no padding token")
