"""The tests' own tools do what the tests rely on: waiting, finding programs, noticing leaks, counting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import leaks, programs, run_all
from tests.support.eventually import eventually


def test_eventually_returns_what_became_true() -> None:
    values = iter([0, None, "", "here"])
    assert eventually(lambda: next(values), interval_s=0) == "here"


def test_eventually_treats_a_failed_assertion_as_not_yet_and_reports_the_last_one() -> None:
    def never() -> bool:
        raise AssertionError("still three")

    with pytest.raises(AssertionError, match=r"not within 0\.05 s: four; .*still three"):
        eventually(never, 0.05, what="four")


def test_eventually_lets_a_defect_through_at_once() -> None:
    begun_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 // 0, 60)
    assert time.monotonic() - begun_s < 10


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No database, no browser, not root; returns the only folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GRADIOMETER_TEST_POSTGRES", "GRADIOMETER_TEST_CHROMIUM", "PLAYWRIGHT_BROWSERS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(programs, "POSTGRES_PLACES", (f"{tmp_path}/postgresql/*/bin",))
    monkeypatch.setattr(programs, "CHROMIUM_PLACES", ())
    return folder


def make_program(path: Path, text: str = "\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_bare_machine_stops_with_the_names_of_what_to_install(
    bare_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert programs.main() == 1
    told = capsys.readouterr().err
    assert "PostgreSQL and Chromium: not found" in told
    assert "apt-get install postgresql chromium" in told
    assert "no test has run" in told


def test_only_what_is_missing_is_asked_for(bare_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_program(bare_machine / "chromium")
    assert programs.main() == 1
    told = capsys.readouterr().err
    assert "PostgreSQL: not found" in told
    assert "apt-get install postgresql\n" in told


def test_the_library_that_playwrights_node_needs_is_asked_for(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("chromium", "initdb", "postgres"):
        make_program(bare_machine / name)
    assert programs.main() == 0
    node = "#!/bin/sh\necho 'node: error while loading shared libraries: libatomic.so.1' >&2\nexit 127\n"
    make_program(bare_machine / "playwright" / "driver" / "node", node)
    (bare_machine / "playwright" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(bare_machine))
    monkeypatch.delitem(sys.modules, "playwright", raising=False)
    assert programs.main() == 1
    assert "apt-get install libatomic1\n" in capsys.readouterr().err


def test_the_newest_installed_postgresql_is_taken(bare_machine: Path) -> None:
    for version in ("9.6", "15", "17"):
        folder = bare_machine.parent / "postgresql" / version / "bin"
        make_program(folder / "initdb")
        make_program(folder / "postgres")
    assert programs.find_postgres().parent.name == "17"


def test_a_snap_stub_is_no_chromium(bare_machine: Path) -> None:
    make_program(bare_machine / "chromium-browser", "#!/bin/sh\necho 'snap install chromium'\nexit 1\n")
    with pytest.raises(programs.ProgramMissing):
        programs.find_chromium()
    found = make_program(bare_machine.parent / ".cache/ms-playwright/chromium-1200/chrome-linux/chrome")
    assert programs.find_chromium() == found


def test_root_on_debian_installs_what_is_missing_and_looks_again(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {log}\n'
    for name in ("chromium", "initdb", "postgres"):
        script += (
            f"[ $1 = install ] && printf x > {bare_machine}/{name} && /bin/chmod 755 {bare_machine}/{name}\n"
        )
    make_program(bare_machine / "apt-get", script + "exit 0\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert programs.main() == 0
    assert log.read_text().splitlines() == [
        "noninteractive update -q",
        "noninteractive install -y -q --no-install-recommends postgresql chromium fonts-dejavu-core",
    ]


def test_a_detached_process_is_noticed_by_its_mark() -> None:
    program = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); time.sleep(60)"
    mark = "a-mark-of-this-test-only"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, leaks.MARK: mark}, check=True)
    (found,) = eventually(lambda: leaks.marked_processes(mark))
    ended = leaks.end_leaked(mark, patience_s=0)
    assert [line.split(":")[0] for line in ended] == [str(found.pid)]
    eventually(lambda: not leaks.marked_processes(mark))


def test_a_test_with_an_error_counts_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>',
        encoding="utf-8",
    )
    assert run_all.count(report) == {"passed": 4, "failed": 3, "skipped": 3}
    assert not run_all.count(tmp_path / "none.xml")
