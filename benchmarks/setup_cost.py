"""What `ghoststep.check` costs on a setup, in training steps, passes and memory.

    python benchmarks/setup_cost.py                          # all shapes; minutes, most of them for V = 151936
    python benchmarks/setup_cost.py --shapes 135m --rounds 3
    python benchmarks/setup_cost.py --shapes 49k --no-memory

Time: in one process, a training step (zero_grad, forward, backward, AdamW step), a full check and a `--fast` check take turns;
the ratio is that of the medians, by the clock and by CPU time (one thread, so that the latter is fair on a busy machine).
Passes are counted from outside, by hooks on the model's own blocks and head, in units of the whole batch: a forward of one
example of four counts 0.25. A backward to the inputs alone (parameters ask for no gradient) does half of a backward's work.
Freed memory is kept by the process while time is measured, as an accelerator's allocator keeps it (`--return-memory`: handed back at
once, as glibc does with large blocks; then both sides mostly measure how fast the kernel hands out zeroed pages).
Memory: in a fresh process each, the peak of VmHWM above its value after the imports, and above that of the built setup.
Shapes are random Llama models in float32, tied; four examples, three of them padded on the right.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_EXAMPLES = 4
MAX_STEPS = {"full": 10.0, "fast": 3.0}
MAX_MEMORY = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and the length T of its batch."""

    vocabulary: int
    time: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "135m": Shape(vocabulary=49152, time=64, width=576, inner=1536, layers=30, heads=9, kv_heads=3),
    "49k": Shape(vocabulary=49152, time=1024, width=64, inner=128, layers=2, heads=4, kv_heads=4),
    "152k": Shape(vocabulary=151936, time=1024, width=64, inner=128, layers=2, heads=4, kv_heads=4),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Passes:
    """What an instrument ran, in batches: through the blocks, through the head, and back; optimizer steps; CPU seconds."""

    forward: float = 0.0
    head: float = 0.0
    backward: float = 0.0
    backward_to_inputs: float = 0.0
    optimizer_steps: float = 0.0
    seconds: float = 0.0


