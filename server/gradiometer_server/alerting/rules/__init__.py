"""The rules that ship with the server, one module each."""

from __future__ import annotations

from gradiometer_server.alerting.rules.base import Rule
from gradiometer_server.alerting.rules.check import Check
from gradiometer_server.alerting.rules.dead_layer import DeadLayer
from gradiometer_server.alerting.rules.grad_norm_spike import GradNormSpike
from gradiometer_server.alerting.rules.incomplete_gradient import IncompleteGradient
from gradiometer_server.alerting.rules.non_finite import NonFinite
from gradiometer_server.alerting.rules.replica_mismatch import ReplicaMismatchRule
from gradiometer_server.alerting.rules.scaler_collapse import ScalerCollapse
from gradiometer_server.alerting.rules.user import UserAlert


def make_rules() -> list[Rule]:
    """A fresh set of all rules, with their defaults."""
    return [
        NonFinite(),
        ScalerCollapse(),
        GradNormSpike(),
        DeadLayer(),
        Check(),
        UserAlert(),
        ReplicaMismatchRule(),
        IncompleteGradient(),
    ]
