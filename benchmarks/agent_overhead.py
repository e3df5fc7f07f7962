"""What watching every gradient in every step costs: the agent at each tier beside other tools, in one process.

    python benchmarks/agent_overhead.py [--models gpt2-64 gpt2-512 resnet50 small layers200] [--rounds 5] [--steps 2] [--ours]

In every round each tool is attached, settles, is timed for `--steps` steps and is taken off; the order is shuffled
anew. To settle takes one step, or several of the optimizer alone for a tool that does more in its early steps. The machine may be busy, so only CPU time counts (one torch thread), and only as ratios:
 - *inside*: CPU time of the tool's code on the training thread, as a share of the bare step's CPU time;
 - *floor*: the same as a multiple of reading every gradient once from memory (a sum in C, timed in the same rounds);
 - *step*: CPU time of the whole process per step over that of the bare step, which includes the tool's other threads;
 - *others*: CPU time of the tool's child processes per step, as a share of the bare step.
Peers are in `peers.txt`; one that is not installed is reported as absent. Writes
`benchmarks/results/agent_overhead_<model>_<date>.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
import torch
from overhead_models import WORKLOADS, Workload
from overhead_tools import Calls, LightningNorm, Nothing, Ours, TensorBoard, Tool, Wandb
from processes import bytes_in, cpu_s, descendants

from gradiometer.capture import native

PACKAGES = ("torch", "wandb", "tensorboard", "lightning")
FLOOR = "floor: every gradient read once"
BARE = "bare step"

READ_ONCE = """
#include <stdint.h>
void read_once(int64_t num, const float *const *data, const int64_t *lengths, float *out)
{
    enum { LANES = 64 };
    float sum[LANES] = {0};
    for (int64_t g = 0; g < num; g++) {
        int64_t i = 0;
        for (; i + LANES <= lengths[g]; i += LANES)
            for (int k = 0; k < LANES; k++)
                sum[k] += data[g][i + k];
        for (; i < lengths[g]; i++)
            sum[0] += data[g][i];
    }
    for (int k = 0; k < LANES; k++)
        out[k] = sum[k];
}
"""


def reader_of_everything() -> Callable[[list[torch.Tensor]], object]:
    """Reads gradients once, with as little besides as possible."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("this benchmark needs a C compiler for its floor")
    folder = tempfile.mkdtemp(prefix="gradiometer-floor-")
    source, library = Path(folder) / "floor.c", Path(folder) / "floor.so"
    source.write_text(READ_ONCE)
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).read_once
    shutil.rmtree(folder)
    out = (ctypes.c_float * 64)()

    def read(gradients: list[torch.Tensor]) -> None:
        num = len(gradients)
        data = (ctypes.c_void_p * num)(*[gradient.data_ptr() for gradient in gradients])
        lengths = (ctypes.c_int64 * num)(*[gradient.numel() for gradient in gradients])
        function(ctypes.c_int64(num), data, lengths, out)

    return read


def tools_for(workload: Workload, ours_only: bool = False) -> Iterator[tuple[str, Callable[[], Tool]]]:
    """Names and makers."""
    parameters = list(workload.model.parameters())
    yield BARE, lambda: Nothing(parameters)
    yield FLOOR, lambda: Calls(parameters, reader_of_everything())
    yield "gradiometer, norms", lambda: Ours(parameters, statistics="norm")
    yield "gradiometer, full (default)", lambda: Ours(parameters, statistics="full")
    yield "gradiometer, full, no forward probe", lambda: Ours(parameters, statistics="full", forward=False)
    yield (
        "gradiometer, norms, without the native kernel",
        lambda: Ours(parameters, statistics="norm", kernel=False),
    )
    yield (
        "gradiometer, full, without the native kernel",
        lambda: Ours(parameters, statistics="full", kernel=False),
    )
    if ours_only:
        return
    yield "Lightning grad_norm", lambda: LightningNorm(parameters)
    yield "wandb.watch(log_freq=1), offline", lambda: Wandb(parameters)
    yield "TensorBoard histograms and scalars", lambda: TensorBoard(parameters)


def one_step(workload: Workload, tool: Tool) -> None:
    """A training step with the tool's work in it."""
    loss = workload.loss()
    loss.backward()
    tool.after_backward(loss.detach())
    workload.optimizer.step()
    tool.after_step(loss.detach())
    workload.optimizer.zero_grad()


def settle(workload: Workload, tool: Tool) -> None:
    """Steps that are not timed. All but the last are of the optimizer alone, because a whole one may take seconds."""
    if tool.num_early_steps > 1:
        workload.loss().backward()
        for _ in range(tool.num_early_steps - 1):
            # Changed in place, as a backward pass would, so that they count as new.
            torch._foreach_mul_(
                [one.grad for one in workload.model.parameters() if one.grad is not None], 1.0
            )
            workload.optimizer.step()
        workload.optimizer.zero_grad()
    one_step(workload, tool)


