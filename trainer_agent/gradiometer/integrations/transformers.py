"""Hugging Face `Trainer`: `Trainer(..., callbacks=[GradiometerCallback()])`.

The loss is the raw one of every micro-batch, taken where `training_step` returns it, before the Trainer's
`logging_nan_inf_filter` replaces what is not finite. The Trainer has already divided it (by the number of micro-batches,
or by the number of tokens of the whole step), so the sum over a step's micro-batches is the step's mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from gradiometer.integrations.losses import LossWindow
from gradiometer.integrations.missing import missing
from gradiometer.integrations.session import Session, watch_options
from gradiometer.integrations.substitute import Substitute
from gradiometer.run import Run

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers[torch]", error) from error

_STATE_KEY: Final = "gradiometer"
_PART: Final = "transformers callback"
_PREFIXES: Final = ("eval", "test", "train")
_TRAINERS_LOSS: Final = "train/logged_loss"


class GradiometerCallback(TrainerCallback):
    """Watches everything that one Trainer trains.

    Every rank has its own and reports its own gradients and losses; what the Trainer logs is reported by rank 0.
    A run that was opened here stays open after the training, for `evaluate`, until the next training, the end of the
    process or `finish`. It fails with the exception that ends the training.

    Args:
        run: the run to report to; None: the one that `gradiometer.init` opened before, else a new one.
        loss: name of the loss; None: do not take it.
        continue_run: whether a training resumed from a checkpoint is a new attempt of the run that wrote it.
        watch: more arguments of `Run.watch`.
        options: arguments of `gradiometer.init` for a new run. Project, name and config come from the training
            arguments and the model's config where they are not given.

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
        self._session = Session(run, options)
        self._loss_name, self._continue_run, self._watch = loss, continue_run, watch_options(watch)
        self._losses = LossWindow()
        self._trainer: Any = None
        self._substitutes: list[Substitute] = []
        self._optimizer: Any = None
        self._offset = 0
        self._evaluates = False

    @property
    def run(self) -> Run | None:
        """The run, from the beginning of the training on."""
        return self._session.run

    def attach(self, trainer: Trainer) -> None:
        """Name the Trainer, for the case that it cannot be found among the callers of `on_train_begin`."""
        self._trainer = trainer

    def finish(self) -> None:
        """End the run if it was opened here, as there is no more to come."""
        self._release()
        self._session.finish()

    # -- what the Trainer calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run and watch model and optimizer; raises only for mistakes in the arguments of the run."""
        self._release()
        saved: Mapping[str, Any] = (state.stateful_callbacks or {}).get(_STATE_KEY) or {}
        run = self._session.open(
            config=_config(args, kwargs.get("model")),
            start_step=state.global_step,
            saved_id=saved.get("run_id") if self._continue_run else None,
            project=_project(args),
            name=state.trial_name or getattr(args, "run_name", None),
        )
        self._offset = run.step - state.global_step
        self._guarded(self._begin, state, kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients of a step are complete, and so is its loss."""
        self._guarded(self._log_loss, state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The Trainer logs; its numbers are those of all ranks, so that one rank tells them."""
        if state.is_world_process_zero and logs:
            self._guarded(self._log, logs, state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch of an evaluation: the first one tells that it has begun."""
        if not self._evaluates:
            self._evaluates = True
            self._mark("evaluation", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation is over; its numbers came through `on_log`."""
        self._evaluates = False

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """A prediction is over; its numbers do not come through `on_log`."""
        self._evaluates = False
        if state.is_world_process_zero and metrics:
            self._guarded(self._log, metrics, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written."""
        self._mark("checkpoint", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave model, optimizer and Trainer as they were."""
        self._release()

    # -- what is done then ---------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        if self._session.run is not None:
            self._session.guard.tolerate(_PART, function, *args)

    def _begin(self, state: Any, objects: Mapping[str, Any]) -> None:
        run = self._session.run
        assert run is not None
        if run.id:
            # Part of every checkpoint from now on. Not as an `ExportableState`: those are replaced on loading.
            state.stateful_callbacks[_STATE_KEY] = {"args": {}, "attributes": {}, "run_id": run.id}
        model, optimizer = objects["model"], objects["optimizer"]
        run.watch(model, optimizer, scaler=getattr(optimizer, "scaler", None), **self._watch)
        self._optimizer = optimizer
        trainer = self._trainer or _calling_trainer(self)
        if trainer is None:
            self._session.unavailable(
                self._loss_name or "train/loss",
                "no Trainer was found that calls GradiometerCallback: give it with callback.attach(trainer)",
            )
            return
        self._losses = LossWindow()
        self._substitutes.append(Substitute(trainer, "training_step", self._training_step))
        if callable(getattr(trainer, "_run_epoch", None)):
            # Private, so it may be missing: then an exception is seen where it leaves the process.
            self._substitutes.append(Substitute(trainer, "_run_epoch", self._run_epoch))

    # Hot path: training thread, once per micro-batch.
    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.run is not None:
            self.run.record_batch(
                kwargs["inputs"] if "inputs" in kwargs else args[1] if len(args) > 1 else None
            )
        loss = original(*args, **kwargs)
        self._guarded(self._losses.add, loss)
        return loss

    def _run_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self._release()
            self._session.fail(error)
            raise

    def _log_loss(self, step: int) -> None:
        # A sum: the Trainer has divided already.
        loss = self._losses.take(mean=False)
        if loss is not None and self._loss_name is not None and self.run is not None:
            self.run.log({self._loss_name: loss}, step=step + self._offset)

    def _log(self, logs: Mapping[str, Any], step: int) -> None:
        if self.run is not None:
            self.run.log({metric_name(key): value for key, value in logs.items()}, step=step + self._offset)

    def _mark(self, name: str, state: Any) -> None:
        if self.run is not None and state.is_world_process_zero:
            self.run.mark(name)

    def _release(self) -> None:
        while self._substitutes:
            self._substitutes.pop().remove()
        if self._optimizer is not None and self.run is not None:
            self.run.unwatch(self._optimizer)
        self._optimizer = None


def metric_name(key: str) -> str:
    """The metric for a key of the Trainer's logs.

    `eval_loss` is eval/loss, `test_loss` is test/loss, `grad_norm` is train/grad_norm, and the training's totals,
    `train_runtime` and so on, are train/train_runtime, so that they do not meet the numbers of a step. `loss`, the
    mean since the last log with everything left out that is not finite, is train/logged_loss.
    """
    if key == "loss":
        return _TRAINERS_LOSS
    prefix, _, rest = key.partition("_")
    if rest and prefix in _PREFIXES and prefix != "train":
        return f"{prefix}/{rest}"
    return key if "/" in key else f"train/{key}"


def _calling_trainer(callback: TrainerCallback) -> Any:
    """The Trainer that is calling `callback`: callbacks are told everything but that."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
                return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _project(args: Any) -> str | None:
    # "huggingface" is the default of the training arguments, which says nothing.
    project = getattr(args, "project", None)
    return None if project == "huggingface" else project


def _config(args: Any, model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"training": args.to_dict()}
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        found["model"] = config.to_dict()
    return found
