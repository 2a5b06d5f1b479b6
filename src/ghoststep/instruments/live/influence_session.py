"""The passes of one influence measurement in one mode. B examples, T positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ghoststep.errors import CannotLook
from ghoststep.evidence.influence import Region
from ghoststep.instruments.live.influence_plan import (
    FRACTIONS,
    Block,
    Positions,
    choose_block,
    document_stop,
    replacements,
    suggested_block,
)
from ghoststep.instruments.live.influence_probe import Probe
from ghoststep.instruments.live.influence_regions import Regions, add_gradient, add_padding, add_swap, changes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

SWAP_FLOOR = 1e-5
"""Relative swap influence that rounding does not reach in float32 (expert groups of another size: 1e-7, measured)."""

LOW_PRECISION_SWAP_FLOOR = 2e-2
"""The same in bfloat16 and float16."""


@dataclass(slots=True, kw_only=True)
class Session:
    """A probe with what it has seen. `coupled` is None until looked at: "", "continuous" or "discrete"."""

    probe: Probe
    at: Positions
    special: frozenset[int]
    swaps: Regions
    gradients: Regions
    floor: float
    coupled: str | None = None
    seed: int = 0
    encoder_padding: bool = False
    gradient_rows: list[tuple[tuple[int, int], NDArray[np.float64]]] = field(default_factory=list)
    swap_rows: list[tuple[Block, NDArray[np.float64]]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def examples(self) -> list[int]:
        """Examples with at least two real positions."""
        return [b for b in range(self.at.ids.shape[0]) if int(self.at.real[b].sum()) > 1]

    def changed(self, where_BT: NDArray[np.bool_], blocks: Sequence[Block] = ()) -> NDArray[np.float64]:
        """Changes [B, T] after ordinary tokens were put where `where_BT`, one and the same in `blocks` that ask for it. One
        forward."""
        self.seed += 1
        ids_BT = replacements(self.at, where_BT, self.probe.tables, self.special, self.seed)
        for block in blocks:
            if block.alike:
                ids_BT[block.example, block.start : block.stop] = int(ids_BT[block.example, block.start])
        return changes(self.probe.hidden(ids_BT), self.probe.base)

    def swap(self, blocks: list[Block], *, across: bool) -> None:
        """Replace these blocks in one forward and sort the changes."""
        import numpy as np

        if not blocks:
            return
        where_BT = np.zeros(self.at.ids.shape, dtype=bool)
        for block in blocks:
            where_BT[block.example, block.start : block.stop] = True
        change_BT = self.changed(where_BT, blocks)
        add_swap(self.swaps, self.at, change_BT, blocks, across=across)
        self.swap_rows += [(block, change_BT[block.example]) for block in blocks]

    def blocks(self, examples: list[int], probe: int, *, suggested: bool = False) -> list[Block]:
        """One block an example, at another fraction for each and for each probe."""
        found = []
        for i, b in enumerate(examples):
            block = None
            open_BTT = self.probe.attention.open_BTT
            if suggested and open_BTT is not None and open_BTT.shape[0] in (1, self.at.ids.shape[0]):
                block = suggested_block(self.at, b, open_BTT[b if open_BTT.shape[0] > 1 else 0].numpy())
            block = block or choose_block(self.at, b, FRACTIONS[(probe + 3 * i) % len(FRACTIONS)])
            if block is not None:
                found.append(block)
        return found

    def tails(self, examples: list[int], probe: int, *, alike: bool) -> list[Block]:
        """Blocks that reach to the end of their document: whether a discrete choice tips over is chance, so change all there is.
        `alike`: by one token each, because the scores of many different ones even out."""
        return [replace(b, stop=document_stop(self.at, b.example, b.start), alike=alike) for b in self.blocks(examples, probe)]

    def pads(self) -> None:
        """Replace every PAD token (of one example if examples see each other) and read the real positions."""
        import numpy as np

        rows = [b for b in self.examples if self.at.padding[b].any()]
        if not rows:
            return
        rows = rows[:1] if self.coupled else rows
        where_BT = np.zeros(self.at.ids.shape, dtype=bool)
        where_BT[rows] = self.at.padding[rows]
        kept = self.at.padding.copy()
        kept[[b for b in range(len(kept)) if b not in rows]] = False
        add_padding(self.swaps, _with_padding(self.at, kept), self.changed(where_BT))

    def encoder_pads(self, pad_id: int | None) -> None:
        """Replace the PAD tokens of an encoder (by its attention_mask, else the pad id at an end) and read the decoder."""
        import numpy as np
        import torch

        ids = self.probe.encoder_ids
        if ids is None or ids.shape[0] != self.at.ids.shape[0]:
            return
        given = self.probe.call.kwargs.get("attention_mask")
        if isinstance(given, torch.Tensor) and given.shape == ids.shape:
            padding = (given == 0).cpu().numpy()
        else:
            padding = (ids == pad_id).numpy() if pad_id is not None else np.zeros(ids.shape, dtype=bool)
            padding &= np.logical_and.accumulate(padding[:, ::-1], axis=1)[:, ::-1]
        rows = [b for b in self.examples if padding[b].any() and not padding[b].all()]
        if not rows or self.coupled:
            return
        self.seed += 1
        encoder = replace(self.at, ids=ids.numpy(), real=~padding, padding=padding)
        tokens = replacements(encoder, padding, self.probe.encoder_tables, self.special, self.seed)
        change_BT = changes(self.probe.encoder_hidden(tokens), self.probe.base)
        self.encoder_padding = True
        for b in rows:
            source = (b, int(padding[b].nonzero()[0][0]))
            for t in self.at.real[b].nonzero()[0].tolist():
                self.swaps.add(Region.PADDING, float(change_BT[b, t]), source, (b, t))

    def gradient(self, *groups: list[tuple[int, int]]) -> None:
        """One backward from each group of targets, at most one an example in a group; without a gradient only swaps remain."""
        wanted = [targets for targets in groups if targets]
        if not wanted:
            return
        try:
            found = self.probe.gradients(wanted)
        except (RuntimeError, CannotLook, NotImplementedError) as error:
            if len(wanted) > 1:  # a graph that cannot be gone through twice
                for targets in wanted:
                    self.gradient(targets)
            else:
                self.reasons.append(f"no gradient reading: {' '.join(str(error).split())[:160]}")
            return
        for targets, norms in zip(wanted, found, strict=True):
            norm_BT = norms.double().numpy()
            add_gradient(self.gradients, self.at, norm_BT, targets)
            self.gradient_rows += [((b, t), norm_BT[b]) for b, t in targets]

    def targets(self, examples: list[int], probe: int) -> list[tuple[int, int]]:
        """One trained position an example with tokens of its document on both sides where there are such."""
        import numpy as np

        found = []
        for i, b in enumerate(examples):
            block = choose_block(self.at, b, FRACTIONS[(probe + 3 * i + 1) % len(FRACTIONS)])
            if block is not None:
                found.append((b, block.start - 1))
            elif self.at.real[b].any():
                found.append((b, int(np.flatnonzero(self.at.real[b])[-1])))
        return found


def _with_padding(at: Positions, padding: NDArray[np.bool_]) -> Positions:
    return replace(at, padding=padding)


def swap_floor(dtype: torch.dtype) -> float:
    """The swap floor for hidden states computed in this dtype."""
    import torch

    return LOW_PRECISION_SWAP_FLOOR if dtype in (torch.bfloat16, torch.float16) else SWAP_FLOOR