def cpu_of_children_s() -> float:
    """CPU seconds of the living child processes."""
    return cpu_s(*descendants(os.getpid()))


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected between measurements: a collection would be booked on whoever happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    workload: Workload, rounds: int, num_steps: int, ours_only: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Samples in seconds per step by tool, and the tools that are absent."""
    tools: dict[str, Tool] = {}
    absent = []
    for name, make in tools_for(workload, ours_only):
        try:
            tools[name] = make()
        except ImportError as error:
            absent.append(f"{name}: {error}")
    samples: dict[str, Any] = {name: {"step": [], "inside": [], "others": []} for name in tools}
    steps_of = dict.fromkeys(tools, 0)
    for _ in range(rounds):
        order = list(tools.items())
        random.shuffle(order)
        for name, tool in order:
            tool.attach(workload.model, workload.optimizer)
            settle(workload, tool)
            with no_collection():
                inside_s, others_s, own_s = tool.inside.spent_s, cpu_of_children_s(), time.process_time()
                for _ in range(num_steps):
                    one_step(workload, tool)
                samples[name]["step"].append((time.process_time() - own_s) / num_steps)
                samples[name]["inside"].append((tool.inside.spent_s - inside_s) / num_steps)
                samples[name]["others"].append((cpu_of_children_s() - others_s) / num_steps)
            steps_of[name] += num_steps + tool.num_early_steps
            tool.detach()
    for name, tool in tools.items():
        samples[name]["bytes"] = bytes_in(tool.folder) / steps_of[name]
        tool.close()
    return samples, absent


def ratios(samples: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per tool."""
    bare_s = statistics.median(samples[BARE]["step"])
    floor_s = statistics.median(samples[FLOOR]["inside"])
    rows = []
    for name, of in samples.items():
        inside_s = statistics.median(of["inside"])
        # Each round's step against the bare step of the same round: what else the machine does changes slowly.
        by_round = [step / bare for step, bare in zip(of["step"], samples[BARE]["step"], strict=True)]
        rows.append(
            {
                "tool": name,
                "inside_ms": round(1e3 * inside_s, 3),
                "inside_share_percent": round(100 * inside_s / bare_s, 2),
                "inside_over_floor": round(inside_s / floor_s, 2),
                "step_ratio": round(statistics.median(by_round), 3),
                "step_ratio_range": [round(min(by_round), 3), round(max(by_round), 3)],
                "others_share_percent": round(100 * statistics.median(of["others"]) / bare_s, 2),
                "kilobytes_per_step": round(of["bytes"] / 1e3, 1),
            }
        )
    return rows


def show(workload: Workload, rows: list[dict[str, Any]], bare_s: float) -> None:
    """A table for people."""
    print(
        f"\n{workload.name}: {workload.num_parameters / 1e6:.1f} M parameters, {workload.num_tensors} tensors, "
        f"bare step {1e3 * bare_s:.0f} ms of CPU"
    )
    print(f"{'':46}{'inside':>9}{'of step':>9}{'x floor':>9}{'step x':>8}{'others':>9}{'kB/step':>9}")
    for row in rows:
        print(
            f"{row['tool']:46}{row['inside_ms']:>7.2f}ms{row['inside_share_percent']:>8.2f}%"
            f"{row['inside_over_floor']:>9.2f}{row['step_ratio']:>8.3f}{row['others_share_percent']:>8.2f}%"
            f"{row['kilobytes_per_step']:>9.1f}"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ours", action="store_true", help="leave the other tools out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    for key in options.models:
        result = result_of(WORKLOADS[key](), options.rounds, options.steps, options.ours)
        kernel = native.load()
        record.save(
            "agent_overhead",
            result,
            name=f"agent_overhead_{key}{'_ours' if options.ours else ''}",
            avx2=kernel is not None and kernel.uses_avx2,
        )


def result_of(workload: Workload, rounds: int, num_steps: int, ours_only: bool = False) -> dict[str, Any]:
    """Measure one model and show it."""
    samples, absent = measure(workload, rounds, num_steps, ours_only)
    bare_s = statistics.median(samples[BARE]["step"])
    rows = ratios(samples)
    show(workload, rows, bare_s)
    print("\n".join(f"absent: {line}" for line in absent), flush=True)
    return {
        "packages": record.versions(PACKAGES),
        "workload": workload.name,
        "parameters": workload.num_parameters,
        "tensors": workload.num_tensors,
        "bare_step_cpu_ms": round(1e3 * bare_s, 1),
        "rounds": rounds,
        "steps_per_round": num_steps,
        "absent": absent,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
