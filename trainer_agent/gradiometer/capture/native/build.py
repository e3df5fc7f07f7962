"""Compiles the kernel `partials.c` into a shared library beside it, if there is a C compiler.

The package's build does this; `python -m gradiometer.capture.native.build` does it later, where a compiler came after
the installation. Knows only the standard library, because the build loads this file by its path.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
SOURCE: Final = FOLDER / "partials.c"
LIBRARY: Final = FOLDER / ("libpartials.dylib" if sys.platform == "darwin" else "libpartials.so")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # Allow vector comparisons; what -ffast-math would do besides changes results and the process's rounding mode.
    "-fno-math-errno",
    "-fno-trapping-math",
)
_MACOS: Final = "11.0"
"""Oldest macOS that the library is built for."""
_TIMEOUT_S: Final = 120.0


def build(*, again: bool = False) -> str | None:
    """Compile, unless there is a library that is newer than the source.

    Args:
        again: compile even then; the library may be of another machine whose folder this was.

    Returns:
        Why there is no library now; None: there is one.
    """
    if not again and _is_current():
        return None
    problem = _compile()
    if problem is not None:
        LIBRARY.unlink(missing_ok=True)
    return problem


def _compile() -> str | None:
    if sys.platform not in ("linux", "darwin"):
        return f"no recipe to compile it on {sys.platform}"
    compiler = _compiler()
    if compiler is None:
        return f"no C compiler ({', '.join(COMPILERS)}) on the PATH"
    with tempfile.TemporaryDirectory(prefix=".build-", dir=FOLDER) as folder:
        made = Path(folder) / LIBRARY.name
        command = [compiler, *FLAGS, *_system_flags(), str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(  # noqa: S603  the compiler of this machine, by its absolute path
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} did not run: {error}"
        if done.returncode != 0 or not made.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"{compiler} failed with exit code {done.returncode}: {last}"
        # In one step: a training that runs now goes on with the file that it has mapped.
        made.replace(LIBRARY)
    return None


def wheel_tag() -> str:
    """The tag of a wheel that holds the library: any Python 3, this platform."""
    if sys.platform == "darwin":
        return f"py3-none-macosx_{_MACOS.replace('.', '_')}_{platform.machine()}"
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _is_current() -> bool:
    return LIBRARY.is_file() and LIBRARY.stat().st_mtime >= SOURCE.stat().st_mtime


def _compiler() -> str | None:
    wished = os.environ.get("CC", "").split()
    found = (shutil.which(name) for name in (*wished[:1], *COMPILERS))
    return next((path for path in found if path is not None), None)


def _system_flags() -> list[str]:
    # No libgcc_s at run time; macOS has none and its compiler does not know the flag.
    return [f"-mmacosx-version-min={_MACOS}"] if sys.platform == "darwin" else ["-static-libgcc"]


def main() -> int:
    """Build and say what came of it."""
    problem = build()
    sys.stdout.write(f"{LIBRARY}\n" if problem is None else f"no native kernel: {problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
