"""Lightning: `Trainer(logger=GradiometerLogger(project=...), callbacks=[GradiometerCallback()])`.

The callback watches the optimizers, takes the loss and marks evaluations and checkpoints, on every rank; the logger
takes hyperparameters and everything that `self.log` logs, on rank 0. Both serve `lightning.pytorch` and
`pytorch_lightning`, whichever was imported before this module.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, Final

from gradiometer import launch
from gradiometer.integrations.losses import LossWindow
from gradiometer.integrations.missing import missing
from gradiometer.integrations.session import Session, watch_options
from gradiometer.run import Run

_NAMESPACES: Final = ("lightning.pytorch", "pytorch_lightning")


def _namespace() -> Any:
    for name in _NAMESPACES:
        if sys.modules.get(name) is not None:
            return sys.modules[name]
    try:
        return importlib.import_module(_NAMESPACES[0])
    except ImportError as error:
        try:
            return importlib.import_module(_NAMESPACES[1])
        except ImportError:
            raise missing("lightning", "lightning", error) from error


_lightning = _namespace()
_Callback: Any = _lightning.Callback
_Logger: Any = importlib.import_module(f"{_lightning.__name__}.loggers").Logger
_rank_zero_only: Any = importlib.import_module(f"{_lightning.__name__}.utilities").rank_zero_only

_log: Final = logging.getLogger(__name__)
_PART: Final = "lightning callback"


class GradiometerLogger(_Logger):
    """Reports hyperparameters and logged metrics under the names that they have in Lightning.

    With the callback, metrics lie on the run's steps (completed steps; several optimizers make one together); alone, on the steps that
    Lightning counts, from 0. The run stays open after `fit`, for `test`, until the end of the process or `finish`.

    Args:
        run: the run to report to; None: the one that `gradiometer.init` opened before, else a new one.
        options: arguments of `gradiometer.init` for a new run. The hyperparameters are added to the config.

    Raises:
        TypeError, ValueError: see `Session`.
    """

    def __init__(self, run: Run | None = None, **options: Any) -> None:
        super().__init__()
        self.session = Session(run, options)
        self._hyperparameters: dict[str, Any] = {}
        self._new_id = launch.new_run_id(time.time_ns() // 1_000_000)
        # Set by the callback: steps are the run's, and this metric is the callback's.
        self.follows_run_steps = False
        self.reserved: str | None = None

    @property
    def name(self) -> str:
        """The project: part of the folder where Lightning writes checkpoints."""
        return str(self.session.options.get("project") or "gradiometer")

    @property
    def version(self) -> str:
        """The id of the run, or what it will be: part of the folder where Lightning writes checkpoints."""
        run = self.session.run
        return run.id if run is not None and run.id else self._new_id

    @property
    def experiment(self) -> Any:
        """The run. Lightning asks before it tells the hyperparameters, so that it is opened at the first use."""
        return self.session.run if self.session.is_open else _Later(self.open)

    def open(self, **more: Any) -> Run:
        """The open run; arguments are those of `Session.open`, for a new one."""
        if self.session.is_open and self.session.run is not None:
            return self.session.run
        config = {**more.pop("config", {}), **self._hyperparameters}
        return self.session.open(config=config, new_id=self._new_id, **more)

    @_rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Add to the config of a run that is not open yet."""
        found = vars(params) if isinstance(params, Namespace) else dict(params)
        if (
            self.session.is_open
            and found.keys() - (self.session.run.config if self.session.run else {}).keys()
        ):
            _log.warning(
                "gradiometer: hyperparameters that come after the first metric are not recorded: %s.",
                ", ".join(sorted(map(str, found)))[:200],
            )
        self._hyperparameters.update(found)

    @_rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Report what `self.log` logged."""
        run = self.open()
        shown = {name: value for name, value in metrics.items() if name != self.reserved}
        run.log(shown, step=run.step if self.follows_run_steps else step)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint was written."""
        if self.session.is_open:
            self.session.mark_once("checkpoint")

    def finalize(self, status: str) -> None:
        """Lightning's end of `fit` or `test`: there may be more to come, unless it failed."""
        if status == "failed":
            self.session.finish(1)

    def finish(self) -> None:
        """End the run if it was opened here, as there is no more to come."""
        self.session.finish()


class _Later:
    """Opens the run when something of it is used."""

    def __init__(self, opens: Callable[[], Run]) -> None:
        self._opens = opens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opens(), name)


