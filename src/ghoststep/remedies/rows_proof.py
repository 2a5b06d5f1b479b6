"""Prove a row repair on the model itself: logits without the tokens are the same bits, and with them gradients are sane."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghoststep.errors import SubjectError
from ghoststep.numerics import safe_norm, safe_row_norms
from ghoststep.remedies.rows import RowRepair

if TYPE_CHECKING:
    import torch

NUM_EXAMPLES, NUM_POSITIONS = 2, 24
SANE_GRADIENT = 1e3
"""The largest gradient norm of a repaired row, over that of the whole table without these tokens, that counts as cured: the line
below which one row makes everything else shrink a thousandfold."""


def prove_repair(old: Path, new: Path, repair: RowRepair) -> dict[str, Any]:
    """Build both models and compare; what was measured, for the manifest. `SubjectError` refuses the repair.

    Two probe batches of 2 x 24 ids: one of other tokens, whose logits must be bit-identical before and after; one with each
    of up to 16 repaired tokens in the middle, whose gradient norms are taken before and after. Cost: the model in memory, once at
    a time, two forwards and one backward for each. No code of the checkpoint runs.
    """
    plain, fed = _probe_batches(repair)
    before, gradient_before = _look(old, plain, fed, repair)
    after, gradient_after = _look(new, plain, fed, repair)
    import torch

    if before.shape != after.shape or not torch.equal(before, after):
        raise SubjectError(
            "logits of a probe batch without the repaired tokens changed: the repair is refused. Nothing was written."
        )
    share = gradient_after["row"] / max(gradient_after["rest"], 1e-12)
    if not share <= SANE_GRADIENT:
        raise SubjectError(
            f"after the repair a fed row still has {share:.3g} times the gradient of the rest of the table: the rows are not the "
            "(only) cause, and the repair is refused. Nothing was written. Look with `ghoststep explain amplified-rows`."
        )
    return {
        "logits": f"bit-identical on a probe batch of {NUM_EXAMPLES} x {NUM_POSITIONS} other tokens",
        "largest_row_gradient_before": _shown(gradient_before["row"]),
        "largest_row_gradient_after": _shown(gradient_after["row"]),
        "rest_of_table_after": _shown(gradient_after["rest"]),
    }


def _shown(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no NaN or infinity


def _probe_batches(repair: RowRepair) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    taken = {r.table_row for r in repair.rows} | {i for i, _ in repair.left}
    free = torch.tensor([i for i in range(repair.num_rows) if i not in taken][: 1 << 15])
    if len(free) < 2:
        raise SubjectError("no row is left that is neither repaired nor near zero: nothing can be compared")
    generator = torch.Generator().manual_seed(repair.seed)
    pick = torch.randint(len(free), (2, NUM_EXAMPLES, NUM_POSITIONS), generator=generator)
    plain, fed = free[pick[0]], free[pick[1]]
    chosen = [r.table_row for r in repair.rows][: NUM_EXAMPLES * 8]
    for n, table_row in enumerate(chosen):
        fed[n % NUM_EXAMPLES, NUM_POSITIONS // 3 + n // NUM_EXAMPLES] = table_row
    return plain, fed


def _look(folder: Path, plain: torch.Tensor, fed: torch.Tensor, repair: RowRepair) -> tuple[torch.Tensor, dict[str, float]]:
    """Logits of `plain`; the largest gradient norm of a repaired row, and that of the rest of the table, for `fed`."""
    import torch

    model = _build(folder)
    torch.manual_seed(repair.seed)
    with torch.no_grad():
        logits = model(input_ids=plain).logits.clone()
    table = model.get_input_embeddings().weight
    loss = model(input_ids=fed, labels=fed).loss
    (gradient,) = torch.autograd.grad(loss, table)
    norms_R = safe_row_norms(gradient)
    mine = [r.table_row for r in repair.rows if bool((fed == r.table_row).any())]
    row = float(norms_R[mine].max())
    norms_R[mine] = 0.0
    return logits, {"row": row, "rest": safe_norm(norms_R)}


def _build(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SubjectError(
            "transformers is needed to prove on the model that its logits stay (pip install 'ghoststep[hf]'); --no-probe leaves "
            "that proof out and relies on the comparison of bytes"
        ) from error
    kept = {key: os.environ.get(key) for key in ("HF_HUB_OFFLINE",)}
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, use_safetensors=True, dtype="auto"
        )
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise SubjectError(
            f"the model cannot be built ({type(error).__name__}: {said}), so it cannot be proved that its logits stay; --no-probe "
            "leaves that proof out and relies on the comparison of bytes"
        ) from error
    finally:
        for key, value in kept.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
    return model.eval()
