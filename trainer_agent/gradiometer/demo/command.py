"""The command line of the demo: starts the server, trains, keeps serving, and ends cleanly at any moment.

Ctrl-C (or SIGTERM) asks the demo to end: the training stops after its current step, the run is closed, the server
stops, and the exit code is 0. A second Ctrl-C does not wait for any of that; the exit code is then 130.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import gradiometer as gm

FAULTS: Final = ("nan", "spike", "scaler", "dead-layer")
DEFAULT_STEPS: Final = 600
DEFAULT_BREAK_STEP: Final = 100
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options = _parse(argv)
    if (problem := _missing_package()) is not None:
        print(f"gradiometer demo: {problem}", file=sys.stderr)
        return EXIT_FAILED
    # Imported after the check, so that a missing torch is one line and no traceback.
    from gradiometer.demo.data import DemoError

    with _stop_on_signals() as stop:
        try:
            return _demo(options, stop)
        except DemoError as error:
            print(f"gradiometer demo: {error}", file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradiometer demo",
        description="Train a small language model on the standard library's source and watch it live.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help=f"optimizer steps ({DEFAULT_STEPS})")
    add("--port", type=int, default=0, help="port of the server (0: any free one)")
    add("--no-browser", action="store_true", help="do not open a browser")
    add("--break", dest="fault", choices=FAULTS, help="put a genuine fault into the training")
    add("--break-at", type=int, metavar="STEP", help=f"first step of the fault ({DEFAULT_BREAK_STEP})")
    add("--database", metavar="URL", help="database of the server (default: your SQLite file)")
    add("--seed", type=int, default=0, help="seed of weights and batches (0)")
    after = parser.add_mutually_exclusive_group()
    after.add_argument(
        "--keep-serving", action="store_true", help="serve after the training until Ctrl-C (default)"
    )
    after.add_argument("--exit", action="store_true", help="end when the training has ended and is delivered")
    options = parser.parse_args(argv)
    if options.fault and options.break_at is None:
        options.break_at = DEFAULT_BREAK_STEP
    if (problem := _usage_problem(options)) is not None:
        parser.error(problem)
    return options


def _usage_problem(options: argparse.Namespace) -> str | None:
    if options.steps < 1:
        return f"--steps is {options.steps}; give at least 1"
    if not 0 <= options.port <= 65535:
        return f"--port is {options.port}; give 0 (any free port) to 65535"
    if options.break_at is None:
        return None
    if not options.fault:
        return f"--break-at {options.break_at} needs --break with one of: {', '.join(FAULTS)}"
    if not 1 <= options.break_at <= options.steps:
        return f"the fault would strike at step {options.break_at}, outside of 1..{options.steps}; change --break-at"
    return None


def _missing_package() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "the demo trains with PyTorch, which is not installed. Run: pip install torch"
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("gradiometer_server") is None:
        return 'the demo starts the server, which is not installed. Run: pip install "gradiometer[server]"'
    return None


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one raises `KeyboardInterrupt`.

    An exception out of the blue could leave the training, the agent or the server half closed; a flag that is looked
    at between two steps cannot.
    """
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _demo(options: argparse.Namespace, stop: threading.Event) -> int:
    from gradiometer.demo.server import ServerProcess

    with ServerProcess(port=options.port, database=options.database, stop=stop) as server:
        url = server.wait_until_listening()
        if url is None:
            return 0
        print(f"Gradiometer is at {url}", flush=True)
        _train(options, url, stop)
        if stop.is_set():
            print("stopping", flush=True)
        elif not options.exit:
            return _keep_serving(server, url, stop)
    return 0


def _keep_serving(server: Any, url: str, stop: threading.Event) -> int:
    print(f"The training is over; its charts stay at {url} until you press Ctrl-C.", flush=True)
    while not stop.wait(0.5):
        if (code := server.exit_code()) is not None:
            print(f"gradiometer demo: the server ended by itself with exit code {code}", file=sys.stderr)
            return EXIT_FAILED
    print("stopping", flush=True)
    return 0


def _train(options: argparse.Namespace, url: str, stop: threading.Event) -> None:
    from gradiometer.demo.data import standard_library_text
    from gradiometer.demo.faults import make_fault
    from gradiometer.demo.training import Progress, Training, TrainingConfig, leave_a_core_free

    leave_a_core_free()
    fault = make_fault(options.fault, options.break_at) if options.fault else None
    text = standard_library_text()
    training = Training(TrainingConfig(steps=options.steps, seed=options.seed), text, fault)
    progress = Progress(options.steps)
    with gm.init(**_run_arguments(options, url), config=training.describe()) as run:
        run.watch(training.model, training.optimizer, scaler=training.scaler)
        _announce(options, url, run.id, fault)
        for result in training.steps():
            run.log({"train/loss": result.loss})
            progress.show(result)
            if stop.is_set():
                break


def _run_arguments(options: argparse.Namespace, url: str) -> dict[str, Any]:
    # The demo is a run of its own, whatever run the environment speaks of.
    for variable in ("GRADIOMETER_RUN_ID", "GRADIOMETER_RESUME"):
        os.environ.pop(variable, None)
    name = f"demo-{options.fault}" if options.fault else "demo"
    return {"project": "demo", "name": name, "mode": "online", "url": url}


def _announce(options: argparse.Namespace, url: str, run_id: str, fault: Any) -> None:
    # The agent itself has printed the run's page by now.
    if fault is not None:
        print(f"At step {fault.step} it breaks: {fault.story}.", flush=True)
    if not options.no_browser and _has_display():
        webbrowser.open(f"{url}/runs/{run_id}")


def _has_display() -> bool:
    """Whether a browser could show a window; without one `webbrowser` may take over the terminal."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
