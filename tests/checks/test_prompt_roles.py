"""Roles are laid over targets only where it is measured which token a position predicts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ghoststep.checks.labels.prompt_in_loss import prompt_in_loss
from ghoststep.registry import Clear, Found, Unknown
from tests.checks.label_builders import batch, targets, xray

MASK = 3
PROMPT_FIRST = np.array([[0] * 2 + [1] * 10] * 2)
WORDS = np.arange(10, 58).reshape(2, 24)
LONG_PROMPT_FIRST = np.array([[0] * 2 + [1] * 22] * 2)
CHOSEN = np.array([[t % 3 == 2 for t in range(24)]] * 2)


def masked(chosen: Any) -> tuple[list[list[int]], Any]:
    """(ids with MASK where chosen, the tokens that stood there as targets)."""
    return np.where(chosen, MASK, WORDS).tolist(), np.where(chosen, WORDS, -1)


def test_a_masked_model_that_does_not_say_so_is_unknown() -> None:
    ids, wanted = masked(CHOSEN)
    said = prompt_in_loss(xray(wanted), batch(ids, roles_BT=LONG_PROMPT_FIRST))
    assert isinstance(said, Unknown), said
    assert "neither the tokens of their positions nor the next ones" in said.reason


def test_a_masked_model_that_says_so_is_judged_at_its_own_positions() -> None:
    ids, wanted = masked(CHOSEN)
    assert isinstance(prompt_in_loss(xray(wanted), batch(ids, roles_BT=LONG_PROMPT_FIRST, intent="masked")), Clear)
    prompt = CHOSEN.copy()
    prompt[:, 1] = True
    ids, wanted = masked(prompt)
    said = prompt_in_loss(xray(wanted), batch(ids, roles_BT=LONG_PROMPT_FIRST, intent="masked"))
    assert isinstance(said, Found)
    assert (said.findings[0].where.example, said.findings[0].where.position) == (0, 1)


def test_a_causal_model_is_judged_at_the_next_token() -> None:
    answers = targets(without=[(b, t) for b in range(2) for t in range(2)])
    assert isinstance(prompt_in_loss(xray(answers), batch(roles_BT=PROMPT_FIRST)), Clear)
    assert isinstance(prompt_in_loss(xray(targets()), batch(roles_BT=PROMPT_FIRST)), Found)


def test_too_few_targets_to_measure_are_taken_for_next_tokens() -> None:
    few = targets(without=[(b, t) for b in range(2) for t in range(12) if t not in (1, 2)])
    said = prompt_in_loss(xray(few), batch(roles_BT=PROMPT_FIRST))
    assert isinstance(said, Found)
    assert said.findings[0].where.position == 0  # which predicts the token at 1, a prompt's


def test_positions_without_a_role_are_no_prompt() -> None:
    roles = np.array([[-1] * 2 + [1] * 10] * 2)
    assert isinstance(prompt_in_loss(xray(targets()), batch(roles_BT=roles)), Clear)
