"""The command line of the server: its one line, its exit codes, its orderly end, and what it imports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from gradiometer_server.store.database import Database
from tests.support.server import Server

Factory = Callable[..., Server]


def refused(one: Server) -> str:
    """What a server that does not start says: one line, exit code 2, no traceback."""
    one.launch()
    code = one.wait()
    lines = [line for line in one.log.splitlines() if line.startswith("gradiometer: ")]
    assert code == 2, one.log
    assert "Traceback" not in one.log
    assert "Gradiometer is at" not in one.log
    assert len(lines) == 1, one.log
    return lines[0]


def test_it_prints_its_address_and_serves_there(server: Factory) -> None:
    one = server()
    lines = [line for line in one.log.splitlines() if line.startswith("Gradiometer is at")]
    assert lines == [f"Gradiometer is at http://127.0.0.1:{one.port}/"]
    assert httpx.get(one.url + "/healthz").json() == {"status": "ok", "version": "0.1.0"}
    assert httpx.get(one.url + "/readyz").json()["status"] == "ready"


def test_a_port_in_use_is_named(server: Factory) -> None:
    first = server()
    second = server(f"{first.database_url}.2", arguments=["--port", str(first.port)], start=False)
    line = refused(second)
    assert f"port {first.port} is in use" in line
    assert "--port" in line


def test_an_address_of_another_machine_is_named(server: Factory) -> None:
    environment = {"GRADIOMETER_TOKEN": "0123456789abcdef"}
    line = refused(server(arguments=["--host", "203.0.113.7"], environment=environment, start=False))
    assert "cannot listen on 203.0.113.7" in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_not_let_in_without_a_token(server: Factory, host: str) -> None:
    line = refused(server(arguments=["--host", host], start=False))
    assert host in line
    assert "GRADIOMETER_TOKEN" in line
    short = refused(
        server(arguments=["--host", host], environment={"GRADIOMETER_TOKEN": "short"}, start=False)
    )
    assert "at least 16" in short


def test_all_interfaces_with_a_token(server: Factory) -> None:
    one = server(
        arguments=["--host", "0.0.0.0"], environment={"GRADIOMETER_TOKEN": "0123456789abcdef"}, start=False
    )
    one.launch()
    found = None
    while found is None:
        found = re.search(r"Gradiometer is at http://0\.0\.0\.0:(\d+)/", one.log)
    url = f"http://127.0.0.1:{found[1]}/healthz"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers=one.headers).status_code == 200


def test_the_token_may_come_from_a_file(server: Factory, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-in-a-file-01\n")
    # The variable only tells the fixture which token to send; the file is what the server goes by.
    environment = {"GRADIOMETER_TOKEN": "a-token-in-a-file-01"}
    one = server(arguments=["--token-file", str(file)], environment=environment)
    assert httpx.get(one.url + "/healthz").status_code == 401


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:////proc/no/such.db", "/proc/no"),
        ("mysql://localhost/x", "mysql"),
        ("nonsense", "URL"),
        ("postgresql://nobody@127.0.0.1:1/none", "127.0.0.1:1"),
    ],
)
def test_a_database_that_cannot_be_used_is_named(server: Factory, url: str, says: str) -> None:
    line = refused(server(url, start=False))
    assert says in line
    assert "tries again" not in line, "it has ended"


def test_a_file_that_is_no_database_is_named_and_left_alone(server: Factory, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, and no database\n" * 50)
    before = path.read_bytes()
    assert str(path) in refused(server(f"sqlite:///{path}", start=False))
    assert path.read_bytes() == before


def test_a_database_from_a_newer_version_is_named(server: Factory, tmp_path: Path) -> None:
    path = tmp_path / "newer.db"
    one = server(f"sqlite:///{path}")
    one.stop()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    line = refused(server(f"sqlite:///{path}", start=False))
    assert "9999" in line
    assert "newer" in line


def test_two_servers_do_not_share_a_file(server: Factory) -> None:
    first = server()
    line = refused(server(first.database_url, start=False))
    assert f"pid {first.pid}" in line
    assert httpx.get(first.url + "/readyz").status_code == 200


def test_a_wrong_option_is_a_usage_error(server: Factory) -> None:
    one = server(arguments=["--no-such-option"], start=False)
    one.launch()
    assert one.wait() == 2
    assert "--no-such-option" in one.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_and_says_goodbye_to_browsers(server: Factory, number: signal.Signals) -> None:
    one = server()
    with connect(f"ws://127.0.0.1:{one.port}/api/v1/live", proxy=None) as live:
        live.recv(10)
        os.kill(one.pid, number)
        with pytest.raises(ConnectionClosed) as raised:
            live.recv(10)
    assert raised.value.rcvd is not None
    assert raised.value.rcvd.code in (1001, 1012)
    assert one.wait() == 0
    assert "Traceback" not in one.log
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", one.port)) != 0


def test_it_starts_again_on_the_same_port_at_once(server: Factory) -> None:
    one = server()
    port = one.port
    with httpx.Client(base_url=one.url) as client:
        client.get("/healthz")
        one.kill()
        one.restart()
    assert one.port == port
    assert httpx.get(one.url + "/readyz").status_code == 200


def test_below_a_path_prefix_everything_works_with_and_without_it(server: Factory) -> None:
    one = server(environment={"GRADIOMETER_PATH_PREFIX": "/g"})
    assert f"http://127.0.0.1:{one.port}/g/" in one.log
    for base in (one.url, one.url + "/g"):
        assert httpx.get(base + "/api/v1/runs").status_code == 200
        assert httpx.get(base + "/docs").status_code == 200
    assert "runs" not in httpx.get(one.url + "/gg/api/v1/runs").text[:10]
    assert httpx.get(one.url + "/g/openapi.json").json()["servers"] == [{"url": "/g"}]
    with connect(f"ws://127.0.0.1:{one.port}/g/api/v1/live", proxy=None) as live:
        assert json.loads(live.recv(10))["type"] == "hello"


def db(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradiometer_server", "db", *arguments, "--database", url, "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def told(*arguments: str, url: str) -> str:
    """What a `db` command that cannot do its work says: one line, exit code 2."""
    done = db(*arguments, url=url)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines: list[str] = [line for line in done.stderr.splitlines() if line.startswith("gradiometer: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_revisions_that_are_not_there_and_newer_databases_are_named(database_url: str) -> None:
    assert db("upgrade", url=database_url).returncode == 0
    assert "'nosuch'" in told("upgrade", "nosuch", url=database_url)
    assert "'nosuch'" in told("downgrade", "nosuch", url=database_url)
    database = Database(database_url)
    with database.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    assert "newer" in told("downgrade", "base", url=database_url)
    assert "newer" in told("upgrade", url=database_url)


@pytest.mark.parametrize("revision", ["base", "-99", "-1000"])
def test_tables_are_removed_only_for_those_who_say_so(database_url: str, revision: str) -> None:
    assert db("upgrade", url=database_url).returncode == 0
    said = told("downgrade", revision, url=database_url)
    if revision == "base":
        assert "removes every table" in said
        assert "--yes" in said
    assert "num_runs" in db("stats", url=database_url).stdout


def test_a_reader_that_has_gone_gets_no_traceback(database_url: str) -> None:
    assert db("upgrade", url=database_url).returncode == 0
    command = [
        sys.executable,
        "-m",
        "gradiometer_server",
        "db",
        "stats",
        "--database",
        database_url,
        "--quiet",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("command", ["stats", "check"])
def test_a_database_without_tables_is_named_as_such(database_url: str, command: str) -> None:
    assert db("upgrade", url=database_url).returncode == 0
    assert db("downgrade", "base", "--yes", url=database_url).returncode == 0
    assert "holds no tables of Gradiometer" in told(command, url=database_url)


def test_the_file_of_another_program_is_left_alone(server: Factory, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE invoices (id)")
    assert "invoices" in refused(server(f"sqlite:///{path}", start=False))
    assert "invoices" in told("upgrade", url=f"sqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("invoices",)]


def test_two_names_of_one_file_are_one_file(server: Factory, tmp_path: Path) -> None:
    one = server(f"sqlite:///{tmp_path / 'real.db'}")
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "real.db")
    assert f"pid {one.pid}" in refused(server(f"sqlite:///{link}", start=False))


def test_an_option_that_postgresql_does_not_know_is_named(server: Factory) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none?foo=bar"
    assert "foo" in refused(server(url, start=False))
    assert "foo" in told("stats", url=url)


def test_a_folder_that_cannot_be_made_is_named() -> None:
    assert "/proc/none" in told("upgrade", url="sqlite:////proc/none/a.db")


def test_a_database_is_looked_after_beside_a_running_server(server: Factory, tmp_path: Path) -> None:
    one = server()
    figures = db("stats", url=one.database_url)
    assert figures.returncode == 0, figures.stderr
    assert re.search(r"^num_runs +0$", figures.stdout, re.MULTILINE)
    assert db("check", url=one.database_url).stdout == "no problem found\n"
    copy = tmp_path / "copy.db"
    assert db("backup", str(copy), url=one.database_url).returncode == 0
    assert db("check", url=f"sqlite:///{copy}").returncode == 0
    again = db("backup", str(copy), url=one.database_url)
    assert (again.returncode, str(copy) in again.stderr) == (2, True)
    in_use = db("downgrade", "base", url=one.database_url)
    assert (in_use.returncode, f"pid {one.pid}" in in_use.stderr) == (2, True)
    one.stop()
    down = db("downgrade", "base", "--yes", url=one.database_url)
    assert "base" in down.stdout, down.stderr
    up = db("upgrade", url=one.database_url)
    assert up.returncode == 0, up.stderr
    assert httpx.get(one.restart().url + "/readyz").status_code == 200


def test_a_database_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    done = db("stats", url=f"sqlite:///{path}")
    assert (done.returncode, str(path) in done.stderr) == (2, True)
    assert not path.exists()


def test_the_server_needs_only_the_wire_of_the_agent_and_never_torch() -> None:
    program = (
        "import sys, json\n"
        "import gradiometer_server.serving, gradiometer_server.cli\n"
        "from gradiometer_server.main import create_app\n"
        "from gradiometer_server.settings import Settings\n"
        "create_app(Settings(database_url='sqlite:////nowhere/x.db'))\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(done.stdout)
    assert "gradiometer_server.main" in loaded
    of_agent = [name for name in loaded if name.split(".")[0] == "gradiometer"]
    # `wire` is all that the server imports; the other two are what `wire` is made of.
    assert of_agent == ["gradiometer", "gradiometer.limits", "gradiometer.names", "gradiometer.wire"]
    assert [name for name in loaded if name.split(".")[0] == "torch"] == []