class Counter:
    """Counts positions at every block and at the head of one model, for the instrument that runs at the time."""

    def __init__(self, model: Any, optimizer: Any, num_positions: int) -> None:
        self.by_name: dict[str, Passes] = {}
        self.current = "-"
        self._model, self._num_positions = model, num_positions
        blocks = list(model.model.layers)
        self._handles = [b.register_forward_hook(self._block(len(blocks))) for b in blocks]
        self._handles.append(model.lm_head.register_forward_hook(self._head))
        self._handles.append(optimizer.register_step_post_hook(self._stepped))

    @property
    def now(self) -> Passes:
        """The entry of the instrument that runs now."""
        return self.by_name.setdefault(self.current, Passes())

    def _share(self, tensor: Any) -> float:
        return float(tensor.numel() / tensor.shape[-1] / self._num_positions)

    def _block(self, num_blocks: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            share = self._share(hidden) / num_blocks
            self.now.forward += share
            if hidden.requires_grad:
                is_whole = any(p.requires_grad for p in self._model.parameters())
                hidden.register_hook(lambda _: self._backward(share, is_whole))

        return hook

    def _backward(self, share: float, is_whole: bool) -> None:
        if is_whole:
            self.now.backward += share
        else:
            self.now.backward_to_inputs += share

    def _head(self, _: Any, __: Any, output: Any) -> None:
        self.now.head += self._share(output)

    def _stepped(self, *_: Any) -> None:
        self.now.optimizer_steps += 1

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def build(shape: Shape) -> dict[str, Any]:
    """The setup by keywords; the model is in train mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=True,
        max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    ids_BT = torch.randint(5, shape.vocabulary, (NUM_EXAMPLES, shape.time))
    lengths_B = torch.tensor([shape.time, shape.time - 9, shape.time - 20, shape.time - 3])
    real_BT = torch.arange(shape.time) < lengths_B[:, None]
    ids_BT = ids_BT.masked_fill(~real_BT, 0)
    batch = {"input_ids": ids_BT, "attention_mask": real_BT.long(), "labels": ids_BT.masked_fill(~real_BT, -100)}
    return {"model": model, "batch": batch, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4)}


def train(setup: dict[str, Any]) -> None:
    """One training step."""
    setup["optimizer"].zero_grad()
    setup["model"](**setup["batch"]).loss.backward()
    setup["optimizer"].step()


def check(setup: dict[str, Any], kind: str) -> Any:
    """`ghoststep.check` as a user calls it."""
    import ghoststep

    return ghoststep.check(fast=kind == "fast", **setup)


def seconds_of(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall time and CPU time of one call. With one thread the second hardly knows what else the machine does."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def counted(setup: dict[str, Any], kind: str) -> dict[str, Passes]:
    """What each instrument of one check ran and how long it took by itself, largest first."""
    from ghoststep.engine import Case, ask
    from ghoststep.registry import Instrument, load
    from ghoststep.subjects.setup import make_setup

    counter = Counter(setup["model"], setup["optimizer"], setup["batch"]["input_ids"].numel())

    def watched(instrument: Instrument) -> Instrument:
        inner = instrument.function

        @functools.wraps(inner)
        def function(*args: Any) -> Any:
            counter.current = instrument.name
            start = time.process_time()
            try:
                return inner(*args)
            finally:
                counter.now.seconds += time.process_time() - start
                counter.current = "-"

        return Instrument(function)

    registry = load(plugins=False)
    case = Case([make_setup(setup, fast=kind == "fast")], [watched(i) for i in registry.instruments])
    try:
        counter.now.seconds = seconds_of(lambda: [ask(case, c) for c in registry.checks])[1]
    finally:
        counter.remove()
    rest = counter.by_name["-"]
    rest.seconds -= sum(p.seconds for name, p in counter.by_name.items() if name != "-")
    return dict(sorted(counter.by_name.items(), key=lambda item: -item[1].seconds))


def measure_time(name: str, rounds: int, *, with_table: bool) -> None:
    """Steps and checks take turns; prints ratios of medians and the table of passes."""
    setup = build(SHAPES[name])
    train(setup)
    check(setup, "fast")
    found: dict[str, list[tuple[float, float]]] = {"step": [], "full": [], "fast": []}
    for _ in range(rounds):
        for kind in ("fast", "full"):
            found["step"].append(seconds_of(lambda: train(setup)))
            found[kind].append(seconds_of(lambda kind=kind: check(setup, kind)))  # type: ignore[misc]
    found["step"].append(seconds_of(lambda: train(setup)))
    wall = {kind: statistics.median(w for w, _ in values) for kind, values in found.items()}
    cpu = {kind: statistics.median(c for _, c in values) for kind, values in found.items()}
    low, high = min(found["step"])[0], max(found["step"])[0]
    print(
        f"{name}: training step {wall['step']:.2f} s (from {low:.2f} to {high:.2f}, {len(found['step'])} steps; CPU {cpu['step']:.2f})"
    )
    for kind, target in MAX_STEPS.items():
        ratios = f"{wall[kind] / wall['step']:.2f} steps by the clock, {cpu[kind] / cpu['step']:.2f} by CPU time"
        print(f"{name}: {kind} check {ratios} (target {target:g}; seconds: {', '.join(f'{w:.2f}' for w, _ in found[kind])})")
    for kind in MAX_STEPS if with_table else ():
        print_passes(f"{name} {kind}", counted(setup, kind), cpu["step"])


def print_passes(title: str, table: dict[str, Passes], step_seconds: float) -> None:
    """One line an instrument that took a hundredth of a step or ran anything."""
    total = Passes(**{f.name: sum(getattr(p, f.name) for p in table.values()) for f in dataclasses.fields(Passes)})
    heads = ("forwards", "head", "backwards", "to inputs", "opt. steps", "CPU s", "steps")
    print(f"{title:<28}" + "".join(f"{h:>11}" for h in heads))
    for name, p in [*table.items(), ("together", total)]:
        if p.seconds < 0.01 * step_seconds and not p.forward:
            continue
        label = {"-": "(checks and the rest)"}.get(name, name)
        numbers = (p.forward, p.head, p.backward, p.backward_to_inputs, p.optimizer_steps, p.seconds, p.seconds / step_seconds)
        print(f"  {label:<26}" + "".join(f"{n:>11.2f}" for n in numbers))


def peak_bytes() -> int:
    """VmHWM of this process; 0 where /proc does not tell."""
    text = Path("/proc/self/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:")), 0)


def reset_peak() -> int:
    """Start VmHWM anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def one_memory(name: str, what: str) -> None:
    """Child process: prints the peaks of one step, or of one check, above the imports and above the built setup."""
    from ghoststep.registry import load

    setup = build(dataclasses.replace(SHAPES["49k"], vocabulary=64, time=32))
    train(setup)  # imports and thread pools
    load(plugins=False)
    if what != "step":
        check(setup, what)
    del setup
    imports = reset_peak()
    setup = build(SHAPES[name])
    if what.endswith("+state"):
        train(setup)
    built = reset_peak()
    train(setup) if what.startswith("step") else check(setup, what.partition("+")[0])
    peak = peak_bytes()
    print(json.dumps({"above_imports": peak - imports, "above_setup": peak - built}))


def measure_memory(name: str) -> None:
    """Prints the peaks of a step and of both checks, each from a fresh process, and the ratios."""
    peaks = {}
    for what in ("step", "full", "fast"):
        command = [sys.executable, __file__, "--one-memory", name, what]
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=plain)
        peaks[what] = json.loads(done.stdout.splitlines()[-1])
    for what in ("full", "fast"):
        ratios = {k: peaks[what][k] / peaks["step"][k] for k in ("above_imports", "above_setup")}
        print(
            f"{name}: peak memory of a {what} check {peaks[what]['above_imports'] / 1e9:.2f} GB, of a step "
            f"{peaks['step']['above_imports'] / 1e9:.2f} GB: {ratios['above_imports']:.2f} x (target {MAX_MEMORY:g}); above the "
            f"built setup {peaks[what]['above_setup'] / 1e9:.2f} against {peaks['step']['above_setup'] / 1e9:.2f} GB: "
            f"{ratios['above_setup']:.2f} x"
        )


def main() -> None:
    """Reads the arguments; the children are started with `--one-memory`."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="turns of step, fast check, step, full check")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--return-memory", action="store_true", help="do not keep freed memory while time is measured")
    parser.add_argument("--no-table", action="store_true", help="no counted passes")
    parser.add_argument("--one-memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one_memory:
        one_memory(*options.one_memory)
        return
    if not options.return_memory and not options.no_time and "MALLOC_MMAP_MAX_" not in os.environ:
        kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **kept})
    for name in options.shapes:
        if not options.no_time:
            measure_time(name, options.rounds, with_table=not options.no_table)
        if not options.no_memory:
            measure_memory(name)


if __name__ == "__main__":
    main()
