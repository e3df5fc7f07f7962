"""torch.compile: as many graphs with the agent as without, and the gradients of the plain model."""

from __future__ import annotations

import pytest

from tests.integration.modes import compiled_modes, mode_checks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    mode_checks.launch(compiled_modes.__name__, compiled_modes.MODES, folder)
    return folder


@pytest.mark.parametrize("mode", compiled_modes.MODES, ids=lambda mode: mode.name)
def test_R03_R04_R77_compiled(mode, folder):
    result = mode_checks.played(mode, folder)
    mode_checks.check(result)
    assert result.notes["graphs"] >= 1
    for what in ("graphs", "ops"):
        assert result.notes[what] == result.notes_bare[what], "the agent changed what is compiled"
    assert result.notes["graph_breaks"] <= result.notes_bare["graph_breaks"]
