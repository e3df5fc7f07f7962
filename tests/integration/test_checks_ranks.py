"""The checks under DDP and FSDP, two real ranks: they find what can be proved there, and say what cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import checks_ranks
from tests.support.paths import PYTHONPATH
from tests.support.recorded import recorded

KINDS = ("ddp", "ddp, bucket views", "fsdp2", "fsdp1")
FOUND = {
    "ddp": {"no zero_grad": "missing_zero_grad", "not divided": "accumulation_not_divided"},
    "ddp, bucket views": {"no zero_grad": "missing_zero_grad", "not divided": "accumulation_not_divided"},
    "fsdp2": {"no zero_grad": "missing_zero_grad"},
    "fsdp1": {},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Loop -> what each rank recorded."""
    out = tmp_path_factory.mktemp("checks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(checks_ranks.__file__)), str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "GRADIOMETER_SPOOL": str(out / "spool"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {loop: [recorded(Path(one[loop])) for one in said] for loop in said[0]}


@pytest.mark.parametrize("loop", checks_ranks.LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found(kind, loop, played):
    expected = FOUND[kind].get(loop)
    for out in played[f"{kind}: {loop}"]:
        found = {event.attributes["check"] for event in out.of_kind("check")}
        assert found == ({expected} if expected else set())


def test_what_cannot_be_checked_under_fsdp_is_said(played):
    for out in played["fsdp2: numbers only"]:
        assert "no loss was logged" in out.unavailable()["check/missing_zero_grad"]
    for out in played["fsdp2: divided"]:
        assert "sharded" in out.unavailable()["check/accumulation"]
        assert "check/missing_zero_grad" not in out.unavailable()
    for out in played["fsdp1: divided"]:
        assert "FSDP1" in out.unavailable()["check/missing_zero_grad"]
        assert "FSDP1" in out.unavailable()["check/accumulation"]
