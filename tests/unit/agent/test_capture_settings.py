"""Arguments over environment over defaults; each mistake is named together with its remedy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
import traceback
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import gradiometer as gm
from gradiometer import cli, environment, exits, launch, settings, uplink, values, wire
from gradiometer import spool as spool_module
from gradiometer.uplink import transport

ARGUMENTS = {
    "project": None,
    "name": None,
    "config": None,
    "tags": (),
    "notes": "",
    "group": None,
    "mode": None,
    "run_id": None,
    "url": None,
    "token": None,
    "spool_path": None,
    "resume": None,
    "start_step": 0,
}


def resolve(**arguments):
    return settings.resolve(**{**ARGUMENTS, **arguments})


def test_defaults():
    found = resolve()
    assert (found.project, found.mode, found.url, found.run_id, found.token) == (
        "default",
        "online",
        "http://127.0.0.1:7717",
        None,
        None,
    )
    assert found.spool == spool_module.default_root()


def test_environment_and_arguments_above_it(monkeypatch, tmp_path):
    given = {
        "PROJECT": "p",
        "MODE": "offline",
        "URL": "http://h:1",
        "RUN_ID": "r",
        "TOKEN": "t",
        "SPOOL": str(tmp_path),
    }
    for name, value in given.items():
        monkeypatch.setenv(f"GRADIOMETER_{name}", value)
    found = resolve()
    assert (found.project, found.mode, found.url, found.run_id, found.token, found.spool) == (
        "p",
        "offline",
        "http://h:1",
        "r",
        "t",
        tmp_path,
    )
    found = resolve(
        project="P", mode="online", url="https://H:2/", run_id="R", token="T", spool_path=tmp_path / "S"
    )
    assert (found.project, found.mode, found.url, found.run_id, found.token, found.spool) == (
        "P",
        "online",
        "https://H:2",
        "R",
        "T",
        tmp_path / "S",
    )
    assert "T" not in repr(found).replace("Settings", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "on"}, r"mode 'on' is unknown: use one of online, offline, disabled"),
        ({"url": "127.0.0.1:7717"}, r"url '127.0.0.1:7717' is not the address.*http://127.0.0.1:7717"),
        ({"url": "http://"}, r"is not the address"),
        ({"url": "http://h:99999"}, r"is not the address"),
        ({"url": "http://[::1"}, r"is not the address"),
        ({"run_id": "x" * 600}, r"run_id 'x+' cannot be used: it has 600 characters; at most 128"),
        ({"run_id": "x" * 129}, r"run_id 'x+' cannot be used: it has 129 characters; at most 128"),
        ({"run_id": "a\nb"}, r"run_id.*control character"),
        ({"project": " "}, r"project ' ' cannot be used: the name is empty"),
        ({"project": 3}, r"project is a int: pass a string"),
        ({"tags": "abc"}, r"tags 'abc' is not a list of strings"),
        ({"tags": [1]}, r"tags \[1\] is not a list"),
        ({"config": 3}, r"config is a int: pass a dict"),
        ({"resume": "allow"}, r"resume='allow' needs to know the run: pass run_id"),
        ({"resume": "must"}, r"resume='must' needs to know the run.*resume='auto'"),
        (
            {"resume": "maybe", "run_id": "r"},
            r"resume='maybe' is unknown: use one of allow, must, never, auto",
        ),
        ({"resume": 1}, r"resume=1 is unknown"),
        ({"start_step": -1}, r"start_step -1 is not a step"),
        ({"start_step": True}, r"start_step True is not a step"),
        ({"start_step": 2**53}, r"is not a step"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(**arguments)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://me:hunter2@host:7717/x", r"url 'http://\*\*\*@host:7717/x' holds.*GRADIOMETER_TOKEN"),
        ("https://hunter2@host", r"url 'https://\*\*\*@host' holds.*GRADIOMETER_TOKEN"),
        # A password that makes the whole address wrong.
        ("http://me:hun/hunter2@host", r"url 'http://\*\*\*@host' is not the address"),
        ("http://me:hunter2 @host", r"'http://\*\*\*@host'"),
        ("http://me:hunter2@[::1", r"'http://\*\*\*@\[::1' is not the address"),
        ("me:hunter2@host", r"url '\*\*\*@host' is not the address"),
        ("http://me:hunter2\ud800@host", r"'http://\*\*\*@host' holds characters"),
    ],
)
@pytest.mark.parametrize("check", [lambda url: resolve(url=url), transport.check_url], ids=["init", "uplink"])
def test_a_password_in_the_address_is_refused_and_never_shown(check, url, told):
    with pytest.raises(ValueError, match=r"url|URL") as caught:
        check(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in re.sub(r"(?m)^ .*$", "", shown), "nor in an error behind it"
    if check is not transport.check_url:
        assert re.search(told, str(caught.value))


def test_an_at_sign_in_the_path_is_no_password():
    assert resolve(url="http://host/@team").url == "http://host/@team"
    assert transport.check_url("http://host/@team") == "http://host/@team"


class Unprintable:
    """An object with which everything fails."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __index__ = __float__ = __str__


