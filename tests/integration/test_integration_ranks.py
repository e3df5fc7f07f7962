"""Two ranks under torchrun with each framework: every rank reports itself, rank 0 what concerns all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import framework_ranks
from tests.integration.framework_runs import marks, norms
from tests.support.paths import PYTHONPATH
from tests.support.recorded import recorded

STEPS = list(range(1, framework_ranks.STEPS + 1))


@pytest.mark.slow
def test_each_rank_reports_itself_and_rank_0_what_concerns_all(tmp_path, spool):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(framework_ranks.__file__)), str(tmp_path)]
    path = os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GRADIOMETER_MODE": "offline"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for framework in ("transformers", "accelerate", "lightning"):
        first, second = (one[framework] for one in said)
        assert first["run_id"] == second["run_id"], framework
        assert first["directory"] != second["directory"]
        assert Path(first["directory"]).parent == Path(second["directory"]).parent, "they are one attempt"
        assert (first["failures"], second["failures"]) == ({}, {})
        assert (first["dropped"], second["dropped"]) == ({}, {})
        assert (first["step"], second["step"]) == (STEPS[-1], STEPS[-1])
        outs = [recorded(Path(one["directory"])) for one in (first, second)]
        # After DDP's reduction and before the clip: equal on both ranks, and not the limit.
        assert norms(outs[0]) == pytest.approx(norms(outs[1]), rel=1e-6)
        assert list(norms(outs[0])) == STEPS
        assert min(norms(outs[0]).values()) > 1
        # Each rank's own loss: they saw other samples.
        losses = [out.points["train/loss"] for out in outs]
        assert [list(one) for one in losses] == [STEPS, STEPS]
        assert losses[0] != losses[1]
        of_all = {"transformers": "train/logged_loss"}.get(framework, "global")
        assert list(outs[0].points[of_all]) == STEPS
        assert of_all not in outs[1].points
        assert marks(outs[1]) == []
        if framework != "accelerate":
            assert marks(outs[0]) == [("checkpoint", STEPS[-1])]
        if framework == "transformers":
            # What the Trainer shows is the mean over the ranks of the losses that the ranks report.
            mean = {step: (losses[0][step] + losses[1][step]) / 2 for step in STEPS}
            assert outs[0].points["train/logged_loss"] == pytest.approx(mean, rel=1e-4)
