"""Makes a run's description fit instead of refusing the run: what names it stays as sent, what describes it is cut. Pure.

`gradiometer.init` refuses what is beyond the same limits, where somebody can still correct it. In a spool, or from
another program, it is too late for that, and the numbers behind it are worth more than a label.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gradiometer import wire
from gradiometer.wire import limits

LEFT_OUT: Final = "gradiometer: left out"
"""Key of a cut configuration that names what is missing from it."""
_NOTE_BYTES: Final = 8 * 1024
_NAMED_KEYS: Final = 20


def cleaned(hello: wire.Hello) -> tuple[wire.Hello, tuple[str, ...]]:
    """The hello with a description that can be kept, and the names of the fields that were changed for it."""
    run = _cleaned_run(hello.run)
    sources = tuple(_cleaned_source(source) for source in hello.sources)
    fields = ("name", "tags", "group", "notes", "config")
    changed = [f"run.{field}" for field in fields if getattr(run, field) != getattr(hello.run, field)]
    if sources != hello.sources:
        changed.append("sources")
    if not changed:
        return hello, ()
    return msgspec.structs.replace(hello, run=run, sources=sources), tuple(changed)


def _cleaned_run(run: wire.RunInfo) -> wire.RunInfo:
    tags = tuple(filter(None, (_label(tag) for tag in run.tags)))
    return msgspec.structs.replace(
        run,
        name=_label(run.name) or run.run_id,
        tags=tags[: limits.MAX_TAGS],
        group=_label(run.group) or None if run.group is not None else None,
        notes=_cut(run.notes, limits.MAX_NOTES_CHARS),
        config=_config(run.config),
    )


def _cleaned_source(source: wire.SourceInfo) -> wire.SourceInfo:
    environment = {
        _cut(name, limits.MAX_LABEL_CHARS): _cut(text, limits.MAX_NOTES_CHARS)
        for name, text in source.environment.items()
    }
    return msgspec.structs.replace(
        source, host=_cut(source.host, limits.MAX_LABEL_CHARS), environment=environment
    )


def _label(text: str) -> str:
    """One printable line; empty if nothing is left of it."""
    if limits.label_problem(text) is None:
        return text
    printable = (" " if unicodedata.category(char) in ("Cc", "Cs") else char for char in text)
    return _cut("".join(printable).strip(), limits.MAX_LABEL_CHARS)


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """As many of the first keys as fit, and under `LEFT_OUT` which ones do not."""
    if limits.config_problem(config) is None:
        return dict(config)
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room_bytes = limits.MAX_CONFIG_BYTES - _NOTE_BYTES
    for key, value in config.items():
        fits = isinstance(key, str) and limits.structure_problem(value, depth=1) is None
        num_bytes = len(msgspec.msgpack.encode({key: value})) if fits else 0
        if fits and num_bytes <= room_bytes:
            kept[key] = value
            room_bytes -= num_bytes
        else:
            left_out.append(_cut(str(key), 100))
    named = left_out[:_NAMED_KEYS]
    more = len(left_out) - len(named)
    return {**kept, LEFT_OUT: [*named, f"and {more} more"] if more else named}
