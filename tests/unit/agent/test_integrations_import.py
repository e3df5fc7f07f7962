"""Integrations cost nothing until they are imported, and say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "transformers", "lightning", "pytorch_lightning", "accelerate")

LIGHT = f"""
import sys
import gradiometer
import gradiometer.integrations
loaded = [name for name in {FRAMEWORKS!r} if name in sys.modules]
assert not loaded, loaded
"""

MISSING = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
try:
    import gradiometer.integrations.{module}
except ImportError as error:
    print(error)
"""

CASES = {
    "transformers": (["transformers"], "pip install transformers[torch]"),
    "lightning": (["lightning", "pytorch_lightning"], "pip install lightning"),
    "accelerate": (["accelerate"], "pip install accelerate"),
}


def output(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_agent_and_the_package_imports_no_framework():
    output(LIGHT)


@pytest.mark.parametrize("module", CASES)
def test_a_missing_framework_is_named_with_what_to_install(module):
    hidden, remedy = CASES[module]
    told = output(MISSING.format(hidden=hidden, module=module))
    assert told.startswith(f"gradiometer.integrations.{module} needs "), told
    assert told.strip().endswith(remedy), told
