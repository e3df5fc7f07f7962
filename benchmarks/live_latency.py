"""How long from the end of `optimizer.step()` to the point on the screen: a real training, server and Chromium.

    python benchmarks/live_latency.py [--samples 200] [--chromium PATH]

The trainer is a process of its own that runs the demo's training with the agent and writes the wall time at which
each `optimizer.step()` returned. The page is the run's own page in headless Chromium; a `requestAnimationFrame` loop
notes when a step is first part of the data that Plotly holds for the card of `train/loss`. All clocks are of this
machine. Prints p50 and p99 and writes `benchmarks/results/live_latency_<date>.json`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
from processes import Server, wait_until

METRIC = "train/loss"
WARMUP_STEPS = 20
TIMEOUT_S = 300.0
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

OBSERVER = """
(metric) => {
  const seen = (window.__seenAt = {});
  let last = 0;
  // The last step in the traces that Plotly drew: the page's own account (data-last-step) may run ahead of it.
  const drawn = () => {
    const card = document.querySelector(`[data-metric="${metric}"]`);
    const plot = card && card.querySelector('.js-plotly-plot');
    if (!plot || !plot.data || !Number(card.dataset.lastStep)) return 0;
    let step = 0;
    for (const trace of plot.data) {
      const x = trace.x || [];
      for (let i = x.length - 1; i >= 0 && i > x.length - 4; i--) if (Number.isFinite(x[i])) step = Math.max(step, x[i]);
    }
    return Math.min(step, Number(card.dataset.lastStep));
  };
  const look = () => {
    const step = drawn();
    if (step > last) {
      const now = performance.timeOrigin + performance.now();
      for (let s = last + 1; s <= step; s++) seen[s] = now;
      last = step;
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}
"""
CLOCK_OFFSET = "() => Date.now() - (performance.timeOrigin + performance.now())"


def main() -> int:
    """Run the trainer if told to, else the whole benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200, help="steps to measure (200)")
    parser.add_argument("--chromium", default=None, help="the browser's program")
    parser.add_argument("--train", nargs=3, metavar=("URL", "STEPS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train[0], int(options.train[1]), Path(options.train[2]))
    program = options.chromium or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if program is None:
        print(
            f"no Chromium found under the names {', '.join(CHROMIUM_NAMES)}; give --chromium PATH",
            file=sys.stderr,
        )
        return 2
    result, about_machine = measure(options.samples, program)
    path = record.save("live_latency", result, **about_machine)
    print(
        f"{result['samples']} samples at {result['steps_per_s']} steps/s: p50 {result['p50_ms']} ms, "
        f"p99 {result['p99_ms']} ms, worst {result['max_ms']} ms  ->  benchmarks/results/{path.name}"
    )
    return 0


def train(url: str, steps: int, times: Path) -> int:
    """The trainer process: prints its run id, then one line per step into `times`."""
    import gradiometer as gm
    from gradiometer.demo.data import standard_library_text
    from gradiometer.demo.training import Training, TrainingConfig, leave_a_core_free

    leave_a_core_free()
    training = Training(TrainingConfig(steps=steps), standard_library_text())
    with (
        gm.init(project="benchmark", name="live latency", url=url, mode="online") as run,
        times.open("w") as file,
    ):
        run.watch(training.model, training.optimizer, scaler=training.scaler)
        print(run.id, flush=True)
        for result in training.steps():
            run.log({METRIC: result.loss})
            file.write(f"{result.step} {result.ended_s:.6f}\n")
            file.flush()
    return 0


def measure(samples: int, program: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run everything once; the figures, and the versions of what took part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["GRADIOMETER_SPOOL"] = str(folder / "spool")
        with Server(folder) as server:
            return _measure_with(server.url, samples, program, folder / "times.txt")


def _measure_with(url: str, samples: int, program: str, times: Path) -> tuple[dict[str, Any], dict[str, str]]:
    # The page needs a moment to load; steps before that are not counted.
    steps = samples + 15 * WARMUP_STEPS
    command = [sys.executable, __file__, "--train", url, str(steps), str(times)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        run_id = trainer.stdout.readline().strip()
        if not run_id:
            raise RuntimeError(f"the trainer ended with exit code {trainer.wait()} before it began")
        chromium, seen_ms = _watch_page(f"{url}/runs/{run_id}", samples, program, times)
    finally:
        trainer.terminate()
        trainer.wait()
    about_machine = {"chromium": chromium, **record.versions(["torch"])}
    return _figures(samples, seen_ms, _ended_ms(times)), about_machine


def _watch_page(page_url: str, samples: int, program: str, times: Path) -> tuple[str, dict[int, float]]:
    """Chromium's version, and Unix milliseconds at which each step was first drawn."""
    from playwright.sync_api import sync_playwright

    wait_until(lambda: len(_ended_ms(times)) >= WARMUP_STEPS, "the trainer has done its first steps")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(page_url)
        page.wait_for_selector(f'[data-metric="{METRIC}"][data-last-step]', timeout=60_000)
        page.evaluate(OBSERVER, METRIC)
        page.wait_for_function("() => Object.keys(window.__seenAt).length > 0", timeout=60_000)
        first = len(_ended_ms(times)) + 1
        wanted = first + samples
        page.wait_for_function(f"() => window.__seenAt[{wanted}] !== undefined", timeout=TIMEOUT_S * 1000)
        offset_ms = float(page.evaluate(CLOCK_OFFSET))
        seen = {int(step): at + offset_ms for step, at in page.evaluate("() => window.__seenAt").items()}
        version = browser.version
        browser.close()
    return version, {step: at for step, at in seen.items() if first <= step < wanted}


def _figures(samples: int, seen_ms: dict[int, float], ended_ms: dict[int, float]) -> dict[str, Any]:
    steps = sorted(seen_ms)
    latencies = [seen_ms[step] - ended_ms[step] for step in steps]
    ordered = sorted(latencies)
    spent_s = (ended_ms[steps[-1]] - ended_ms[steps[0]]) / 1000
    return {
        "what": "end of optimizer.step() to the point drawn in headless Chromium",
        "samples": samples,
        "steps_per_s": round((len(steps) - 1) / spent_s, 2),
        "p50_ms": round(statistics.median(ordered), 1),
        "p90_ms": round(record.quantile(ordered, 0.90), 1),
        "p99_ms": round(record.quantile(ordered, 0.99), 1),
        "max_ms": round(ordered[-1], 1),
        "latencies_ms": [round(latency, 1) for latency in latencies],
    }


def _ended_ms(times: Path) -> dict[int, float]:
    if not times.exists():
        return {}
    rows = [line.split() for line in times.read_text().splitlines() if line.count(" ") == 1]
    return {int(step): float(ended_s) * 1000 for step, ended_s in rows}


if __name__ == "__main__":
    raise SystemExit(main())
