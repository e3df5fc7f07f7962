"""The rules that other tools publish for losses and gradient norms, rebuilt from their sources' formulas and defaults.

Each takes a curve (S,) and returns which steps fire, bool (S,). A baseline of n values excludes the value itself,
except where the tool's own does not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Values = NDArray[np.float64]
Fired = NDArray[np.bool_]
Detector = Callable[[Values], Fired]


def _over_window(size: int, judge: Callable[[Values, Values], Fired]) -> Detector:
    """A detector that compares each value with the `size` before it; the first `size` are never judged."""

    def detect(values_S: Values) -> Fired:
        fired_S = np.zeros(len(values_S), bool)
        if len(values_S) > size:
            fired_S[size:] = judge(values_S[size:], sliding_window_view(values_S, size)[:-1])
        return fired_S

    return detect


def _times_mean(size: int, factor: float) -> Detector:
    return _over_window(size, lambda now_N, past_NW: now_N > factor * past_NW.mean(axis=1))


def _times_median(size: int, factor: float) -> Detector:
    return _over_window(size, lambda now_N, past_NW: now_N > factor * np.median(past_NW, axis=1))


def _standard(size: int, z: float, *, two_sided: bool = False) -> Detector:
    def judge(now_N: Values, past_NW: Values) -> Fired:
        excess_N = now_N - past_NW.mean(axis=1)
        excess_N = np.abs(excess_N) if two_sided else excess_N
        fired_N: Fired = excess_N > z * past_NW.std(axis=1)
        return fired_N

    return _over_window(size, judge)


def _cusum(values_S: Values) -> Fired:
    """trainscope: two-sided CUSUM on z over the last 200 values, limit 6, allowance 1, reset after an alarm."""
    fired_S = np.zeros(len(values_S), bool)
    past_NW = sliding_window_view(values_S, 200)[:-1]
    z_N = (values_S[200:] - past_NW.mean(axis=1)) / np.maximum(past_NW.std(axis=1), 1e-12)
    up = down = 0.0
    for place, z in enumerate(z_N.tolist()):
        up, down = max(0.0, up + z - 1.0), max(0.0, down - z - 1.0)
        if max(up, down) > 6.0:
            fired_S[200 + place] = True
            up = down = 0.0
    return fired_S


def _for_steps(detector: Detector, count: int) -> Detector:
    """Only where the last `count` steps all fire."""

    def detect(values_S: Values) -> Fired:
        fired_S = detector(values_S)
        held_S = np.zeros(len(values_S), bool)
        held_S[count - 1 :] = sliding_window_view(fired_S, count).all(axis=1)
        return held_S

    return detect


def _times_moving_mean(values_S: Values) -> Fired:
    """PulseGrad: above 20 times an exponential mean over 200 values."""
    fired_S, mean = np.zeros(len(values_S), bool), float(values_S[0])
    for step, value in enumerate(values_S.tolist()):
        fired_S[step] = step >= 100 and value > 20 * mean
        mean += (value - mean) / 200
    return fired_S


def _frozen(values_S: Values) -> Fired:
    """rlwatch: 3 standard deviations from the mean of the first 20 values, which stay the baseline for ever."""
    mean, deviation = values_S[:20].mean(), values_S[:20].std()
    fired_S: Fired = np.abs(values_S - mean) > 3 * deviation
    fired_S[:20] = False
    return fired_S


def _zclip(values_S: Values) -> Fired:
    """ZClip: z above 2.5 of an exponential mean and variance (0.97)."""
    fired_S = np.zeros(len(values_S), bool)
    mean, variance = float(values_S[:25].mean()), float(values_S[:25].var())
    for step, value in enumerate(values_S.tolist()):
        if step < 25:
            continue
        fired_S[step] = value - mean > 2.5 * variance**0.5
        kept = min(value, mean + 2.5 * variance**0.5)
        mean, variance = 0.97 * mean + 0.03 * kept, 0.97 * variance + 0.03 * (kept - mean) ** 2
    return fired_S


LOSS_RULES: dict[str, Detector] = {
    "naive: 2 x median of 50": _times_median(50, 2.0),
    "trainscope CUSUM, h 6, k 1": _cusum,
    "trainscope z 3.5 over 200": _standard(200, 3.5, two_sided=True),
    "PulseGrad above p99 of 1000": _over_window(
        1000, lambda now_N, past_NW: now_N > np.percentile(past_NW, 99, axis=1)
    ),
    "guarftrain 1.5 x mean of 50": _times_mean(50, 1.5),
    "OLMo-core 6 sd over 128": _standard(128, 6.0),
    "Lightning SpikeDetection, rtol 2, 10": _times_mean(10, 3.0),
    "trainpulse 5 x mean of 50": _times_mean(50, 5.0),
    "llm-foundry 2 x mean of 100, for 5": _for_steps(_times_mean(100, 2.0), 5),
    "Megatron 10 x max of 100": _over_window(100, lambda now_N, past_NW: now_N > 10 * past_NW.max(axis=1)),
}
NORM_RULES: dict[str, Detector] = {
    "naive: 10 x median of 50": _times_median(50, 10.0),
    "trainpulse above 100": lambda values_S: values_S > 100,
    "PulseGrad 20 x EMA of 200": _times_moving_mean,
    "rlwatch 3 sd, frozen": _frozen,
    "OLMo-core 6 sd over 128": _standard(128, 6.0),
    "ZClip z 2.5": _zclip,
    "10 x median of 100": _times_median(100, 10.0),
    "5 x median of 100": _times_median(100, 5.0),
}
