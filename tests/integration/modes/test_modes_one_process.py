"""One process: what is recorded is the gradient of a plain model, and the training does not notice."""

from __future__ import annotations

import pytest

from tests.integration.modes import mode_checks, one_process_modes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all modes of one process were played, in one process."""
    folder = tmp_path_factory.mktemp("modes")
    mode_checks.launch(one_process_modes.__name__, one_process_modes.MODES, folder)
    return folder


@pytest.mark.parametrize("mode", one_process_modes.MODES, ids=lambda mode: mode.name)
def test_mode(mode, folder):
    mode_checks.check(mode_checks.played(mode, folder))
