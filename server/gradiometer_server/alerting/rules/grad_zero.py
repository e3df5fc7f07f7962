"""Rule `grad_zero`: the gradient norm of the whole model is exactly 0, so nothing learns.

Single zeros are legitimate: in reinforcement learning a batch of equal rewards has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedScalars
from gradiometer_server.domain.names import GRAD_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class GradZeroDefaults:
    """Defaults of the rule.

    Attributes:
        after_steps: consecutive reported steps whose norm is exactly 0.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    after_steps: int = 8
    repeat_steps: int = 10
    quiet_steps: int = 20


class _State(ScalarState, kw_only=True):
    last_step: int = -1
    num_zero: int = 0
    since: int = 0


class GradZero(ScalarRule[_State]):
    """See the module's first lines."""

    name = "grad_zero"
    reads = frozenset({GRAD_NORM})

    def __init__(self, defaults: GradZeroDefaults | None = None) -> None:
        self._defaults = defaults or GradZeroDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach when the norm has been 0 for long enough, and each `repeat_steps` while it is."""
        state, defaults = self._state, self._defaults
        norm = item.values.get(GRAD_NORM)
        if norm is None or item.step <= state.last_step:
            return []
        state.last_step = item.step
        if norm != 0.0:
            state.num_zero = 0
            return []
        state.since = item.step if state.num_zero == 0 else state.since
        state.num_zero += 1
        over = state.num_zero - defaults.after_steps
        if over < 0 or over % defaults.repeat_steps:
            return []
        return [
            Breach(
                rule=self.name,
                severity=Severity.ERROR,
                step=item.step,
                time_s=item.time_s,
                metric=GRAD_NORM,
                value=0.0,
                threshold=0.0,
                facts=(f"{GRAD_NORM} has been exactly 0 since step {state.since}", "no layer is learning"),
            )
        ]
