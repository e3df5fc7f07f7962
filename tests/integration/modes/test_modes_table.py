"""docs/modes.md lists exactly the modes that are tested, and says of them what the tests measured."""

from __future__ import annotations

import json

import pytest

from tests.integration.modes.all_modes import ALL_MODES
from tests.support import modes_table

PAGE = modes_table.PAGE.read_text()


def test_the_page_lists_exactly_the_modes_that_are_tested():
    assert list(modes_table.rows_of(PAGE)) == [mode.name for mode in ALL_MODES]
    assert len({mode.slug for mode in ALL_MODES}) == len(ALL_MODES)


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name)
def test_the_page_is_what_the_mode_says(mode):
    row = modes_table.Row(
        name=mode.name,
        world_size=mode.world_size,
        reads=mode.reads,
        worst_error=0.0,
        remarks=mode.remarks,
    )
    cells = modes_table.rows_of(PAGE)[mode.name]
    assert cells[:3] + cells[4:] == row.cells()[:3] + row.cells()[4:]
    assert modes_table.bound_of(cells[3]) <= max(10 * mode.tolerance, 1e-5)


def test_a_page_is_read_as_it_was_written():
    rows = [
        modes_table.Row(name="a", world_size=1, reads="r", worst_error=3.1e-7, remarks=""),
        modes_table.Row(name="b", world_size=4, reads="r", worst_error=0.0, remarks="see"),
    ]
    page = modes_table.page_with(rows, f"# Title\n\n{modes_table.BEGIN}\nold\n{modes_table.END}\n\nEnd\n")
    assert page.startswith("# Title\n")
    assert page.endswith("End\n")
    cells = modes_table.rows_of(page)
    assert cells["a"] == ["a", "1", "r", "< 1e-6", "exact", "identical", ""]
    assert modes_table.bound_of(cells["a"][3]) == 1e-6
    assert cells["b"][3] == "0"
    assert modes_table.page_with(rows, page) == page
    assert json.dumps(cells)
