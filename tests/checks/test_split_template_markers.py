"""GS309."""

from __future__ import annotations

from dataclasses import replace

from ghoststep.checks.rows.split_template_markers import split_template_markers
from ghoststep.registry import Clear, Found
from tests.checks import builders as b


def test_each_split_marker_is_named_and_whole_ones_are_silent() -> None:
    broken = replace(b.template([3]), split_markers=("<|im_start|>", "<|im_end|>"))
    said = split_template_markers(broken, b.vocabulary())
    assert isinstance(said, Found)
    assert [f.where.token for f in said.findings] == ["<|im_start|>", "<|im_end|>"]
    assert isinstance(split_template_markers(b.template([3]), b.vocabulary()), Clear)
