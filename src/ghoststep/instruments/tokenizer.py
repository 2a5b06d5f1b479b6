"""The tokenizer of a checkpoint: its sizes, its special ids, what its chat template writes and which ids text can produce."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.base import Missing
from ghoststep.evidence.rows import InputRows
from ghoststep.evidence.tokenizer import Reach, SuspectReach, TemplateTokens, Vocabulary, VocabularyReach
from ghoststep.instruments.chat_template import measure_template, need_templates
from ghoststep.instruments.reachability import can_stand_first, classify
from ghoststep.instruments.tokenizers.base import Tokenizer
from ghoststep.instruments.tokenizers.locate import locate
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUSPECT_NORM_FRACTION = 1e-2
"""Rows below this share of the median norm are looked at."""
SUSPECT_NORM = 1e-3
"""Rows below this effective norm (after the embedding multiplier) are looked at too, whatever the median: the median of a table
that is mostly dead says nothing. A thousand times the norm at which near-zero rows start."""
SUSPECT_COMMON_DISTANCE = 0.2
"""Rows this close to the common vector, where 1 is ordinary: wider than any check's limit for untrained rows."""
MAX_EXAMPLES = 20


@instrument
def loaded_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer behind the other facts of this module, loaded once.

    `CannotLook` without tokenizer files, with broken ones, or where only the checkpoint's own code could read them.
    """
    return locate(checkpoint)


@instrument
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Sizes and special ids. Holes are ids below the largest one that have no token. Cost: one pass over the ids."""
    pieces = tokenizer.pieces
    return Vocabulary(
        file=tokenizer.file,
        kind=tokenizer.kind,
        num_tokens=len(pieces),
        max_id=tokenizer.max_id,
        holes=tuple(i for i in range(tokenizer.max_id + 1) if i not in pieces),
        special_ids=dict(tokenizer.special_ids),
        added=dict(tokenizer.added),
        added_special=frozenset(i for i in tokenizer.added if i in tokenizer.special),
        prefix_ids=tokenizer.prefix_ids,
        bos_is_added=tokenizer.bos_is_added,
    )


@instrument
def template_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer | Missing) -> TemplateTokens:
    """Ids that the chat template writes around messages; see `ghoststep.instruments.chat_template`.

    `DoesNotApply` without a template, even when the tokenizer cannot be read.
    """
    if isinstance(tokenizer, Missing):
        need_templates(checkpoint)
        raise CannotLook(f"there is a chat template, but no tokenizer to encode it: {tokenizer.reason}")
    return measure_template(checkpoint, tokenizer)


@instrument
def suspect_reach(tokenizer: Tokenizer, input_rows: InputRows, template: TemplateTokens | Missing) -> SuspectReach:
    """Reachability of the rows that a check may judge: zero, tiny, non-finite, identical, or close to the common vector.

    Template ids count as TEMPLATE whatever else they are. Without a template fact, none does: a check that depends on it
    asks for `TemplateTokens | Missing` itself. Cost: as `classify`, over the suspects only.
    """
    suspects = suspect_rows(input_rows)
    found = classify(tokenizer, suspects)
    emitted = frozenset() if isinstance(template, Missing) else frozenset(template.ids)
    reach = {i: Reach.TEMPLATE if i in emitted else r for i, r in found.reach.items()}
    prefix = frozenset(tokenizer.prefix_ids)
    bos = {i for role, i in tokenizer.special_ids.items() if role in ("bos", "cls")}
    first = frozenset() if prefix else can_stand_first(tokenizer, suspects)
    return SuspectReach(
        reach=reach,
        tokens={i: tokenizer.pieces[i] for i in suspects if i in tokenizer.pieces},
        causes={i: cause for i, cause in found.causes.items() if reach[i] is Reach.UNREACHABLE},
        starts_document=first | ((prefix | bos) & frozenset(suspects)),
    )


@instrument
def vocabulary_reach(tokenizer: Tokenizer) -> VocabularyReach:
    """Reachability of every id from 0 to the largest, without the chat template. Cost: 1 to 6 s for 150,000 ids."""
    import numpy as np

    found = classify(tokenizer, range(tokenizer.max_id + 1))
    reach_V = np.zeros(tokenizer.max_id + 1, dtype=np.uint8)
    for i, r in found.reach.items():
        reach_V[i] = int(r)
    counts = Counter(found.causes.values())
    rare_first = sorted(found.causes.items(), key=lambda item: (counts[item[1]], item[0]))[:MAX_EXAMPLES]
    examples = tuple((i, tokenizer.pieces[i], cause) for i, cause in rare_first)
    return VocabularyReach(reach_V=reach_V, cause_counts=dict(counts), examples=examples)


def suspect_rows(inputs: InputRows) -> list[int]:
    """The table rows worth asking about, ascending. A check whose option reaches further finds rows that were not asked about
    and must say so (`SuspectReach.reach` has a key for every row that was)."""
    import numpy as np

    rows = inputs.rows
    bad_R: NDArray[np.bool_] = rows.zero_R | rows.nonfinite_R
    with np.errstate(invalid="ignore"):
        bad_R = bad_R | (rows.norms_R < SUSPECT_NORM_FRACTION * rows.median_norm)
        bad_R = bad_R | (rows.norms_R * inputs.multiplier < SUSPECT_NORM)
        bad_R = bad_R | (rows.common_distance_R < SUSPECT_COMMON_DISTANCE)
    bad_R = bad_R.copy()
    for group in rows.identical_groups:
        bad_R[list(group)] = True
    return [int(i) for i in np.flatnonzero(bad_R)]