def endless():
    yield "a"
    raise RuntimeError("no more")


LABELS = [
    ("", "the name is empty"),
    (" ", "the name is empty"),
    ("a\nb", r"control character U\+000A"),
    ("a\x1b[2J", r"control character U\+001B"),
    ("a\ud800", "characters that UTF-8 cannot carry"),
    ("n" * 501, "has 501 characters; at most 500"),
    (5, "is a int: pass a string"),
    (b"a", "is a bytes: pass a string"),
]


@pytest.mark.parametrize(("value", "message"), LABELS)
@pytest.mark.parametrize("argument", ["name", "group", "tags"])
def test_a_label_that_the_server_would_refuse_is_refused_at_once(argument, value, message):
    if argument == "tags":
        if not isinstance(value, str):
            message = "is not a list of strings"
        value = ["fine", value]
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        resolve(**{argument: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tags": 5}, r"tags 5 is not a list of strings: pass tags"),
        ({"tags": b"ab"}, r"tags b'ab' is not a list"),
        ({"tags": {"a": 1}}, r"tags .* is not a list"),
        ({"tags": endless()}, r"tags .* is not a list"),
        ({"tags": Unprintable()}, r"tags <Unprintable> is not a list"),
        ({"tags": ["t"] * 257}, r"tags holds 257 tags; at most 256"),
        ({"notes": 5}, r"notes is a int"),
        ({"notes": "x" * 65_537}, r"notes has 65537 characters; at most 65536 are allowed: keep"),
        ({"spool_path": 5}, r"spool 5 is not a folder: pass a path, or set GRADIOMETER_SPOOL"),
        ({"spool_path": b"there"}, r"spool b'there' is not a folder"),
        ({"spool_path": "a\0b"}, r"spool 'a\\x00b' is not a folder"),
        ({"spool_path": "~nobody-of-this-name/x"}, r"spool '~nobody-of-this-name/x' is not a folder"),
        ({"spool_path": Unprintable()}, r"spool <Unprintable> is not a folder"),
        ({"flight_recorder": 5}, r"flight_recorder 5 is not a folder"),
        ({"flight_recorder": b"there"}, r"flight_recorder b'there' is not a folder"),
        ({"config": {"a": "x" * 1_100_000}}, r"config takes 1100\d+ bytes; at most 1048576"),
        ({"config": int}, r"config is a type: pass a dict"),
        ({"config": b"lr=1"}, r"config is a bytes"),
        ({"start_step": 1.0}, r"start_step 1.0 is not a step"),
        ({"start_step": None}, r"start_step None is not a step"),
        ({"start_step": Unprintable()}, r"start_step <Unprintable> is not a step"),
        ({"mode": np.zeros(2)}, r"mode array.* is unknown"),
        ({"project": np.zeros(2)}, r"project is a ndarray"),
        ({"url": 7717}, r"url is a int"),
        ({"url": np.zeros(2)}, r"url is a ndarray"),
        ({"resume": np.zeros(2)}, r"resume=array.* is unknown"),
        ({"run_id": 5}, r"run_id is a int"),
        ({"run_id": "."}, r"run_id '.' cannot be used: a browser takes it out of the address"),
        ({"run_id": ".."}, r"run_id '..' cannot be used"),
        ({"token": 12345}, r"token is a int: pass a string"),
    ],
)
def test_every_wrong_argument_is_a_value_error_that_names_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(**arguments)