class GradiometerCallback(_Callback):
    """Watches every optimizer of a training, in automatic and manual optimization; together they make a step.

    Reports to the `GradiometerLogger` of the Trainer if it has one. Without one, hyperparameters are reported all the
    same, and logged metrics at the end of each validation, test and epoch.

    Args:
        run: the run to report to; None: the one that `gradiometer.init` opened before, else a new one.
        loss: name of the mean of the losses that `training_step` returned for the micro-batches of a step; None: do
            not take it.
        continue_run: whether a training resumed from a checkpoint is a new attempt of the run that wrote it.
        watch: more arguments of `Run.watch`.
        options: arguments of `gradiometer.init` for a new run.

    Raises:
        TypeError, ValueError: see `Session`.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        loss: str | None = "train/loss",
        continue_run: bool = True,
        watch: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._session = Session(run, options)
        self._loss_name, self._continue_run, self._watch = loss, continue_run, watch_options(watch)
        self._logger: GradiometerLogger | None = None
        self._saved_id: str | None = None
        self._losses = LossWindow()
        self._logged_step = 0
        self._optimizers: list[Any] = []
        self._told: dict[str, Any] = {}

    @property
    def run(self) -> Run | None:
        """The run, from the beginning of the training on."""
        return self._session.run

    def finish(self) -> None:
        """End the run if it was opened here, as there is no more to come."""
        self._release()
        self._session.finish()

    # -- what Lightning calls ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the logger; raises `ValueError` if the two were told to use different runs."""
        self._logger = next(
            (logger for logger in trainer.loggers if isinstance(logger, GradiometerLogger)), None
        )
        if self._logger is not None and self._logger.session is not self._session:
            if self._session.is_of_the_user and not self._session.agrees_with(self._logger.session):
                raise ValueError(
                    "GradiometerCallback reports to the run of the GradiometerLogger: give run and options to the logger."
                )
            self._session = self._logger.session

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run and watch the optimizers; raises only for mistakes in the arguments of the run."""
        if not self._session.is_open:
            options: dict[str, Any] = {
                "config": _hyperparameters(trainer, pl_module),
                "start_step": _completed_steps(trainer),
                "saved_id": self._saved_id if self._continue_run else None,
            }
            if self._logger is None:
                self._session.open(**options)
            else:
                self._logger.open(**options)
        self._guarded(self._begin, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins: the flight recorder keeps it, if there is one."""
        if self._session.is_open and self._session.run is not None:
            self._session.run.record_batch(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is over, and perhaps a step."""
        self._guarded(self._take_loss, trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logged metrics of an epoch."""
        self._guarded(self._log_metrics, trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """An evaluation begins."""
        if not trainer.sanity_checking and trainer.is_global_zero:
            self._guarded(self._session.mark_once, "evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Logged metrics of a validation."""
        if not trainer.sanity_checking:
            self._guarded(self._log_metrics, trainer)

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being written."""
        if trainer.is_global_zero:
            self._guarded(self._session.mark_once, "checkpoint")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave model and optimizers as they were."""
        self._guarded(self._log_metrics, trainer)
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training, validation or test failed."""
        self._release()
        self._session.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: which run it belongs to."""
        return {"run_id": self.run.id} if self.run is not None and self.run.id else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""
        self._saved_id = state_dict.get("run_id")

    # -- what is done then ---------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        if self._session.is_open:
            self._session.guard.tolerate(_PART, function, *args)

    def _begin(self, trainer: Any) -> None:
        run = self._session.run
        assert run is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        optimizers: Any = list(trainer.optimizers)
        # The wrapped model, because FSDP knows the parameters of its root only there.
        run.watch(trainer.strategy.model, optimizers, scaler, **self._watch)
        self._optimizers = optimizers
        self._losses = LossWindow()
        self._logged_step = run.step
        if self._logger is not None:
            self._logger.follows_run_steps = True

    # Hot path: training thread, once per micro-batch. Must read no value.
    def _take_loss(self, trainer: Any, module: Any, outputs: Any) -> None:
        run = self._session.run
        assert run is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # In automatic optimization Lightning has divided by this, also in a last window of fewer micro-batches.
        divisor = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self._losses.add(loss, divisor)
        if run.step == self._logged_step:
            return
        self._logged_step = run.step
        mean = self._losses.take(mean=True)
        if mean is not None and self._loss_name is not None:
            run.log({self._loss_name: mean}, step=run.step)
            if self._logger is not None:
                self._logger.reserved = self._loss_name

    def _log_metrics(self, trainer: Any) -> None:
        run = self._session.run
        if run is None or self._logger is not None or not trainer.is_global_zero:
            return
        # What was told before is the same object.
        news = {
            name: value
            for name, value in trainer.callback_metrics.items()
            if self._told.get(name) is not value and name != self._loss_name
        }
        self._told.update(news)
        if news:
            run.log(news, step=run.step)

    def _release(self) -> None:
        run = self._session.run
        while self._optimizers:
            optimizer = self._optimizers.pop()
            if run is not None:
                run.unwatch(optimizer)


def _completed_steps(trainer: Any) -> int:
    # Lightning counts the steps of all optimizers together.
    return int(trainer.global_step) // max(1, len(trainer.optimizers))


def _hyperparameters(trainer: Any, module: Any) -> dict[str, Any]:
    datamodule = getattr(trainer, "datamodule", None)
    found = {**dict(getattr(datamodule, "hparams", None) or {}), **dict(module.hparams)}
    # LightningCLI's own.
    found.pop("_class_path", None)
    return found
