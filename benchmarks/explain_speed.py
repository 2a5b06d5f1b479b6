"""`ghoststep explain CODE` against `python -c "import typer, rich"`, the libraries that the command line is built with.

    python benchmarks/explain_speed.py [--pairs 31]

Interleaved pairs of whole processes in one run; medians, and the interval of the pairwise ratios. The physical limit is a bare
`python -c pass`. Also shown: that explaining imports neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "bare python": ["-c", "pass"],
    "import typer, rich": ["-c", "import typer, rich"],
    "explain GS301": ["-m", "ghoststep.cli.main", "explain", "GS301"],
}
HEAVY = """
import sys
sys.argv = ["ghoststep", "explain", "GS301"]
from ghoststep.cli.main import main
main()
print(sorted({"torch", "numpy", "transformers", "msgspec", "typer"} & set(sys.modules)), file=sys.stderr)
"""


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=31)
    pairs = parser.parse_args().pairs
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(pairs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    for name, values in times.items():
        print(f"{name:<20} median {statistics.median(values) * 1e3:6.1f} ms")
    ratios = sorted(a / b for a, b in zip(times["explain GS301"], times["import typer, rich"], strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"ratio explain / import typer, rich: median {quartiles[1]:.2f} (quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}); line 1.3"
    )
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    print(f"imported on the way, of torch, numpy, transformers, msgspec, typer: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
