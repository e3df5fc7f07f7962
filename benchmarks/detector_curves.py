"""Synthetic curves for the comparison of detectors: healthy ones of several kinds, and faults put into them.

A curve is an array of one value per step, with the learning rate that goes with it. Everything is reproducible: the
generators are seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """`values_S` and `lr_S`, both of shape (S,)."""

    values_S: Values
    lr_S: Values


def _cosine(num_steps: int, warmup: int = 200) -> Values:
    step_S = np.arange(num_steps)
    return 3e-4 * np.minimum((step_S + 1) / warmup, 0.55 + 0.45 * np.cos(np.pi * step_S / num_steps))


def _autocorrelated(random: np.random.Generator, num_steps: int, share: float = 0.3) -> Values:
    """Noise of standard deviation 1, each value keeping `share` of the one before."""
    fresh_S = random.standard_normal(num_steps) * np.sqrt(1 - share**2)
    for step in range(1, num_steps):
        fresh_S[step] += share * fresh_S[step - 1]
    return fresh_S


def pretraining(random: np.random.Generator, num_steps: int) -> Curve:
    """A language model: from ln(50,000) to 2.8, noise of 0.04."""
    step_S = np.arange(num_steps)
    level_S = 2.8 + 7.0 * np.exp(-step_S / 120) + 1.0 * np.exp(-step_S / 900)
    return Curve(values_S=level_S + 0.04 * _autocorrelated(random, num_steps), lr_S=_cosine(num_steps))


def noisy_tuning(random: np.random.Generator, num_steps: int) -> Curve:
    """Fine-tuning with small batches: a level of 1, noise of 26 % of it."""
    level_S = 1.0 + 0.4 * np.exp(-np.arange(num_steps) / 300)
    return Curve(values_S=level_S * np.exp(0.26 * random.standard_normal(num_steps)), lr_S=_cosine(num_steps))


def to_zero(random: np.random.Generator, num_steps: int) -> Curve:
    """A task that is learned by heart: the loss falls to 0.001, with noise of 20 % of it."""
    level_S = 0.001 + 2.0 * np.exp(-np.arange(num_steps) / 400)
    return Curve(values_S=level_S * np.exp(0.2 * random.standard_normal(num_steps)), lr_S=_cosine(num_steps))


def restarts(random: np.random.Generator, num_steps: int) -> Curve:
    """Warm restarts of the schedule each 1,000 steps: the loss goes up by 0.25 and comes back."""
    step_S = np.arange(num_steps)
    phase_S = step_S % 1000
    bump_S = np.where(step_S >= 1000, 0.25 * np.exp(-phase_S / 150), 0.0)
    level_S = 2.8 + 7.0 * np.exp(-step_S / 150) + bump_S
    lr_S = 3e-4 * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * phase_S / 1000)))
    return Curve(values_S=level_S + 0.04 * random.standard_normal(num_steps), lr_S=lr_S)


def shift(random: np.random.Generator, num_steps: int) -> Curve:
    """Another mixture of data after half of the steps: 0.25 more from there on."""
    base = pretraining(random, num_steps)
    return Curve(
        values_S=base.values_S + np.where(np.arange(num_steps) >= num_steps // 2, 0.25, 0.0), lr_S=base.lr_S
    )


def norm_pretraining(random: np.random.Generator, num_steps: int) -> Curve:
    """Gradient norm of a language model: falls to 0.4, noise of 15 %."""
    level_S = 0.4 + 6.0 * np.exp(-np.arange(num_steps) / 120)
    return Curve(values_S=level_S * np.exp(0.15 * random.standard_normal(num_steps)), lr_S=_cosine(num_steps))


def norm_tuning(random: np.random.Generator, num_steps: int) -> Curve:
    """Of a fine-tuning with small batches: noise of 40 %."""
    return Curve(values_S=np.exp(0.4 * random.standard_normal(num_steps)), lr_S=_cosine(num_steps))


def norm_reinforcement(random: np.random.Generator, num_steps: int) -> Curve:
    """Of reinforcement learning: heavy tails (Student's t with 4 degrees of freedom in the logarithm)."""
    return Curve(values_S=np.exp(0.25 * random.standard_t(4, num_steps)), lr_S=_cosine(num_steps))


def norm_warmup(random: np.random.Generator, num_steps: int) -> Curve:
    """It climbs with the learning rate over 1,000 steps, from a twentieth."""
    step_S = np.arange(num_steps)
    level_S = 0.05 + 0.95 * np.minimum(step_S / 1000, 1.0)
    return Curve(
        values_S=level_S * np.exp(0.15 * random.standard_normal(num_steps)), lr_S=_cosine(num_steps, 1000)
    )


Maker = Callable[[np.random.Generator, int], Curve]
LOSSES: dict[str, Maker] = {
    "pretraining": pretraining,
    "noisy tuning": noisy_tuning,
    "loss to 0": to_zero,
    "LR restarts": restarts,
    "data shift": shift,
}
NORMS: dict[str, Maker] = {
    "pretraining": norm_pretraining,
    "noisy tuning": norm_tuning,
    "heavy tails (RL)": norm_reinforcement,
    "warm-up": norm_warmup,
}
