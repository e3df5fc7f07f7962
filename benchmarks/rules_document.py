"""Makes docs/rules.md: what every alert rule says of itself in its module, its parameters, and tables of figures."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

from gradiometer_server.alerting.rules import make_rules
from gradiometer_server.alerting.rules.base import Rule

_HEAD = """\
# Alert rules

<!-- Made by `python benchmarks/detectors.py` from the rules themselves; edit those. -->

Every rule sees the values of a run in the order of their steps, keeps a small state that survives a restart of the
server, and reports breaches. Breaches of one rule become one episode: it opens, is extended (count, last step, worst
value; its severity may rise) and resolves after some quiet steps. A baseline never contains the value that it judges,
nor a value that is not finite. Steps are counted as they are reported, so that a run that reports each hundredth step
is judged by the same rules. A change of that interval, and a restart of the learning-rate schedule, reset what was usual;
a relaunch of the training starts afresh.

`gradiometer lint FILE...` runs the same rules over logs that other tools wrote: CSV, JSON Lines, `trainer_state.json`.
It exits with 0 if nothing at `warning` or above was found, 1 if something was, 2 if a file could not be read.

Severities: `info` is for the record; `warning` wants a look; `error`: the run is being harmed; `critical`: it is lost
unless somebody acts.
"""

_FIGURES = """\
## How they compare

Synthetic curves, so that the truth is known. Middle columns: false episodes per 1,000 healthy steps on each kind of
curve (firings less than 20 steps apart are one episode; `info` counts like the rest, but for the row of warnings). Right columns: share
of {seeds} runs in which a fault in the curve "pretraining" was seen. Rules in bold are ours; the others are the
published defaults of the tools named, rebuilt from their sources. On a loss whose noise is a quarter of its level one step
cannot be told from noise, by any rule.
"""


def document(*, losses: Sequence[str], norms: Sequence[str]) -> str:
    """The whole page; `losses` and `norms` are the lines of its two tables."""
    parts = [_HEAD, "## The rules\n", *rule_sections(), _FIGURES.format(seeds=12)]
    parts += ["### Losses\n", *losses, "", "### Gradient norms\n", *norms, ""]
    return "\n".join(parts)


def rule_sections() -> Iterator[str]:
    """One section for each rule: its module's text and its parameters."""
    for rule in make_rules():
        module = sys.modules[type(rule).__module__]
        title, _, rest = inspect.cleandoc(module.__doc__ or "").partition("\n")
        text = re.sub(r"^Rule `\w+`: ", "", title)
        body = " ".join([f"{text[:1].upper()}{text[1:]}", *rest.split("\n\n")]).replace("\n", " ")
        yield f"### {rule.name}\n\n{' '.join(body.split())}\n"
        lines = list(_parameters(module, rule))
        if lines:
            yield "\n".join(["| parameter | default | |", "|---|---|---|", *lines]) + "\n"


def _parameters(module: ModuleType, rule: Rule) -> Iterator[str]:
    """A line for each parameter, or for those that the docstring explains together."""
    for name, value in vars(module).items():
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and name.endswith("Defaults") and dataclasses.is_dataclass(value):
            defaults = {field.name: _shown(field.default) for field in dataclasses.fields(value)}
            for names, text in _explained(inspect.getdoc(value) or "", defaults):
                shown = ", ".join(f"`{one}`" for one in names)
                yield f"| {shown} | {', '.join(defaults[one] for one in names)} | {text} |"


def _explained(doc: str, names: Collection[str]) -> Iterator[tuple[list[str], str]]:
    """(names, text) of every entry of a docstring's list of attributes; names without one have no text."""
    left = list(names)
    entry = re.compile(
        r"^ *`?((?:\w+(?:, )?)+)`?: (.*?)(?=^ *`?(?:\w+(?:, )?)+`?: |\Z)", re.MULTILINE | re.DOTALL
    )
    for found in entry.finditer(doc):
        explained = [name for name in found.group(1).split(", ") if name in left]
        if explained:
            left = [name for name in left if name not in explained]
            yield explained, " ".join(found.group(2).split()).replace("|", "\\|")
    for name in left:
        yield [name], ""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "never" if isinstance(value, int) and value > 2**60 else f"{value}"
