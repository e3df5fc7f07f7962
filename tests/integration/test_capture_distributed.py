"""Two ranks under torchrun: they agree on the run, and what they report separately adds up to the full gradient's.

The ways of sharding are in `modes/`; here it matters how the processes were started.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from gradiometer import spool as spool_module
from gradiometer.capture import statistics
from gradiometer.capture.statistics import COUNT, MAX, MIN, NUM_NONFINITE, NUM_ZEROS, SUM, SUM_SQUARES
from tests.integration import capture_ranks
from tests.support.paths import PYTHONPATH
from tests.support.recorded import recorded

WORLD_SIZE = 2


def launch(kind, out):
    """Run the training under torchrun; returns what each rank said about itself."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={WORLD_SIZE}",
    ]
    command += [str(Path(capture_ranks.__file__)), kind, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)], done.stderr


def reference(step):
    model = capture_ranks.make()
    for rank in range(WORLD_SIZE):
        (capture_ranks.loss_of(model, rank, step) / WORLD_SIZE).backward()
    return {name: statistics.exact(p.grad.to(torch.float64).numpy()) for name, p in model.named_parameters()}


def merged(rows):
    """Adds the rows of different shards; rows without a gradient count for nothing."""
    rows = [np.array(row) for row in rows if row[COUNT] > 0]
    total = np.sum(rows, axis=0)
    total[MIN] = min(row[MIN] for row in rows)
    total[MAX] = max(row[MAX] for row in rows)
    return total


def by_shard(outs, name, step):
    """One row per shard key; ranks with equal keys must agree bit for bit, because they are replicas."""
    shards = {}
    for out in outs:
        row = out.layers[name][step]
        key = out.declared[name].shard
        assert shards.setdefault(key, row) == row
    return shards


@pytest.mark.parametrize("kind", ["before", "fsdp2"])
def test_partials_merge_to_the_full_gradient(kind, tmp_path, spool):
    said, stderr = launch(kind, tmp_path)
    assert len({one["run_id"] for one in said}) == 1, "the ranks agree on the run"
    assert len({Path(one["directory"]).parent for one in said}) == 1, "and on the attempt"
    assert stderr.count("gradiometer: run ") == 1, "only rank 0 announces it"
    assert [one["failures"] for one in said] == [{}] * WORLD_SIZE
    assert [one["dropped"] for one in said] == [{}] * WORLD_SIZE
    assert [one["threads"] for one in said] == [["MainThread"]] * WORLD_SIZE, "finish leaves no thread behind"
    outs = [recorded(Path(one["directory"])) for one in said]
    sources = [spool_module.read_source(Path(one["directory"])).source for one in said]
    assert [(source.rank, source.world_size, source.local_rank) for source in sources] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    sharded = kind == "fsdp2"
    for step in (1, 2):
        expected = reference(step)
        norm = math.sqrt(sum(row[SUM_SQUARES] for row in expected.values()))
        assert set(outs[0].layers) == set(expected)
        for name, row in expected.items():
            shards = by_shard(outs, name, step)
            declared = outs[0].declared[name]
            assert len(shards) == declared.num_shards == (WORLD_SIZE if sharded else 1)
            assert declared.numel == row[COUNT]
            assert math.prod(declared.shape) == declared.numel
            total = merged(shards.values())
            exactly = [COUNT, NUM_ZEROS, NUM_NONFINITE]
            assert total[exactly].tolist() == row[exactly].tolist(), name
            size = math.sqrt(row[SUM_SQUARES] * row[COUNT])
            assert_allclose(total[[SUM, MIN, MAX]], row[[SUM, MIN, MAX]], rtol=1e-4, atol=1e-5 * size)
            assert total[SUM_SQUARES] == pytest.approx(row[SUM_SQUARES], rel=1e-4)
        if step == 2:
            assert norm > capture_ranks.CLIP, "the clip must bite, or the test proves nothing"
            assert outs[0].points["grad/clip_norm"][2] == pytest.approx(norm, rel=1e-4)
    losses = [out.points["train/loss"] for out in outs]
    assert list(losses[0]) == [1, 2]
    assert losses[0] != losses[1]
