"""Rule `grad_norm_spike`: the gradient norm of one step far outside its own recent noise and level.

Works on log(norm), because gradient norms vary by factors: a step is a spike if it is both 6 robust standard
deviations out and at least 3 times the median of the last 128 finite values. In a comparison of detectors on synthetic
curves this pair of conditions was the only one without a false alert on language-model, fine-tuning and warm-up curves
that still saw every spike of 5 times the level. In logs of real trainings single steps of 3 to 8 times the median come
and go without a trace in the loss, so one alone is an info. The norm is global, pre-clip and unscaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import LEARNING_RATE, MAD_TO_SD, Pace, Schedule, Window
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedLayers, FoldedScalars, FoldedStep
from gradiometer_server.domain.names import GRAD_NORM

_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNormSpikeDefaults:
    """Defaults of the rule.

    Attributes:
        window: finite norms that make the baseline; the value judged is never among them.
        min_history: no alert before so many; `min_history_critical` is enough in a log that begins far from step 0, and for a critical one, because no
            warm-up moves a norm by a factor of 100 within one window.
        cold_values, cold_ratio: in a log that begins far from step 0, so many norms are enough if one is above all of
            them by this ratio and by their whole range.
        z: robust standard deviations of log(norm); the deviation is at least `mad_floor` (5 % noise) times 1.48.
        outlier_factor: how far beyond the run's own largest excess, in log(norm), a norm must be; not asked of a critical
            one. Gradients of reinforcement learning have heavy tails, and each run its own.
        memory_values: after so many norms half of that largest excess is forgotten, `forget_every` norms at a time.
        info_ratio, warning_ratio, error_ratio, critical_ratio: norm over its median.
        again_steps: a second spike within so many reported steps is a warning whatever its ratio.
        top_layers: layers named, by how much their share of norm**2 grew.
        quiet_steps: steps without a spike after which the episode resolves.
    """

    window: int = 128
    min_history: int = 64
    min_history_critical: int = 32
    z: float = 6.0
    mad_floor: float = 0.05
    outlier_factor: float = 1.5
    memory_values: int = 3000
    forget_every: int = 100
    cold_values: int = 3
    cold_ratio: float = 10.0
    info_ratio: float = 3.0
    warning_ratio: float = 8.0
    error_ratio: float = 10.0
    critical_ratio: float = 100.0
    again_steps: int = 5
    top_layers: int = 5
    quiet_steps: int = 20


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    logs: list[float] = []
    """log(norm) of the last finite positive norms, oldest first."""
    pace: Pace = msgspec.field(default_factory=Pace)
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    count: int = 0
    largest: float = 0.0
    """Largest excess over the median, in log(norm), of which a part is forgotten now and then."""
    has_restarted: bool = False
    """Whether its history began anew within the run."""
    since_spike: int = 0
    """Norms since the last spike, that one included; 0: there was none."""
    layers_step: int = -1
    layers: list[str] = []
    """Layers behind the norm of `layers_step`, if that step looked like a spike."""
    spike: _Spike | None = None
    """The last spike, while the layers of its step are still to come."""


class _Spike(msgspec.Struct, kw_only=True):
    step: int
    time_s: float
    value: float
    baseline: float
    severity: str


class GradNormSpike:
    """See the module's first lines."""

    name = "grad_norm_spike"

    def __init__(self, defaults: GradNormSpikeDefaults | None = None) -> None:
        self._defaults = defaults or GradNormSpikeDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()
        self._window = Window(self._defaults.window)

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach for a spike; again with its layers, where they arrive after the norm."""
        if isinstance(item, FoldedLayers):
            return self._take_layers(item, history)
        if isinstance(item, FoldedScalars):
            if self._state.schedule.take(item.step, item.values):
                self._forget()
            if GRAD_NORM in item.values:
                return self._take_norm(item, item.values[GRAD_NORM])
        return []

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return GRAD_NORM in block.names or LEARNING_RATE in block.names

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        if GRAD_NORM in block.names or not self._state.schedule.is_usual(block):
            return False
        self._state.schedule.take_block(block)
        return True

    def dump(self) -> bytes:
        """State as msgpack."""
        self._state.logs = self._window.values
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state, self._window = state, Window(self._defaults.window, state.logs)

    def _forget(self) -> None:
        """A marker: what was usual before it says nothing of what comes."""
        self._window.clear()
        self._state.has_restarted, self._state.since_spike = True, 0

    def _take_norm(self, item: FoldedScalars, norm: float) -> list[Breach]:
        state = self._state
        if item.step <= state.pace.last_step:
            return []
        if state.pace.take(item.step):
            self._forget()
        # A non-finite norm belongs to rule non_finite, a zero to grad_zero; neither may enter the baseline.
        if not math.isfinite(norm) or norm <= 0:
            return []
        bound = self._bound()
        severity = self._severity(norm, bound)
        self._remember(norm, bound)
        baseline = math.exp(self._window.median()) if severity is not None else 0.0
        self._window.push(math.log(norm))
        state.since_spike += state.since_spike > 0
        if severity is None:
            state.spike = None
            return []
        state.since_spike = 1
        state.spike = _Spike(
            step=item.step, time_s=item.time_s, value=norm, baseline=baseline, severity=severity.value
        )
        return [self._breach(state.spike)]

    def _bound(self) -> float:
        """The excess over the median, in log(norm), that is more than this run's usual outliers."""
        return max(math.log(self._defaults.info_ratio), self._defaults.outlier_factor * self._state.largest)

    def _severity(self, norm: float, bound: float) -> Severity | None:
        # Hot path: a usual norm costs one logarithm and one look into a sorted list.
        defaults, count = self._defaults, len(self._window)
        if count < defaults.min_history_critical:
            return self._cold_severity(norm)
        excess = math.log(norm) - self._window.median()
        if excess < min(bound, math.log(defaults.critical_ratio)):
            return None
        deviation = max(self._window.deviation(), MAD_TO_SD * defaults.mad_floor)
        if excess / deviation < defaults.z:
            return None
        midway = self._state.pace.began_midway and not self._state.has_restarted
        return self._tier(excess, enough=midway or count >= defaults.min_history)

    def _remember(self, norm: float, bound: float) -> None:
        """A spike enters as the bound, so that tails that are heavy are learned and one spike is not."""
        state, defaults = self._state, self._defaults
        state.count += 1
        if len(self._window) < defaults.min_history_critical:
            return
        if state.count % defaults.forget_every == 0:
            state.largest *= 0.5 ** (defaults.forget_every / defaults.memory_values)
        state.largest = max(state.largest, min(math.log(norm) - self._window.median(), bound))

    def _cold_severity(self, norm: float) -> Severity | None:
        """Without enough history only what is beyond all of it, and only where no warm-up can be the reason."""
        state, logs = self._state, self._window.values
        if not state.pace.began_midway or state.has_restarted or len(logs) < self._defaults.cold_values:
            return None
        beyond = max(max(logs) - min(logs), math.log(self._defaults.cold_ratio))
        return Severity.ERROR if math.log(norm) - max(logs) >= beyond else None

    def _tier(self, excess: float, *, enough: bool) -> Severity | None:
        defaults, state = self._defaults, self._state
        if excess >= math.log(defaults.critical_ratio):
            return Severity.CRITICAL
        if not enough:
            return None
        if excess >= math.log(defaults.error_ratio):
            return Severity.ERROR
        # During warm-up the norm may climb with the learning rate; only these tiers are confused by it.
        if state.schedule.rising:
            return None
        again = 0 < state.since_spike <= defaults.again_steps
        return Severity.WARNING if again or excess >= math.log(defaults.warning_ratio) else Severity.INFO

    def _take_layers(self, item: FoldedLayers, history: LayerHistory) -> list[Breach]:
        # Hot path: layers of a usual step cost one sum of squares.
        state = self._state
        if item.step < state.layers_step or len(self._window) < self._defaults.min_history_critical:
            return []
        norm_L = item.statistics["norm"]
        usable_L = np.isfinite(norm_L) & ~is_absent(norm_L)
        power_L = np.where(usable_L, norm_L, 0.0)
        total = float(np.sqrt(np.dot(power_L, power_L)))
        state.layers_step, state.layers = item.step, []
        awaited = state.spike is not None and state.spike.step == item.step
        if awaited or (total > 0 and math.log(total) - self._window.median() >= 1.0):
            state.layers = self._top_layers(item, history)
        if not awaited or not state.layers or state.spike is None:
            return []
        return [self._breach(state.spike)]

    def _top_layers(self, item: FoldedLayers, history: LayerHistory) -> list[str]:
        """Names of the layers that added most to norm**2, compared with each layer's own median."""
        norm_L = item.statistics["norm"]
        before_L = history.median(item.layout)
        before_L = np.zeros_like(norm_L) if before_L is None else np.nan_to_num(before_L)
        usable_L = np.isfinite(norm_L) & ~is_absent(norm_L)
        gain_L = np.where(usable_L, np.square(norm_L), 0.0) - np.square(before_L)
        order = np.argsort(-gain_L, kind="stable")[: self._defaults.top_layers]
        least = 0.01 * max(float(gain_L[order[0]]), 0.0) if len(order) else 0.0
        return [item.layout.names[index] for index in order if gain_L[index] > least]

    def _breach(self, spike: _Spike) -> Breach:
        state, defaults = self._state, self._defaults
        layers = tuple(state.layers) if state.layers_step == spike.step else ()
        ratio = number_text(spike.value / spike.baseline)
        facts = [
            f"{GRAD_NORM} is {number_text(spike.value)}, {ratio} times its median {number_text(spike.baseline)}"
        ]
        if layers:
            facts.append(f"{layers[0]} contributes most of the increase")
        return Breach(
            rule=self.name,
            severity=Severity(spike.severity),
            step=spike.step,
            time_s=spike.time_s,
            metric=GRAD_NORM,
            value=spike.value,
            baseline=spike.baseline,
            threshold=spike.baseline * defaults.info_ratio,
            layers=layers,
            num_layers=len(layers),
            origin="growth" if layers else "",
            facts=tuple(facts),
        )
