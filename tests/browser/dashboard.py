"""What the page's tests share: runs sent over the wire, and reading what is really drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from playwright.sync_api import Page

from gradiometer import wire
from tests.support.eventually import eventually
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

FRAME_STEPS = 10_000

READ_TRACE = """([metric, name]) => {
  const card = [...document.querySelectorAll('figure[data-metric]')].find((el) => el.dataset.metric === metric);
  const gd = card && card.querySelector('.js-plotly-plot');
  const trace = gd && gd.data && gd.data.find((one) => one.name === name);
  return trace ? JSON.stringify({x: trace.x, y: trace.y, customdata: trace.customdata}) : null;
}"""

READ_LAYOUT = """(metric) => {
  const card = [...document.querySelectorAll('figure[data-metric]')].find((el) => el.dataset.metric === metric);
  const gd = card && card.querySelector('.js-plotly-plot');
  return gd && gd.layout ? JSON.stringify({range: gd.layout.xaxis.range, yRange: gd.layout.yaxis.range, yType: gd.layout.yaxis.type, shapes: gd.layout.shapes}) : null;
}"""


def send_scalars(
    client: WireClient, names: Sequence[str], first: int, last: int, value: Callable[[str, int], float]
) -> None:
    """Send steps `first`..`last` of scalars whose schema (id 1) was sent before."""
    for start in range(first, last + 1, FRAME_STEPS):
        steps = range(start, min(start + FRAME_STEPS, last + 1))
        client.send(frame({step: [value(name, step) for name in names] for step in steps}))


def begin_run(
    url: str, run: str, names: Sequence[str], layers: Iterable[tuple[str, int]] = (), **source: Any
) -> WireClient:
    """Connect as the only rank of a run and declare its columns. The caller closes the client."""
    client = WireClient(url, run, **source)
    client.hello()
    records = [scalar_schema(*names)]
    if layers:
        records.append(layer_schema(*layers))
    client.send(*records)
    return client


def whole_run(
    url: str, run: str, names: Sequence[str], last: int, value: Callable[[str, int], float]
) -> None:
    """A run that has sent `last` steps and ended well."""
    client = begin_run(url, run, names)
    send_scalars(client, names, 1, last, value)
    client.send(exit_event(0))
    client.close()


def layer_frame(rows: dict[int, Sequence[tuple[float, int]]], numel: int = 10) -> bytes:
    """A frame of layer partials: per step and layer (rms of its elements, number of non-finite ones)."""
    values: dict[int, list[float]] = {}
    for step, layers in rows.items():
        values[step] = []
        for rms, bad in layers:
            spoiled = math.nan if bad else 1.0
            partials = [numel, 0.0, rms * rms * numel * spoiled, -rms * spoiled, rms * spoiled, 0, bad]
            assert len(partials) == len(wire.STATISTICS)
            values[step] += partials
    return frame(values, schema_id=2)


def trace(page: Page, metric: str, name: str) -> dict[str, list[Any]] | None:
    """`x`, `y` and `customdata` of one drawn trace (`mean`, `band`, `non-finite`), or None if it is not drawn."""
    text = page.evaluate(READ_TRACE, [metric, name])
    found: dict[str, list[Any]] | None = None if text is None else json.loads(text)
    return found


def layout(page: Page, metric: str) -> dict[str, Any]:
    """Ranges and shapes of a drawn chart."""
    text = eventually(lambda: page.evaluate(READ_LAYOUT, metric), 15, what=f"{metric} is drawn")
    found: dict[str, Any] = json.loads(text)
    return found


def drawn_step(page: Page, metric: str) -> int:
    """Last step of a chart as drawn; 0 if it is not."""
    drawn = trace(page, metric, "mean")
    return int(drawn["x"][-1]) if drawn and drawn["x"] else 0


def wait_for_step(page: Page, metric: str, step: int, timeout_s: float = 15) -> None:
    """Wait until the chart has drawn `step` or a later one."""
    eventually(
        lambda: drawn_step(page, metric) >= step, timeout_s, what=f"{metric} is drawn up to step {step}"
    )


def visible_values(drawn: dict[str, list[Any]] | None) -> list[float]:
    """Finite y values of a trace."""
    return [
        value
        for value in (drawn or {}).get("y", [])
        if isinstance(value, int | float) and math.isfinite(value)
    ]