def test_arguments_that_look_wrong_and_are_not(tmp_path):
    found = resolve(
        tags=None, notes=None, name=None, spool_path="", start_step=np.int64(5), project="", run_id="", url=""
    )
    assert (found.tags, found.notes, found.start_step, found.run_id) == ((), "", 5, None)
    assert found.spool == spool_module.default_root()
    assert resolve(tags=(tag for tag in "ab")).tags == ("a", "b")
    assert resolve(run_id="...").run_id == "..."


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("hunter2-secret\nsecond-secret", r"holds U\+000A as character 15 of 28"),
        ("hunter2-secrét", r"holds U\+00E9 as character 13 of 14"),
        ("hunter2 secret", r"holds U\+0020"),
        ("hunter2\ud800secret", r"holds U\+D800"),
        ("hunter2secret" * 400, r"has 5200 characters"),
        (b"hunter2-secret", r"is a bytes"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_malformed_token_is_refused_and_never_shown(by, token, told, monkeypatch):
    if by == "argument":
        call = lambda: resolve(token=token)  # noqa: E731
    else:
        # As a process may have it whose environment was made by other means than this interpreter's.
        monkeypatch.setattr(os, "environ", {**os.environ, "GRADIOMETER_TOKEN": token})
        call = resolve
    with pytest.raises(ValueError, match=f"^token .*{told}") as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value))
    assert "secret" not in str(caught.value)
    assert not re.search("(?m)^ValueError.*(secret|hunter2)", shown)


def test_a_token_from_a_file_may_end_with_a_line(monkeypatch):
    monkeypatch.setenv("GRADIOMETER_TOKEN", "  a-token-of-sixteen\r\n")
    assert resolve().token == "a-token-of-sixteen"
    assert resolve(token="another\n").token == "another"
    monkeypatch.setenv("GRADIOMETER_TOKEN", " \n")
    assert resolve().token is None


def test_a_malformed_token_reaches_neither_the_terminal_nor_the_log_of_the_uplink(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("GRADIOMETER_TOKEN", "hunter2-secret\nsecond")
    run = wire.RunInfo(run_id="r", project="p", name="n", created_s=0.0)
    writer = spool_module.open_source(tmp_path, run, wire.SourceInfo(rank=0, attempt=1))
    with pytest.raises(uplink.UplinkError, match="token"):
        uplink.ensure_running(writer.attempt_directory, url="http://127.0.0.1:1", token="hunter2-secret\nx")
    assert cli.main(["sync", str(tmp_path)]) == 1
    with pytest.raises(ValueError, match="token"):
        transport._authorization("hunter2-secret\nx")
    writer.close()
    told = capfd.readouterr()
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "token (not shown) holds U+000A" in told.err + logs
    assert "hunter2" not in told.out + told.err + logs


def test_init_raises_before_it_touches_the_run_that_is_open(spool):
    with gm.init(mode="offline") as run:
        with pytest.raises(ValueError, match="mode"):
            gm.init(mode="nonsense")
        run.log({"x": 1.0})
        assert run.dropped == {}


def test_configs_of_every_kind():
    @dataclasses.dataclass
    class Options:
        lr: float = 0.1

    assert resolve(config=Options()).config == {"lr": 0.1}
    assert resolve(config=argparse.Namespace(layers=3)).config == {"layers": 3}
    config = {
        "nested": {1: (1, 2)},
        "path": Path("x"),
        "nan": math.nan,
        "big": 2**80,
        "np": np.float32(0.5),
        "on": True,
    }
    plain = resolve(config=config).config
    assert plain == {
        "nested": {"1": [1, 2]},
        "path": repr(Path("x")),
        "nan": "NaN",
        "big": str(2**80),
        "np": 0.5,
        "on": True,
    }
    cyclic = {}
    cyclic["self"] = cyclic
    assert isinstance(values.plain(cyclic), dict)


@dataclasses.dataclass(slots=True)
class Slotted:
    lr: float = 0.1
    inner: object = None
    unset: int = dataclasses.field(init=False)


class Broken(dict):
    def items(self):
        raise RuntimeError("broken")


def test_configs_that_are_hard_to_write_down():
    assert resolve(config=Slotted(inner=Slotted(lr=0.2))).config == {
        "lr": 0.1,
        "inner": {"lr": 0.2, "inner": None},
    }
    config = {
        "fraction": Fraction(10**400),
        "huge": 10**5000,
        Unprintable(): 1,
        "value": Unprintable(),
        "broken": Broken(a=1),
        "text\ud800": "\ud800",
    }
    found = resolve(config=config).config
    assert found["fraction"] == repr(Fraction(10**400))
    assert found["huge"] == "<int>"
    assert found["<Unprintable>"] == 1
    assert found["value"] == "<Unprintable>"
    assert found["text?"] == "?"
    assert isinstance(found["broken"], str)
    with pytest.raises(ValueError, match="config is a Broken that cannot be read"):
        resolve(config=Broken(a=1))


def test_run_ids_are_short_url_safe_and_sort_by_time():
    ids = [launch.new_run_id(time_ms) for time_ms in (0, 1, 31, 32, 1_700_000_000_000, 4_000_000_000_000)]
    assert ids == sorted(ids)
    assert all(re.fullmatch(r"[0-9a-hjkmnp-tv-z]{13}", run_id) for run_id in ids)
    assert launch.new_run_id(5, noise=0) == "0000000050000"
    assert len({launch.new_run_id(5) for _ in range(50)}) > 45
    assert wire.name_problem(ids[0]) is None


@pytest.fixture
def torchrun(monkeypatch):
    def set_environment(rank, world_size, **more):
        for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, **more}.items():
            monkeypatch.setenv(name, str(value))

    return set_environment


