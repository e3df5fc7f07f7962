"""Which column or key of a foreign log is the step, and what its metrics are called here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gradiometer_server.alerting.rules.scaler import SCALE
from gradiometer_server.domain.names import GRAD_NORM
from gradiometer_server.lint.rows import MAX_NAME_CHARS

STEP_NAMES: Final = (
    "step", "global_step", "train/global_step", "trainer/global_step", "_step", "steps", "iteration", "iter",
    "num_updates", "update",
)  # fmt: skip
"""In the order in which they are looked for; the case does not matter."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]+")
_KNOWN: Final = {
    **dict.fromkeys(("loss", "train/loss"), "train/loss"),
    **dict.fromkeys(
        (
            "grad_norm",
            "train/grad_norm",
            "gradient_norm",
            "grad-norm",
            "gnorm",
            "global_grad_norm",
            GRAD_NORM,
        ),
        GRAD_NORM,
    ),
    **dict.fromkeys(("lr", "learning_rate", "train/lr", "train/learning_rate"), "train/lr"),
    **dict.fromkeys(("loss_scale", "train/loss_scale", "scaler_scale", "grad_scale", SCALE), SCALE),
    **dict.fromkeys(
        (
            "eval_loss",
            "val_loss",
            "valid_loss",
            "validation_loss",
            "eval/loss",
            "val/loss",
            "validation/loss",
        ),
        "eval/loss",
    ),
}


def step_name(names: Iterable[str]) -> str | None:
    """The one of `names` that is the step."""
    by_lower = {name.strip().lower(): name for name in reversed(list(names))}
    return next((by_lower[name] for name in STEP_NAMES if name in by_lower), None)


def metric_name(name: str) -> str:
    """What a metric called `name` elsewhere is called here; printable, and not longer than a name may be."""
    clean = _CONTROL.sub(" ", name).strip()[:MAX_NAME_CHARS]
    return _KNOWN.get(clean.lower(), clean)


def metric_names(names: Sequence[str]) -> list[str]:
    """Names of the metrics, all different: where two would be called the same, the later one keeps a mark.

    An empty result means that the column has no name and is left out.
    """
    taken: set[str] = set()
    found = []
    for name in names:
        metric = metric_name(name)
        if metric in taken:
            metric = _free(_CONTROL.sub(" ", name).strip()[:MAX_NAME_CHARS], taken)
        taken |= {metric} - {""}
        found.append(metric)
    return found


def _free(name: str, taken: set[str]) -> str:
    if not name or name not in taken:
        return name
    return next(other for count in range(2, len(taken) + 3) if (other := f"{name} ({count})") not in taken)
