"""Accelerate: a tracker for `Accelerator(log_with=GradiometerTracker(project=...))`.

`tracker.watch(accelerator, model, optimizer)`, on every rank and after `accelerator.prepare`, captures the optimizer's
steps and takes the loss that is given to `accelerator.backward`, before Accelerate divides it by the number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradiometer.integrations.missing import missing
from gradiometer.integrations.session import Session, watch_options
from gradiometer.integrations.substitute import Substitute
from gradiometer.run import Run

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise missing("accelerate", "accelerate", error) from error


class GradiometerTracker(GeneralTracker):
    """Reports what `accelerator.log` logs, and what `watch` captures.

    The run is opened by `accelerator.init_trackers`, or by `watch` if that comes first or on another rank; it ends with
    `accelerator.end_training()`.

    Args:
        run: the run to report to; None: the one that `gradiometer.init` opened before, else a new one.
        options: arguments of `gradiometer.init` for a new run; Accelerate does not tell the name of the project.

    Raises:
        TypeError, ValueError: see `Session`.
    """

    name = "gradiometer"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run: Run | None = None, **options: Any) -> None:
        super().__init__()
        self._session = Session(run, options)
        self._loss_name = ""
        self._backward_of: Substitute | None = None
        self._optimizers: list[Any] = []

    @property
    def tracker(self) -> Run:
        """The run."""
        run = self._session.run
        return run if run is not None and self._session.is_open else self._session.open(config={})

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The config of `accelerator.init_trackers`."""
        if not self._session.is_open:
            self._session.open(config=values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See `Run.log`; without `step`, values belong to the step under way, else to the last one."""
        self.tracker.log(values, step=step)

    def watch(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        *,
        loss: str | None = "train/loss",
        **options: Any,
    ) -> None:
        """Capture the steps of a prepared optimizer.

        Args:
            accelerator: the one that prepared model and optimizer.
            model, optimizer: as `accelerator.prepare` returned them.
            loss: name of the mean of the losses that were given to `accelerator.backward` for one step; None: do not
                take it. See `Run.log_microbatch` for what comes with it.
            options: more arguments of `Run.watch`.

        Raises:
            TypeError: `Run.watch` has no such argument.
        """
        run = self.tracker
        run.watch(model, optimizer, scaler=accelerator.scaler, **watch_options(options))
        self._optimizers.append(optimizer)
        if loss is not None and self._backward_of is None:
            self._loss_name = loss
            self._backward_of = Substitute(accelerator, "backward", self._backward)

    def finish(self) -> None:
        """The end of the training: leave everything as it was, and end the run if it was opened here."""
        if self._backward_of is not None:
            self._backward_of.remove()
            self._backward_of = None
        run = self._session.run
        while self._optimizers:
            optimizer = self._optimizers.pop()
            if run is not None:
                run.unwatch(optimizer)
        self._session.finish()

    # Hot path: training thread, once per micro-batch. Must read no value.
    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._session.run
        if run is not None:
            # Not yet divided, and with its graph, so that the checks can see by what it gets multiplied.
            run.log_microbatch({self._loss_name: loss})
        return original(loss, *args, **kwargs)
