"""What every tool is given, the same numbers for all; standard library only, for any tool's own Python.

Seeded. `scalars` and `runs` are ten metrics in full double precision, the worst case for storage; `layers` are 148
layers of eight statistics in single precision, as results of a training are.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math
import random
from collections.abc import Iterator

NAMES = (
    "train/loss",
    "train/accuracy",
    "train/learning_rate",
    "train/grad_norm",
    "validation/loss",
    "validation/accuracy",
    "time/step_ms",
    "time/tokens_per_s",
    "memory/allocated_gb",
    "optimizer/beta_mean",
)
STATISTICS = ("w_mean", "w_std", "w_norm", "g_mean", "g_std", "g_norm", "g_max", "update_ratio")
LAYERS = tuple(f"layers/{layer:03d}/{statistic}" for layer in range(148) for statistic in STATISTICS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """`runs` one after another in one process, each `steps` long, starting with step 1."""

    name: str
    runs: int
    names: tuple[str, ...]
    steps: int
    single: bool = False

    @property
    def num_values(self) -> int:
        return self.runs * self.steps * len(self.names)

    def rows(self, run: int) -> Iterator[list[float]]:
        """One list of values per step."""
        rng = random.Random(f"{self.name}/{run}")
        base = [rng.uniform(0.1, 3.0) for _ in self.names]
        rate = [rng.uniform(1.0, 8.0) for _ in self.names]
        uniform = rng.random
        for step in range(self.steps):
            # On one scale whatever the number of steps, so that a shorter run begins with the same numbers.
            x = step / 100_000
            row = [b * math.exp(-r * x) + 0.1 * (uniform() - 0.5) for b, r in zip(base, rate, strict=True)]
            yield array.array("f", row).tolist() if self.single else row

    def last_row(self, run: int) -> list[float]:
        """The values of the last step."""
        [last] = collections.deque(self.rows(run), maxlen=1)
        return last


def workload(name: str, steps: int, runs: int = 1) -> Workload:
    """`scalars`, `layers` or `runs`."""
    if name == "layers":
        return Workload(name=name, runs=runs, names=LAYERS, steps=steps, single=True)
    return Workload(name=name, runs=runs, names=NAMES, steps=steps)
