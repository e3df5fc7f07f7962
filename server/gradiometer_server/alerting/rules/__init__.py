"""The rules that ship with the server, one module each."""

from __future__ import annotations

from gradiometer_server.alerting.rules.base import Rule
from gradiometer_server.alerting.rules.check import Check
from gradiometer_server.alerting.rules.dead_layer import DeadLayer
from gradiometer_server.alerting.rules.grad_explosion import GradExplosion
from gradiometer_server.alerting.rules.grad_norm_spike import GradNormSpike
from gradiometer_server.alerting.rules.grad_zero import GradZero
from gradiometer_server.alerting.rules.incomplete_gradient import IncompleteGradient
from gradiometer_server.alerting.rules.loss_divergence import LossDivergence
from gradiometer_server.alerting.rules.loss_rise import LossRise
from gradiometer_server.alerting.rules.loss_spike import LossSpike
from gradiometer_server.alerting.rules.loss_zero import LossZero
from gradiometer_server.alerting.rules.lr_anomaly import LrAnomaly
from gradiometer_server.alerting.rules.never_learned import NeverLearned
from gradiometer_server.alerting.rules.non_finite import NonFinite
from gradiometer_server.alerting.rules.overfit import Overfit
from gradiometer_server.alerting.rules.replica_mismatch import ReplicaMismatchRule
from gradiometer_server.alerting.rules.scaler_collapse import ScalerCollapse
from gradiometer_server.alerting.rules.scaler_skips import ScalerSkips
from gradiometer_server.alerting.rules.user import UserAlert


def make_rules() -> list[Rule]:
    """A fresh set of all rules, with their defaults."""
    return [
        NonFinite(),
        ScalerCollapse(),
        ScalerSkips(),
        GradNormSpike(),
        GradExplosion(),
        GradZero(),
        DeadLayer(),
        LossSpike(),
        LossDivergence(),
        LossRise(),
        LossZero(),
        NeverLearned(),
        Overfit(),
        LrAnomaly(),
        Check(),
        UserAlert(),
        ReplicaMismatchRule(),
        IncompleteGradient(),
    ]
