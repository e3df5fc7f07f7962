"""The Triton kernel: right in Triton's interpreter on a CPU, and it compiles for real GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton has wheels for Linux on x86 alone"
)


def run(*command, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_its_statistics_are_those_of_the_definition():
    program = HERE / "kernel_interpreted.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", program, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 16


def test_it_compiles_for_real_gpus_without_atomics_or_spills(tmp_path):
    done = run(HERE / "kernel_compiles.py", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 9
    for name, target, vector_loads, atomics, spilled_bytes in lines:
        assert (atomics, spilled_bytes) == ("0", "0"), (name, target)
        assert name == "fold_chunks" or int(vector_loads) > 0, "aligned gradients are loaded in wide words"
