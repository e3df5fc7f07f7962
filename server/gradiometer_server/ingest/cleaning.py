"""Makes a run's description fit instead of refusing the run: what names it stays as sent, what describes it is cut. Pure.

`gradiometer.init` refuses what is beyond the same limits, where somebody can still correct it. In a spool, or from
another program, it is too late for that, and the numbers behind it are worth more than a label.
"""

from __future__ import annotations

import msgspec

from gradiometer import wire
from gradiometer.wire import limits


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
    tags = tuple(filter(None, (limits.fitting_label(tag) for tag in run.tags)))
    return msgspec.structs.replace(
        run,
        name=limits.fitting_label(run.name) or run.run_id,
        tags=tags[: limits.MAX_TAGS],
        group=limits.fitting_label(run.group) or None if run.group is not None else None,
        notes=limits.fitting_text(run.notes, limits.MAX_NOTES_CHARS),
        config=limits.fitting_config(run.config),
    )


def _cleaned_source(source: wire.SourceInfo) -> wire.SourceInfo:
    environment = {
        limits.fitting_text(name, limits.MAX_LABEL_CHARS): limits.fitting_text(text, limits.MAX_NOTES_CHARS)
        for name, text in source.environment.items()
    }
    return msgspec.structs.replace(
        source, host=limits.fitting_text(source.host, limits.MAX_LABEL_CHARS), environment=environment
    )
