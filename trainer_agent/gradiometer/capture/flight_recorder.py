"""The flight recorder: when a step is about to put something non-finite into the weights, saves what it came from.

Opt-in, because it does what the rest of the agent never does: it waits for the device once per step (before the update,
to know whether the gradients are finite), and with several ranks it makes one all-reduce of 24 bytes per step on the
CPU, so that all of them save together or none does. A dump holds the batches, the random number generators as they
were at the step's first forward, the scaler, and model and optimizers *before* the update.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import dump, forward, layout, scaling, scripting
from gradiometer.capture.agreement import Agreement
from gradiometer.capture.compiled import is_compiled
from gradiometer.capture.observer import StepScalars
from gradiometer.flight import MAX_BATCHES, FlightDesk
from gradiometer.guard import Guard
from gradiometer.recorder import QUIET_STEPS
from gradiometer.values import is_train_loss

_log: Final = logging.getLogger(__name__)

_FINE, _ASKED, _GRADIENT, _OUTPUT, _LOSS, _BROKEN = range(6)
"""What a rank has to say. The larger wins: of a NaN that the reduction gave to every rank's gradients, the rank is named
whose own model or loss gave it birth."""
_TRIGGERS: Final = {_ASKED: "server", _GRADIENT: "gradient", _OUTPUT: "output", _LOSS: "loss"}
_REASONS: Final = {
    _ASKED: "the server asked for it",
    _GRADIENT: "a gradient is not finite",
    _OUTPUT: "a gradient and the model's output are not finite",
    _LOSS: "the loss is not finite",
}


class _RootHook:
    """A forward pre-hook that a copy or a pickle of the model leaves behind."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    # Hot path: training thread, once per forward pass. Must return None and change nothing.
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._recorder.see_forward(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # As in `forward`: something that takes what a hook takes and returns None, wherever the model is loaded.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, _memo: Any) -> Any:
        return scripting.LeftBehind()


class _OutputHook(_RootHook):
    """The same after the forward pass."""

    __slots__ = ()

    # Hot path: training thread, once per forward pass. Must return None, change nothing and not wait.
    def __call__(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._recorder.see_output(output)


class FlightRecorder:
    """A `StepObserver` of the watch that is the clock. See the module's first lines.

    Args:
        optimizers: whose parameters are looked at, and whose state is saved.
        start_step: optimizer steps completed so far.
        unavailable: told a metric and why it cannot be collected.
    """

    part = "flight recorder"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        desk: FlightDesk,
        *,
        start_step: int,
        unavailable: Callable[[str, str], None],
        guard: Guard,
    ) -> None:
        self._model, self._optimizers, self._desk = model, tuple(optimizers), desk
        self._scaler = scaler if scaling.is_active(scaler) else None
        self._unavailable, self._guard = unavailable, guard
        self._step = start_step
        self._agreement: Agreement | None = None
        self._decided_step: int | None = None
        self._trouble_step: int | None = None
        self._num_dumps = 0
        self._random: dict[str, Any] | None = None
        self._forwards: list[Any] = []
        self._bad_loss = False
        self._extremes: list[torch.Tensor] = []
        self._handles: list[Any] = []
        desk.begin_step = self._begin_step
        if is_compiled(model):
            unavailable(
                self.part,
                "the model is compiled: what its forward is called with is saved only if run.record_batch is called",
            )
        else:
            scripting.hide(self, _RootHook)
            self._handles = [
                model.register_forward_pre_hook(_RootHook(self), with_kwargs=True),
                model.register_forward_hook(_OutputHook(self)),
            ]

    def see_forward(self, args: Any, kwargs: Any) -> None:
        """The model is called: a micro-batch. Tolerant, because a recorder that is off on one rank keeps the others waiting."""
        self._guard.entered_tolerantly(self.part, self._keep_forward, args, kwargs)

    def _keep_forward(self, args: Any, kwargs: Any) -> None:
        self._begin_step()
        if len(self._forwards) < MAX_BATCHES:
            self._forwards.append({"args": args, "kwargs": kwargs})

    def see_output(self, output: Any) -> None:
        """The model has returned: keep the extremes, for the case that the gradients are not finite."""
        self._guard.entered_tolerantly(self.part, self._keep_output, output)

    def _keep_output(self, output: Any) -> None:
        tensor = forward.first_floating(output)
        if tensor is not None and tensor.numel() and len(self._extremes) < 2 * MAX_BATCHES:
            with torch.no_grad():
                self._extremes += torch.aminmax(tensor.detach())

    def _begin_step(self) -> None:
        if self._random is None:
            self._random = dump.random_state()

    def loss_logged(self, name: str, loss: torch.Tensor) -> None:
        """See `LossObserver`. Waits for the device, which the user has allowed."""
        if is_train_loss(name) and not math.isfinite(float(loss.detach())):
            self._bad_loss = True

    def before_read(self) -> None:
        """See `StepObserver`: the gradients are complete and the weights are as they were."""
        step = self._step + 1
        if self._decided_step == step:
            return
        self._decided_step = step
        try:
            self._decide(step)
        except Exception:
            # The guard switches this part off; nobody would let go of what the hooks keep.
            self.close()
            raise

    def _decide(self, step: int) -> None:
        if self._agreement is None:
            self._agreement = Agreement()
        code, rank, together = self._agreement.largest(self._own_word(step), step)
        if code == _BROKEN or not together:
            why = f"rank {rank} cannot tell" if code == _BROKEN else "the ranks are not at the same step"
            raise RuntimeError(f"{why}: the flight recorder cannot save them together")
        if code == _FINE or not self._is_news(code, step) or self._num_dumps >= self._desk.max_dumps:
            return
        self._num_dumps += 1
        self._save(self._agreement, step, code, rank)

    def _own_word(self, step: int) -> int:
        try:
            return self._condition(step)
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one's word, whatever happened here
            _log.warning("gradiometer: the flight recorder failed: %r", error, exc_info=error)
            return _BROKEN

    def _condition(self, step: int) -> int:
        asked, self._desk.asked = self._desk.asked, None
        if self._bad_loss:
            return _LOSS
        # With a scaler such a step is skipped, and that is its normal business.
        if self._scaler is None and not _all_finite(self._parameters()):
            return _GRADIENT if all(bool(torch.isfinite(one)) for one in self._extremes) else _OUTPUT
        if asked is not None and not self._is_known(asked, step):
            return _ASKED
        return _FINE

    def _is_known(self, command: wire.Command, step: int) -> bool:
        """Whether the server asks because of what was saved already; other ranks may have heard of it before."""
        about = step if command.step is None else command.step
        return self._trouble_step is not None and about <= self._trouble_step + QUIET_STEPS

    def _is_news(self, code: int, step: int) -> bool:
        """Trouble that goes on is saved once. The same on all ranks, because all know the same."""
        before, self._trouble_step = self._trouble_step, step
        return code == _ASKED or before is None or step - before > QUIET_STEPS

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def _save(self, agreement: Agreement, step: int, code: int, rank: int) -> None:
        folder = self._desk.folder / f"step-{step:08d}"
        partial = self._desk.folder / f".step-{step:08d}.partial"
        problem = self._attempt(lambda: self._make_room(partial) if agreement.rank == 0 else None)
        if not agreement.all_are(not problem):
            self._failed(step, problem or "another rank could not save")
            return
        left_out: dict[str, str] = {}
        problem = self._attempt(lambda: self._write_own(partial, agreement, left_out))
        if not agreement.all_are(not problem):
            self._failed(step, problem or "another rank could not save (is the folder shared by all ranks?)")
            return
        problem = self._attempt(lambda: self._write_state(partial, agreement, left_out))
        if agreement.rank == 0 and not problem:
            manifest = self._manifest(agreement, step, code, rank, left_out)
            problem = self._attempt(lambda: self._finish(partial, folder, manifest))
        if not agreement.all_are(not problem):
            self._failed(step, problem or "another rank could not save")
            return
        if agreement.rank == 0:
            self._tell(folder, step, code, rank)

    def _attempt(self, work: Callable[[], None]) -> str:
        """Do it; what went wrong in words, or nothing. No rank may leave the others waiting."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  the other ranks wait for this one's word, whatever happened here
            _log.warning("gradiometer: the flight recorder failed: %r", error, exc_info=error)
            return f"{type(error).__name__}: {error}"
        return ""

    def _make_room(self, partial: Path) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        dump.check_space(partial.parent, dump.state_bytes(self._model, self._optimizers))
        partial.mkdir()

    def _write_own(self, partial: Path, agreement: Agreement, left_out: dict[str, str]) -> None:
        batches = self._desk.batches or self._forwards
        own = {
            "batches": dump.plain(list(batches), left_out, "batches"),
            "random": self._random or dump.random_state(),
            "scaler": None
            if self._scaler is None
            else dump.plain(self._scaler.state_dict(), left_out, "scaler"),
        }
        own["left_out"] = dict(left_out)
        torch.save(own, partial / dump.rank_file(agreement.rank))

    def _write_state(self, partial: Path, agreement: Agreement, left_out: dict[str, str]) -> None:
        if agreement.group is None:
            torch.save(dump.local_state(self._model, self._optimizers, left_out), partial / dump.STATE_FILE)
            return
        from torch.distributed.checkpoint.state_dict_saver import save

        state = dump.sharded_state(self._model, self._optimizers)
        save(state, checkpoint_id=partial / dump.STATE_FOLDER, process_group=agreement.group)

    def _manifest(
        self, agreement: Agreement, step: int, code: int, rank: int, left_out: dict[str, str]
    ) -> dump.Manifest:
        batches = self._desk.batches or self._forwards
        return dump.Manifest(
            version=dump.VERSION,
            run_id=self._desk.run_id,
            step=step,
            reason=_REASONS[code],
            trigger=_TRIGGERS[code],
            trigger_rank=rank,
            time=time.time(),
            host=self._desk.host,
            world_size=agreement.world_size,
            batch="recorded" if self._desk.batches else "forward" if self._forwards else "none",
            num_batches=len(batches),
            left_out=left_out,
        )

    def _finish(self, partial: Path, folder: Path, manifest: dump.Manifest) -> None:
        dump.write_manifest(partial, manifest)
        if folder.exists():
            # Of an earlier attempt, which went wrong at the same step: the newest counts.
            folder.rename(folder.with_name(f"{folder.name}-until-{int(manifest.time)}"))
        partial.rename(folder)

    def _tell(self, folder: Path, step: int, code: int, rank: int) -> None:
        _log.warning("gradiometer: flight recorder: saved the state before step %d at %s.", step, folder)
        num_bytes = dump.folder_bytes(folder)
        self._desk.told(step, folder.resolve(), reason=_REASONS[code], num_bytes=num_bytes, rank=rank)

    def _failed(self, step: int, problem: str) -> None:
        self._unavailable(self.part, f"step {step} could not be saved: {problem}"[:1000])

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`: what was kept by reference is let go."""
        self._step = step
        self._forget()
        return ()

    def _forget(self) -> None:
        self._random, self._bad_loss = None, False
        self._forwards, self._extremes, self._desk.batches = [], [], []

    def close(self) -> None:
        """See `StepObserver`."""
        scripting.show(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._desk.begin_step = None
        self._forget()


# Waits for the device: only the flight recorder may call it.
@torch.no_grad()
def _all_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether every element of every local gradient is finite: one multi-tensor pass per device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = layout.local_of(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient._values()
        if gradient.numel() and not gradient.is_meta:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for gradients in groups.values():
        # The largest magnitude is NaN or infinite if any element is, and cannot overflow as a sum of squares would.
        if not bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients, math.inf))).all()):
            return False
    return True
