"""How fast and how lean the row measurements are, against the fastest thing that touches the same bytes.

    python benchmarks/census_speed.py [--gigabytes 1] [--pairs 15] [--threads 2]
    python benchmarks/census_speed.py --model DIR      # or --built-model: a random checkpoint of 135M parameters

The first form writes a bf16 safetensors table (262144 x 2048 for 1 GB) to a temporary folder, warms the page cache and takes
interleaved pairs: `measure_rows` through the real memory-mapped store, and `numpy.sum` over a uint64 view of the same bytes.
The second form compares against building the model with transformers and taking torch norms, each in a fresh process.
Memory is RssAnon of /proc/self/status (Linux) above its value after the imports: a mapped file is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_DIMS = 2048
ROWS_PER_GB = 262144
CHUNK_ROWS = 8192


def rss_anon_bytes() -> int:
    """Anonymous resident memory of this process; 0 where /proc does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class PeakRss:
    """Samples RssAnon in a thread; `above_start` is the peak less the value at entry."""

    def __enter__(self) -> PeakRss:
        self._stop = threading.Event()
        self.start = self.peak = rss_anon_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, rss_anon_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, rss_anon_bytes())

    @property
    def above_start(self) -> int:
        """Peak growth in bytes."""
        return self.peak - self.start


