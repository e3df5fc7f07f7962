"""What is said when the framework of an integration is not installed."""

from __future__ import annotations


def missing(module: str, package: str, error: ImportError) -> ImportError:
    """The error to raise instead of `error`, which an import of `package` raised."""
    return ImportError(
        f"gradiometer.integrations.{module} needs {package}, which cannot be imported here ({error}): "
        f"pip install {package}",
        name=error.name,
    )