def test_ranks_of_one_launcher_agree_without_talking(torchrun, monkeypatch):
    found = []
    for rank in (0, 1):
        torchrun(rank, 2, LOCAL_WORLD_SIZE=2)
        monkeypatch.setattr(launch, "_num_launches", 0)
        found.append(launch.identify(resolve()))
    assert found[0].run_id == found[1].run_id
    assert found[0].attempt == found[1].attempt
    assert [one.rank for one in found] == [0, 1]
    monkeypatch.setattr(launch, "_num_launches", 0)
    torchrun(0, 2, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RESTART_COUNT=1)
    restarted = launch.identify(resolve())
    assert restarted.run_id == found[0].run_id
    assert restarted.attempt > found[0].attempt, "a restart is the next attempt"
    assert launch.identify(resolve()).run_id != found[0].run_id, "a second run of the process is another run"


def test_ranks_on_several_nodes_must_be_told(torchrun, monkeypatch):
    torchrun(3, 16, LOCAL_WORLD_SIZE=8)
    with pytest.raises(ValueError, match=r"after init_process_group\(\), or set GRADIOMETER_RUN_ID"):
        launch.identify(resolve())
    monkeypatch.setenv("GRADIOMETER_ATTEMPT", "1234")
    found = launch.identify(resolve(run_id="shared"))
    assert (found.run_id, found.attempt, found.rank, found.world_size) == ("shared", 1234, 3, 16)
    monkeypatch.setenv("GRADIOMETER_ATTEMPT", "yesterday")
    with pytest.raises(ValueError, match="GRADIOMETER_ATTEMPT is 'yesterday'"):
        resolve()


def test_nonsense_in_the_rank_variables_means_a_single_process(torchrun):
    torchrun("x", "y")
    found = launch.identify(resolve())
    assert (found.rank, found.world_size) == (0, 1)


def test_secrets_in_the_command_line_are_hidden():
    command = [
        "train.py",
        "--lr",
        "0.1",
        "--hf-token",
        "abc",
        "--api_key=def",
        "PASSWORD=ghi",
        "--auth",
        "--x",
        "y",
    ]
    assert environment.command_line(command) == (
        "train.py --lr 0.1 --hf-token *** --api_key=*** PASSWORD=*** --auth --x y"
    )


def test_arguments_that_are_no_text_are_described(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "data\udcff.bin"])
    assert environment.describe()["command"] == "train.py data?.bin"


def test_an_exception_of_any_text_is_told():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    assert exits.exception_attributes(ValueError("lone \ud800"))["message"] == "lone ?"
    told = exits.exception_attributes(Odd())
    assert told["message"] == "<Odd>"
    for error in (ValueError("\ud800"), Odd()):
        wire.encode(wire.Event(kind="exception", time=0.0, attributes=exits.exception_attributes(error)))


def test_the_environment_is_described_in_texts():
    found = environment.describe()
    assert all(isinstance(value, str) for value in found.values())
    assert found["python"].startswith(f"{sys.version_info.major}.")
    assert found["cpus"] == str(os.cpu_count())


@pytest.mark.parametrize(
    ("status", "code"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), ("text", 1), ([], 1)]
)
def test_exit_codes(status, code):
    assert exits.exit_code_of(status) == code
