"""Four ranks, real processes and collectives: what they record apart merges to the gradient of a plain model."""

from __future__ import annotations

import math

import pytest

from gradiometer.capture.statistics import SUM_SQUARES
from tests.integration.modes import four_rank_modes, mode_checks
from tests.integration.modes.ddp_modes import CLIP
from tests.integration.modes.mode_server import check_server, shown

BY_NAME = {mode.name: mode for mode in four_rank_modes.MODES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all modes of four ranks were played, in one set of processes."""
    folder = tmp_path_factory.mktemp("modes4")
    mode_checks.launch(four_rank_modes.__name__, four_rank_modes.MODES, folder)
    return folder


@pytest.mark.parametrize("mode", four_rank_modes.MODES, ids=lambda mode: mode.name)
def test_mode(mode, folder):
    result = mode_checks.played(mode, folder)
    mode_checks.check(result)
    check_server(result)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.endswith(", clipped")])
def test_R17_the_norm_of_clipping_is_one_value(name, folder):
    result = mode_checks.played(BY_NAME[name], folder)
    for step, rows in result.expected.items():
        norm = math.sqrt(sum(row[SUM_SQUARES] for row in rows.values() if row is not None))
        assert norm > CLIP
        for out in result.out:
            assert out.points["grad/clip_norm"][step] == pytest.approx(norm, rel=1e-5)


def test_R29_four_ranks_that_say_the_same_are_averaged_not_summed(folder):
    out = shown(mode_checks.played(BY_NAME["FSDP2 and tensor parallelism 2x2"], folder))
    for step in (1, 2, 3):
        same = four_rank_modes.SAME_LOSS
        assert out.values[step]["train/same"] == same
        assert out.by_rank[step]["train/same"] == dict.fromkeys(range(4), same)


def test_clipping_that_raises_in_torch_leaves_the_statistics_right(folder):
    """The mode itself holds the statistics against the plain model's."""
    assert mode_checks.played(BY_NAME["FSDP2 and tensor parallelism 2x2"], folder).notes["clip"]