def write_table(folder: Path, num_rows: int) -> Path:
    """A safetensors checkpoint with one bf16 table of ordinary rows, written in chunks; its config names the sizes."""
    import torch

    num_bytes = num_rows * NUM_DIMS * 2
    header = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [num_rows, NUM_DIMS], "data_offsets": [0, num_bytes]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, num_rows, CHUNK_ROWS):
            rows = torch.randn(min(CHUNK_ROWS, num_rows - first), NUM_DIMS, generator=generator).mul_(0.02)
            file.write(rows.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": num_rows, "hidden_size": NUM_DIMS}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def open_table(folder: Path) -> tuple[Any, Any]:
    """The largest two-dimensional tensor of a checkpoint: its row store and a `Table` for it."""
    from ghoststep.evidence.checkpoint import Table
    from ghoststep.subjects.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(folder))
    tensors = [t for t in checkpoint.stored().tensors.values() if len(t.shape) == 2]
    info = max(tensors, key=lambda t: ("emb" in t.name, t.num_bytes))
    table = Table(tensor=info, role="input", num_rows=info.shape[0], num_dims=info.shape[1], reason="benchmark")
    return checkpoint.rows(info.name), table


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds (all threads) of one call."""
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu_start


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def compare_with_sum(gigabytes: float, pairs: int, threads: int) -> None:
    """Print GB/s, the paired ratio and the peak memory."""
    import numpy as np
    import torch  # noqa: F401 - counted as an import, not as memory of the measurement

    from ghoststep.instruments.tables import measure_rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_table(folder, int(ROWS_PER_GB * gigabytes))
        store, table = open_table(folder)
        words = np.memmap(path, dtype=np.uint8, mode="r")[-table.tensor.num_bytes :].view(np.uint64)
        measure_rows(store, table, num_threads=threads)  # warms the page cache, the maps and torch
        words.sum()
        ours, sums = [], []
        for _ in range(pairs):
            sums.append(seconds(words.sum))
            ours.append(seconds(lambda: measure_rows(store, table, num_threads=threads)))
        gb = table.tensor.num_bytes / 1e9
        ratios = [a[0] / b[0] for a, b in zip(ours, sums, strict=True)]
        low, high = interval(ratios)
        wall, wall_sum = (statistics.median(t[0] for t in times) for times in (ours, sums))
        cpu, cpu_sum = (statistics.median(t[1] for t in times) for times in (ours, sums))
        print(f"table {table.num_rows} x {table.num_dims} bf16, {gb:.2f} GB, {threads} threads, {pairs} interleaved pairs")
        print(f"measure_rows {gb / wall:.1f} GB/s; numpy uint64 sum {gb / wall_sum:.1f} GB/s")
        print(f"ratio {statistics.median(ratios):.2f} (95 % interval of the median {low:.2f} to {high:.2f}); target <= 3")
        print(
            f"CPU seconds: {cpu:.3f} against {cpu_sum:.3f}; our {threads} threads had {cpu / wall:.2f} CPUs (with fewer than "
            f"{threads * 0.8:.1f} the machine was busy and the ratio says little)"
        )
        memory = subprocess.run(
            [sys.executable, __file__, "--child", "ours", "--model", name, "--threads", str(threads)],
            check=True,
            capture_output=True,
            text=True,
        )
        print(f"peak RssAnon above imports {json.loads(memory.stdout)['bytes'] / 1e6:.0f} MB in a fresh process; target <= 300")


def child(kind: str, folder: Path, threads: int) -> None:
    """One measurement in this fresh process: seconds and peak memory after the imports, as JSON."""
    import torch

    if kind == "ours":
        import numpy as np  # noqa: F401

        from ghoststep.instruments.tables import measure_rows

        torch.zeros(1)
        with PeakRss() as memory:
            start = time.perf_counter()
            store, table = open_table(folder)
            norms = measure_rows(store, table, num_threads=threads).norms_R
            spent = time.perf_counter() - start
    else:
        from transformers import AutoModel

        with PeakRss() as memory:
            start = time.perf_counter()
            where, gguf = (folder.parent, folder.name) if folder.suffix == ".gguf" else (folder, None)
            model: Any = AutoModel.from_pretrained(where, gguf_file=gguf, dtype=torch.float32)
            norms = model.get_input_embeddings().weight.detach().norm(dim=1).numpy()
            spent = time.perf_counter() - start
    print(json.dumps({"seconds": spent, "bytes": memory.above_start, "median": float(sorted(norms)[len(norms) // 2])}))


def compare_with_building(folder: Path, repeats: int, threads: int) -> None:
    """Print time and memory of both ways, alternating fresh processes."""
    results: dict[str, list[dict[str, float]]] = {"ours": [], "build": []}
    for _ in range(repeats):
        for kind, runs in results.items():
            command = [sys.executable, __file__, "--child", kind, "--model", str(folder), "--threads", str(threads)]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    ours, build = (
        {key: statistics.median(run[key] for run in results[kind]) for key in ("seconds", "bytes", "median")}
        for kind in ("ours", "build")
    )
    print(f"row measurements {ours['seconds']:.3f} s, {ours['bytes'] / 1e6:.0f} MB; median norm {ours['median']:.4f}")
    print(f"building and norms {build['seconds']:.3f} s, {build['bytes'] / 1e6:.0f} MB; median norm {build['median']:.4f}")
    print(f"ratio: time {build['seconds'] / ours['seconds']:.1f} x, memory {build['bytes'] / max(1, ours['bytes']):.1f} x")
    print("imports are left out of both; the slowest of them, transformers, only the second needs")


def build_model(folder: Path) -> None:
    """A random Llama-shaped checkpoint of 135M parameters in bf16 (30 layers of 576, 49152 tokens, tied)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Read the command line and run one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the written table (1 = 1.07e9 bytes)")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each kind, with --model")
    parser.add_argument("--model", type=Path, help="compare with building this checkpoint folder or GGUF file")
    parser.add_argument("--built-model", action="store_true", help="the same with a random checkpoint made here")
    parser.add_argument("--child", choices=("ours", "build"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.model, options.threads)
    elif options.model:
        compare_with_building(options.model, options.repeats, options.threads)
    elif options.built_model:
        with tempfile.TemporaryDirectory() as name:
            build_model(Path(name))
            compare_with_building(Path(name), options.repeats, options.threads)
    else:
        compare_with_sum(options.gigabytes, options.pairs, options.threads)


if __name__ == "__main__":
    main()
