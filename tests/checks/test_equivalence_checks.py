"""GS105 (place in the batch) and GS112 to GS115 on evidence built by hand: severity by use, silence at the tolerance."""

from __future__ import annotations

from typing import Any

import pytest

from ghoststep.checks.mask.absent_mask_changes_output import absent_mask_changes_output
from ghoststep.checks.mask.attention_implementations_differ import attention_implementations_differ
from ghoststep.checks.mask.cache_changes_output import cache_changes_output
from ghoststep.checks.mask.pack_changes_output import pack_changes_output
from ghoststep.checks.mask.visible_batch_example import visible_batch_example
from ghoststep.evidence.equivalence import (
    Cached,
    OtherAttention,
    OtherBatch,
    OtherMask,
    Packed,
    Variant,
    VariantReading,
)  # fmt: skip
from ghoststep.evidence.influence import Region
from ghoststep.finding import Severity
from ghoststep.registry import Answer, Clear, Found
from tests.checks.test_mask import influence

TOLERANCE = 1e-4


def reading(variant: Variant, change: float, *, starts_move: bool = True, used_by: str = "") -> VariantReading:
    return VariantReading(
        variant=variant, change=change, tolerance=TOLERANCE, example=1, position=4, num_positions=9,
        num_above=int(change > TOLERANCE), starts_move=starts_move, used_by=used_by,
    )  # fmt: skip


def place(change: float, *, starts_move: bool = True) -> Answer:
    batch = OtherBatch(reading=reading(Variant.OTHER_BATCH, change, starts_move=starts_move), num_forward=1.5)
    return visible_batch_example(influence(0.0, region=Region.OTHER_EXAMPLE), batch)


def pack(change: float, *, starts_move: bool = True, has_position_ids: bool = False) -> Answer:
    return pack_changes_output(
        Packed(
            reading=reading(Variant.PACKED, change, starts_move=starts_move), source="seq_idx", document=1,
            has_position_ids=has_position_ids, num_forward=0.75,
        )
    )  # fmt: skip


def attention(change: float, *, outvoted: bool = False, own_mask: bool = False) -> Answer:
    return attention_implementations_differ(
        OtherAttention(
            reading=reading(Variant.ATTENTION, change), used="ours", other="eager and sdpa", outvoted=outvoted, own_mask=own_mask,
            num_forward=0.5,
        )
    )  # fmt: skip


def mask(change: float, *, has_mask: bool = False, used_by: str = "") -> Answer:
    variant = Variant.NO_MASK if has_mask else Variant.MASK
    one = reading(variant, change, used_by=used_by)
    return absent_mask_changes_output(OtherMask(reading=one, has_mask=has_mask, generates=True, num_forward=0.5))


def cache(change: float, *, is_default: bool = True, used_by: str = "", starts_move: bool = False) -> Answer:
    one = reading(Variant.CACHED, change, used_by=used_by, starts_move=starts_move)
    return cache_changes_output(Cached(reading=one, num_prompt=5, is_default=is_default, num_forward=0.5))


@pytest.mark.parametrize(
    ("said", "severity", "words"),
    [
        (place(0.1), Severity.ERROR, "where it stands in the batch"),
        (place(5e-4), Severity.WARNING, "where it stands in the batch"),
        (place(0.1, starts_move=False), Severity.NOTE, "where it stands in the batch"),
        (pack(0.1), Severity.WARNING, "Pass position_ids"),
        (pack(0.1, has_position_ids=True), Severity.WARNING, "start again with every document"),
        (pack(0.1, starts_move=False), Severity.NOTE, "chunks or routing"),
        (attention(0.1, outvoted=True), Severity.WARNING, "is not what eager and sdpa agree on"),
        (attention(0.1), Severity.NOTE, "would be another model"),
        (attention(0.1, own_mask=True), Severity.NOTE, "a mask of its own"),
        (mask(0.1), Severity.NOTE, "would break in generation, which passes an attention mask"),
        (mask(0.1, used_by="training"), Severity.WARNING, "training generates"),
        (mask(0.1, has_mask=True), Severity.NOTE, "would break if the attention mask were left out"),
        (cache(0.1), Severity.NOTE, "would break in generation:"),
        (cache(0.1, starts_move=True), Severity.NOTE, "before anything comes from the cache"),
        (cache(0.1, used_by="training"), Severity.WARNING, "training generates"),
        (cache(0.1, is_default=False), Severity.NOTE, "not its default"),
    ],
)
def test_severity_by_use(said: Answer, severity: Severity, words: str) -> None:
    assert isinstance(said, Found)
    assert said.findings[0].severity is severity
    assert words in said.findings[0].message
    assert (said.findings[0].where.example, said.findings[0].where.position) == (1, 4)


@pytest.mark.parametrize("ask", [place, pack, attention, mask, cache])
def test_at_the_tolerance_it_is_clear_and_says_what_it_would_have_seen(ask: Any) -> None:
    said = ask(TOLERANCE)
    assert isinstance(said, Clear)
    assert said.power is not None
    if ask is not place:
        assert said.power.smallest_detectable == TOLERANCE
