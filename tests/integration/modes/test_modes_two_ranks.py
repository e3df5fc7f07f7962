"""Two ranks, real processes and collectives: what they record apart merges to the gradient of a plain model."""

from __future__ import annotations

import math

import pytest
import torch

from gradiometer.capture.statistics import SUM_SQUARES
from tests.integration.modes import mode_checks, parallel_modes, two_rank_modes
from tests.integration.modes.ddp_modes import CLIP
from tests.integration.modes.mode_net import make_net
from tests.integration.modes.mode_server import check_server, shown

BY_NAME = {mode.name: mode for mode in two_rank_modes.TABLE}
CLIPPED = [name for name in BY_NAME if name.endswith(", clipped") or name == "FSDP2, CPU offload"]
PARTIAL = "tensor and sequence parallelism"
OWN_NAMES = [
    "DDP",
    "DDP of a compiled model",
    *(name for name in BY_NAME if "tied" not in name and "FSDP" in name),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all modes of two ranks were played, in one set of processes."""
    folder = tmp_path_factory.mktemp("modes2")
    mode_checks.launch(two_rank_modes.__name__, two_rank_modes.MODES, folder)
    return folder


@pytest.fixture(scope="module")
def play(folder):
    """The result of a mode by its name."""
    return lambda name: mode_checks.played(BY_NAME[name], folder)


@pytest.mark.parametrize("mode", two_rank_modes.TABLE, ids=lambda mode: mode.name)
def test_mode(mode, folder):
    result = mode_checks.played(mode, folder)
    mode_checks.check(result)
    if mode.name != PARTIAL:
        check_server(result)


def full_norm(result, step):
    return math.sqrt(sum(row[SUM_SQUARES] for row in result.expected[step].values() if row is not None))


@pytest.mark.parametrize("name", CLIPPED)
def test_R16_R17_the_norm_of_clipping_is_the_whole_norm_on_every_rank(name, play):
    result = play(name)
    for step in result.expected:
        norm = full_norm(result, step)
        assert norm > CLIP, "the clip must bite, or the test proves nothing"
        for out in result.out:
            assert out.points["grad/clip_norm"][step] == pytest.approx(norm, rel=1e-5)
        assert len({out.points["grad/clip_norm"][step] for out in result.out}) == 1


def test_R16_R17_the_norm_of_a_rank_alone_is_no_series(play):
    result = play("FSDP1, clipped by torch.nn.utils.clip_grad_norm_")
    for out in result.out:
        assert "grad/clip_norm" not in out.points
        assert "call the clip_grad_norm_ method of the FSDP model" in out.unavailable()["grad/clip_norm"]


def test_R01_the_sharded_block_and_the_replicated_head_both_have_their_layers(play):
    result = play("FSDP2 block and DDP head in one model")
    assert "mixed" in result.notes["clip"], (
        "torch's own clipping raised, and the statistics were right all the same"
    )
    for out in result.out:
        assert set(out.layers) == {name for name, _ in make_net().named_parameters()}
        assert out.declared["first.weight"].num_shards == 2
        assert out.declared["head.weight"].num_shards == 1
        assert "grad/norm" not in out.unavailable()


def test_R02_from_DDP_to_FSDP2_names_stay_and_values_too(play):
    before, after = shown(play("DDP")), shown(play("FSDP2"))
    for step, item in before.layers.items():
        other = after.layers[step]
        assert other.layout.names == item.layout.names
        for name in item.layout.names:
            assert after.norm_of(step, name) == pytest.approx(before.norm_of(step, name), rel=1e-4)
        assert set(after.values[step]) == set(before.values[step])
        for name, value in before.values[step].items():
            if name.split("/")[0] in ("grad", "train"):
                assert after.values[step][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("name", OWN_NAMES)
def test_R77_layer_names_are_those_of_the_plain_model(name, play):
    plain = [name for name, _ in make_net().named_parameters()]
    for out in play(name).out:
        # In the same order, because the order tells where in the network a layer is.
        assert list(out.declared) == [name for name in plain if name in out.declared]
        assert set(plain) - set(out.declared) <= {"embedding.weight", "first.bias"}, "only the frozen ones"


def test_partial_gradients_are_named_and_no_norm_is_made_without_them(play):
    result = play(PARTIAL)
    for out in result.out:
        reasons = out.unavailable()
        assert (
            "norm.weight, norm.bias are not collected: each rank holds a term of a sum"
            in reasons["grad/layers"]
        )
        assert "2 of 9 layers" in reasons["grad/norm"]
        assert out.declared["embedding.weight"].num_shards == 1, "as its gradient is, not as its weight"
    server = shown(result)
    assert server.episodes == {}
    for step in result.expected:
        assert "grad/norm" not in server.values[step]
        assert 0.9 < server.values[step]["grad/coverage_fraction"] < 1.0
        assert server.norm_of(step, "norm.weight") is None
        assert server.norm_of(step, "head.weight") is not None


@pytest.mark.parametrize("mode", two_rank_modes.MISTAKES, ids=lambda mode: mode.name)
def test_different_values_under_one_name_raise_an_alert(mode, folder):
    result = mode_checks.played(mode, folder)
    assert [one["failures"] for one in result.said] == [{}, {}]
    (episode,) = shown(result).episodes.values()
    layer = "experts.weight" if mode is parallel_modes.UNTOLD_EXPERTS else "0.weight"
    assert (episode.first.rule, episode.first.layers, episode.first.ranks) == (
        "replica_mismatch",
        (layer,),
        (0, 1),
    )


def test_stages_with_names_of_their_own_raise_none(folder):
    server = shown(mode_checks.played(parallel_modes.OWN_NAMES, folder))
    assert server.episodes == {}
    assert {"stage0.0.weight", "stage1.0.weight"} <= set(server.layers[1].layout.names)
    assert server.values[1]["grad/coverage_fraction"] == 1.0


@pytest.mark.parametrize("name", ["FSDP2", "pipeline stages"])
def test_a_rank_that_falls_silent_shows_and_makes_no_smaller_norm(name, play):
    server = shown(play(name), stopped=[1])
    for step in (1, 2, 3):
        assert 0 < server.values[step]["grad/coverage_fraction"] < 1
        assert "grad/norm" not in server.values[step]
        assert server.norm_of(step, "head.weight") is None
    (episode,) = server.episodes.values()
    assert (episode.first.rule, episode.first.ranks) == ("incomplete_gradient", (1,))
    whole = server.norm_of(1, "embedding.weight")
    assert (whole is not None) == (name == "pipeline stages"), (
        "the other stage is whole, half of a layer is not"
    )


def test_a_rank_that_never_came_shows_in_what_is_sharded(play):
    server = shown(play("FSDP2"), silent=[1])
    assert [one.first.ranks for one in server.episodes.values()] == [(1,)]
    assert all("grad/norm" not in values for values in server.values.values())


def test_a_silent_replica_takes_nothing_away(play):
    result = play("DDP")
    server = shown(result, silent=[0])
    assert server.episodes == {}
    for step in result.expected:
        assert server.values[step]["grad/norm"] == pytest.approx(full_norm(result, step), rel=1e-5)
        assert server.values[step]["grad/coverage_fraction"] == 1.0


@pytest.mark.parametrize("mode", two_rank_modes.COUNTED, ids=lambda mode: mode.name)
def test_the_agent_makes_no_collective(mode, folder):
    """Not even for gradients that it cannot read without."""
    result = mode_checks.played(mode, folder)
    assert result.notes["collectives"] == result.notes_bare["collectives"] > 0


def test_clipping_that_raises_in_torch_leaves_the_statistics_right(play):
    """The mode itself holds the statistics against the plain model's."""
    assert "mixed" in play("tensor parallelism").notes["clip"]


def test_the_memory_ledger_counts_what_this_rank_holds(play):
    """FSDP2 cuts along the first dimension, and allocates parts of equal size, the last one padded."""
    result = play("FSDP2")
    parameters = [parameter.detach() for parameter in make_net().parameters()]
    padded = sum(4 * -(-len(one) // 2) * one[0].numel() for one in parameters)
    for rank, out in enumerate(result.out):
        parts = [torch.chunk(one, 2) for one in parameters]
        own = sum(4 * part[rank].numel() for part in parts if rank < len(part))
        assert set(out.points["memory/parameters_bytes"].values()) == {padded}
        assert set(out.points["memory/gradients_bytes"].values()) == {padded}
        # Two moments, which are not padded, and a step counter for each parameter.
        state = 2 * own + 4 * len(parameters)
        assert set(out.points["memory/optimizer_state_bytes"].values()) == {state}
    whole = sum(4 * one.numel() for one in parameters)
    (of_ddp, _) = play("DDP").out
    assert set(of_ddp.points["memory/parameters_bytes"].values()) == {whole}
