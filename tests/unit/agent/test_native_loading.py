"""The native kernel is used where it is sound, and where it is not there is a reason and the torch recipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
import torch

from gradiometer.capture import eager, native, recipe, statistics
from gradiometer.capture.native import build

NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="no C compiler"
)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The kernel's source in a folder of its own, where builds disturb nobody."""
    shutil.copy(build.SOURCE, tmp_path / "partials.c")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path / "partials.c")
    monkeypatch.setattr(build, "LIBRARY", tmp_path / build.LIBRARY.name)
    return tmp_path


def without_kernel(monkeypatch, reason="for this test"):
    monkeypatch.setattr(native, "_loaded", lambda: (None, reason))


def test_the_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native._load() == "GRADIOMETER_NATIVE=0"


def test_switched_off_in_a_real_process():
    program = "from gradiometer.capture import native; print(native.load(), native.why_not())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "GRADIOMETER_NATIVE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["None", "GRADIOMETER_NATIVE=0"]


def test_without_a_library_the_reason_says_how_to_get_one(elsewhere):
    assert "gradiometer.capture.native.build" in native._load()


def test_a_file_that_is_no_library(elsewhere):
    build.LIBRARY.write_bytes(b"not a library")
    assert native._load().startswith("the library cannot be loaded")


@NEEDS_COMPILER
def test_a_library_of_another_version(elsewhere, monkeypatch):
    text = build.SOURCE.read_text()
    assert "#define ABI 2 " in text
    build.SOURCE.write_text(text.replace("#define ABI 2 ", "#define ABI 77 "))
    assert build.build() is None
    assert "another version" in native._load()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("row[SUM] += block.sum;", "row[SUM] += block.sum + 1;", "statistics"),
        ("row[NORM_SUM_SQUARES] += squares;", "row[NORM_SUM_SQUARES] += 2 * squares;", "norms"),
        ("count[0][(bits >> 23) & 255]++;", ";", "histograms"),
        ("0x7c00u, 0x0400u", "0x7c00u, 0x0200u", "not finite"),
        ("return (int)(all >>", "return (int)(bits)(seen[0] >>", "not finite"),
    ],
)
def test_a_miscompiled_library_is_not_used(elsewhere, right, wrong, what):
    text = build.SOURCE.read_text()
    assert right in text
    build.SOURCE.write_text(text.replace(right, wrong))
    assert build.build() is None
    problem = native._load()
    assert "failed its self-test" in problem
    assert what in problem


@NEEDS_COMPILER
def test_a_build_is_kept_until_the_source_changes(elsewhere):
    assert build.build() is None
    first = build.LIBRARY.stat()
    assert build.build() is None
    assert build.LIBRARY.stat().st_ino == first.st_ino
    os.utime(build.SOURCE, (first.st_mtime + 10, first.st_mtime + 10))
    assert build.build() is None
    assert build.LIBRARY.stat().st_ino != first.st_ino
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(["partials.c", build.LIBRARY.name])


def test_no_compiler(elsewhere, monkeypatch):
    build.LIBRARY.write_bytes(b"of a machine that had one")
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert build.build(again=True) == "no C compiler (cc, gcc, clang) on the PATH"
    assert not build.LIBRARY.exists()


@NEEDS_COMPILER
def test_a_source_that_does_not_compile(elsewhere):
    build.SOURCE.write_text("this is not C\n")
    assert "failed with exit code" in build.build()
    assert [path.name for path in elsewhere.iterdir()] == ["partials.c"]


@NEEDS_COMPILER
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_the_library_needs_nothing_but_perhaps_the_c_library(elsewhere):
    assert build.build() is None
    data = build.LIBRARY.read_bytes()
    assert b"libgcc_s" not in data
    assert b"libm.so" not in data
    assert b"libgomp" not in data


@NEEDS_COMPILER
def test_loading_it_leaves_subnormal_numbers_alone():
    assert native.load() is not None, native.why_not()
    tiny = np.array([2.0**-149], dtype=np.float32)
    assert (tiny * np.float32(1.0))[0] == tiny[0]
    assert float(torch.tensor(2.0**-149) * 1.0) == 2.0**-149


def test_reading_works_the_same_without_it(monkeypatch):
    tensors = [torch.randn(300, 7), torch.randn(20_000).half(), torch.tensor([float("nan"), 1.0])]
    with_it = [read(tensors).values() for read in (eager.read_cpu, eager.read_norms, eager.read_histograms)]
    without_kernel(monkeypatch)
    without = [read(tensors).values() for read in (eager.read_cpu, eager.read_norms, eager.read_histograms)]
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["negative view", "subclass", "integer"])
def test_what_the_kernel_does_not_know_goes_to_torch(kind):
    values = torch.tensor([1.0, -2.0, 3.0])
    if kind == "negative view":
        tensor = torch._neg_view(values)
        assert tensor.is_neg()
    elif kind == "subclass":
        tensor = values.as_subclass(type("Wrapped", (torch.Tensor,), {}))
    else:
        tensor = values.to(torch.int32)
    assert native.table_of([tensor], eager.flat) is None
    if kind != "integer":
        expected = statistics.exact(tensor.resolve_neg().to(torch.float64).numpy())
        np.testing.assert_allclose(eager.read_cpu([tensor]).values(), [expected])


def test_norms_without_the_kernel_count_what_is_not_finite_only_where_the_sum_says_so():
    huge = torch.full((3,), 1e200, dtype=torch.float64)
    rows = recipe.norms([torch.zeros(5), torch.tensor([1.0, float("inf"), float("nan")]), huge])
    np.testing.assert_array_equal(rows[:, 0], [5, 3, 3])
    np.testing.assert_array_equal(rows[:, 2], [0, 2, 0])
    assert rows[0, 1] == 0.0
    assert np.isnan(rows[1, 1])
    assert np.isinf(rows[2, 1])


def test_norms_read_on_a_device_have_the_same_meaning():
    tensors = [torch.randn(1000), torch.tensor([1.0, float("nan")]), torch.full((4,), 1e30)]
    rows = eager._read_norms_of_device(tensors).values()
    np.testing.assert_allclose(rows, recipe.norms(tensors), rtol=2e-6)


def test_the_wheel_with_the_library_is_for_this_platform():
    tag = build.wheel_tag()
    assert tag.startswith("py3-none-")
    if sys.platform == "linux":
        assert tag == "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
