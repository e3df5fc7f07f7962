"""Our alert rules beside those that other tools publish: false alerts on healthy curves, and which faults each sees.

    python benchmarks/detectors.py [--check]

Healthy: 3 seeds x 4,000 steps of each kind; what counts is episodes (firings less than 20 steps apart are one) per
1,000 steps. Faults: 12 seeds, one fault each in the middle of a healthy run; found: fired within 5 steps of a spike, or
within 300 steps of the begin of a drift, where nothing fired in the 300 steps before.

Writes docs/rules.md with the tables and what every rule says of itself. `--check` only tells whether it is up to date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from detector_curves import LOSSES, NORMS, Curve, Maker
from detector_peers import LOSS_RULES, NORM_RULES, Detector, Fired
from rules_document import document

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.alerting.stories import Stories
from gradiometer_server.domain.alerts import Severity, severity_rank
from gradiometer_server.domain.folded import FoldedScalars

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rules.md"
HEALTHY_STEPS, HEALTHY_SEEDS = 4000, 3
FAULT_STEPS, FAULT_AT, FAULT_SEEDS = 2400, 1600, 12
APART_STEPS, FOUND_STEPS, DRIFT_STEPS = 20, 5, 300
LOSS_RULES_OF_OURS = ("loss_spike", "loss_divergence", "loss_rise", "loss_zero", "never_learned")
NORM_RULES_OF_OURS = ("grad_norm_spike", "grad_explosion", "grad_zero")

Fault = Callable[[np.ndarray], np.ndarray]
JUDGED = Callable[[Curve], Mapping[str, Fired]]


def ours(metric: str, rules: tuple[str, ...]) -> JUDGED:
    """Steps at which each of our rules has a breach, through the engine that judges live runs."""

    def judge(curve: Curve) -> dict[str, Fired]:
        fired = {name: np.zeros(len(curve.values_S), bool) for name in _names(rules)}
        engine, stories = AlertEngine.restore([], []), Stories()
        for step, (value, lr) in enumerate(zip(curve.values_S.tolist(), curve.lr_S.tolist(), strict=True)):
            item = FoldedScalars(attempt=1, step=step, time_s=0.0, values={metric: value, "train/lr": lr})
            changed = engine.observe(item)
            stories.take(changed)
            for episode in changed:
                if episode.first.rule in rules and episode.last_step == step:
                    fired[episode.first.rule][step] = True
                    is_warning = severity_rank(episode.severity) >= severity_rank(Severity.WARNING)
                    fired["all of them, warnings and above"][step] |= is_warning
        return fired

    return judge


def _names(rules: tuple[str, ...]) -> tuple[str, ...]:
    return (*rules, "all of them, warnings and above")


def theirs(rules: Mapping[str, Detector]) -> JUDGED:
    return lambda curve: {name: detect(curve.values_S) for name, detect in rules.items()}


def num_episodes(fired_S: Fired) -> int:
    """Firings of which each is at least `APART_STEPS` after the one before."""
    steps = np.nonzero(fired_S)[0]
    return int(len(steps) > 0) + int((np.diff(steps) >= APART_STEPS).sum())


def false_alerts(judged: JUDGED, curves: Mapping[str, Maker]) -> dict[str, dict[str, float]]:
    """Rule -> kind of curve -> episodes per 1,000 healthy steps."""
    found: dict[str, dict[str, float]] = {}
    for kind, make in curves.items():
        for seed in range(HEALTHY_SEEDS):
            curve = make(np.random.default_rng(seed), HEALTHY_STEPS)
            for rule, fired_S in judged(curve).items():
                per_1000 = 1000 * num_episodes(fired_S) / (HEALTHY_STEPS * HEALTHY_SEEDS)
                rates = found.setdefault(rule, dict.fromkeys(curves, 0.0))
                rates[kind] += per_1000
    return found


def detections(
    judged: JUDGED, make: Maker, faults: Mapping[str, tuple[Fault, int]]
) -> dict[str, dict[str, float]]:
    """Rule -> fault -> share of the seeds in which it was seen."""
    found: dict[str, dict[str, float]] = {}
    for name, (inject, within) in faults.items():
        for seed in range(FAULT_SEEDS):
            curve = make(np.random.default_rng(100 + seed), FAULT_STEPS)
            values_S = inject(curve.values_S.copy())
            for rule, fired_S in judged(Curve(values_S=values_S, lr_S=curve.lr_S)).items():
                seen = fired_S[FAULT_AT : FAULT_AT + within].any()
                quiet = not fired_S[FAULT_AT - DRIFT_STEPS : FAULT_AT].any()
                shares = found.setdefault(rule, dict.fromkeys(faults, 0.0))
                shares[name] += float(seen and (quiet or within == FOUND_STEPS)) / FAULT_SEEDS
    return found


def _plus(excess: float) -> Fault:
    def inject(values_S: np.ndarray) -> np.ndarray:
        values_S[FAULT_AT] += excess
        return values_S

    return inject


def _times(factor: float) -> Fault:
    def inject(values_S: np.ndarray) -> np.ndarray:
        values_S[FAULT_AT] *= factor
        return values_S

    return inject


def _drift(per_step: float) -> Fault:
    def inject(values_S: np.ndarray) -> np.ndarray:
        values_S[FAULT_AT:] += per_step * np.arange(len(values_S) - FAULT_AT)
        return values_S

    return inject


def _growth(per_step: float) -> Fault:
    def inject(values_S: np.ndarray) -> np.ndarray:
        values_S[FAULT_AT:] *= np.exp(per_step * np.arange(len(values_S) - FAULT_AT))
        return values_S

    return inject


LOSS_FAULTS: dict[str, tuple[Fault, int]] = {
    "+0.3, one step": (_plus(0.3), FOUND_STEPS),
    "+1.0, one step": (_plus(1.0), FOUND_STEPS),
    "x3, one step": (_times(3.0), FOUND_STEPS),
    "drift of 0.005 per step": (_drift(0.005), DRIFT_STEPS),
}
NORM_FAULTS: dict[str, tuple[Fault, int]] = {
    "x3": (_times(3.0), FOUND_STEPS),
    "x5": (_times(5.0), FOUND_STEPS),
    "x10": (_times(10.0), FOUND_STEPS),
    "x12": (_times(12.0), FOUND_STEPS),
    "growth of 2 % per step": (_growth(0.02), DRIFT_STEPS),
}


def compare(
    ours_judged: JUDGED,
    theirs_judged: JUDGED,
    curves: Mapping[str, Maker],
    faults: Mapping[str, tuple[Fault, int]],
) -> list[str]:
    """The lines of one table, ours first."""
    healthy, faulty = "pretraining", next(iter(curves.values()))
    assert healthy in curves
    lines = [
        f"| rule | {' | '.join(curves)} | {' | '.join(faults)} |",
        f"|---|{'---|' * (len(curves) + len(faults))}",
    ]
    for judged, is_ours in ((ours_judged, True), (theirs_judged, False)):
        rates, shares = false_alerts(judged, curves), detections(judged, faulty, faults)
        for rule in rates:
            name = f"**{rule}**" if is_ours else rule
            cells = [f"{rate:.2g}" for rate in rates[rule].values()]
            cells += [f"{100 * share:.0f} %" for share in shares[rule].values()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The whole document."""
    losses = compare(ours("train/loss", LOSS_RULES_OF_OURS), theirs(LOSS_RULES), LOSSES, LOSS_FAULTS)
    norms = compare(ours("grad/norm", NORM_RULES_OF_OURS), theirs(NORM_RULES), NORMS, NORM_FAULTS)
    return document(losses=losses, norms=norms)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if docs/rules.md is not up to date")
    options = parser.parse_args()
    made = page()
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    kept = PAGE.read_text(encoding="utf-8")
    changes = difflib.unified_diff(kept.splitlines(), made.splitlines(), "docs/rules.md", "now", lineterm="")
    print("\n".join(changes))
    return int(kept != made)


if __name__ == "__main__":
    sys.exit(main())
