"""Back-off, addresses, lock, wake socket, acknowledgement files: the small parts of the uplink."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradiometer import uplink
from gradiometer.spool import SpoolError
from gradiometer.uplink.backoff import LONGEST_S, Backoff
from gradiometer.uplink.delivery import wait_briefly
from gradiometer.uplink.state import Lock, UplinkState, open_wake_socket, read_state, wake, write_state
from gradiometer.uplink.transport import check_url, post_url, websocket_url


def test_backoff_doubles_to_its_limit_and_success_resets_it() -> None:
    backoff = Backoff(lambda: 0.0)
    waits_s = [backoff.next_s() for _ in range(9)]
    assert waits_s == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0])
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.2)


def test_jitter_shortens_all_waits_but_the_first() -> None:
    backoff = Backoff(lambda: 0.999)
    assert backoff.next_s() == pytest.approx(0.2)
    assert 0.2 <= backoff.next_s() < 0.21
    for _ in range(2000):
        assert 0.2 <= backoff.next_s() <= LONGEST_S


@pytest.mark.parametrize("num_ticks", [0, 1, 2, 3])
async def test_a_cancellation_close_to_the_event_is_not_lost(num_ticks: int) -> None:
    event = asyncio.Event()
    task = asyncio.create_task(wait_briefly(event, 60.0))
    await asyncio.sleep(0)
    event.set()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    had_returned = task.done()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert had_returned or task.cancelled()


async def test_a_brief_wait_ends_by_itself_or_with_the_event() -> None:
    event = asyncio.Event()
    await wait_briefly(event, 0.001)
    assert not event.is_set()
    event.set()
    await asyncio.wait_for(wait_briefly(event, 60.0), 5)


ADDRESSES = [
    ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/api/v1/ingest", "http://127.0.0.1:8000/api/v1/ingest"),
    ("https://host/", "wss://host/api/v1/ingest", "https://host/api/v1/ingest"),
    ("https://host/ml/gm/", "wss://host/ml/gm/api/v1/ingest", "https://host/ml/gm/api/v1/ingest"),
    ("ws://[::1]:80", "ws://[::1]:80/api/v1/ingest", "http://[::1]:80/api/v1/ingest"),
    ("HTTPS://host", "wss://host/api/v1/ingest", "https://host/api/v1/ingest"),
]


@pytest.mark.parametrize(("url", "socket_url", "http_url"), ADDRESSES)
def test_the_addresses_keep_a_path_prefix(url: str, socket_url: str, http_url: str) -> None:
    assert websocket_url(url) == socket_url
    assert post_url(url) == http_url


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://h?x=1", "http://h#x", "http://h:port"]
)
def test_a_bad_address_says_what_is_wrong(url: str) -> None:
    with pytest.raises(ValueError, match=r"GRADIOMETER_URL|[Pp]ort"):
        check_url(url)


def test_only_one_holds_the_lock_and_its_end_frees_it(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert not Lock(tmp_path).is_held()
    assert first.acquire()
    assert not second.acquire(patience_s=0.05)
    assert Lock(tmp_path).is_held()
    first.release()
    assert not Lock(tmp_path).is_held()
    assert second.acquire()
    second.release()


def test_somebody_who_only_asks_does_not_keep_the_lock_from_an_uplink(tmp_path: Path) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            Lock(tmp_path).is_held()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        lock = Lock(tmp_path)
        assert lock.acquire(patience_s=10.0)
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    lock.release()


def test_a_lock_whose_file_was_removed_holds_nobody_up(tmp_path: Path) -> None:
    leaving, coming = Lock(tmp_path), Lock(tmp_path)
    assert leaving.acquire()
    leaving.remove()
    assert not Lock(tmp_path).is_held()
    assert coming.acquire()
    leaving.release()
    coming.release()


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match=r"cannot lock .*uplink\.lock.*local disk"):
        Lock(tmp_path / "missing").acquire()


@pytest.mark.parametrize("depth", [0, 2])
def test_wake_reaches_the_socket_in_shallow_and_deep_folders(tmp_path: Path, depth: int) -> None:
    directory = tmp_path.joinpath(*["d" * 90] * depth)
    directory.mkdir(parents=True, exist_ok=True)
    assert wake(directory) is False
    sock = open_wake_socket(directory)
    assert sock is not None
    assert wake(directory)
    assert sock.recv(10)
    # A queue full of wake-ups neither blocks nor fails.
    started_s = time.monotonic()
    assert all(wake(directory) for _ in range(5000))
    assert time.monotonic() - started_s < 5.0
    sock.close()
    assert wake(directory) is False
    again = open_wake_socket(directory)
    assert again is not None, "the socket of a dead uplink is in nobody's way"
    again.close()


def test_wake_never_raises(tmp_path: Path) -> None:
    assert wake(tmp_path / "missing") is False
    assert wake(tmp_path / ("x" * 300)) is False
    (tmp_path / "wake.sock").write_text("not a socket")
    assert wake(tmp_path) is False


def test_the_state_survives_a_round_trip_and_nonsense_is_no_state(tmp_path: Path) -> None:
    state = UplinkState(pid=1, url="http://x", state="connected", acked={0: 3, 11: 4})
    assert read_state(tmp_path) is None
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    (tmp_path / "uplink.json").write_text("{")
    assert read_state(tmp_path) is None


def rank_folder(tmp_path: Path, acked: str) -> Path:
    folder = tmp_path / "rank-00002"
    folder.mkdir()
    (folder / "acked").write_text(acked)
    return folder


def test_wait_delivered_reads_the_acknowledgement(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path, "5\n")
    assert uplink.wait_delivered(tmp_path, 2, 5, 0.0)
    started_s = time.monotonic()
    assert not uplink.wait_delivered(tmp_path, 2, 6, 0.1)
    assert 0.1 <= time.monotonic() - started_s < 2.0
    timer = threading.Timer(0.1, lambda: (folder / "acked").write_text("6\n"))
    timer.start()
    assert uplink.wait_delivered(tmp_path, 2, 6, 10.0)
    timer.join()


def test_wait_delivered_takes_a_removed_folder_for_delivered(tmp_path: Path) -> None:
    assert uplink.wait_delivered(tmp_path, 0, 99, 10.0)


def test_wait_delivered_does_not_wait_for_an_uplink_that_stopped(tmp_path: Path) -> None:
    rank_folder(tmp_path, "5\n")
    write_state(tmp_path, UplinkState(pid=1, url="http://x", state="stopped"))
    started_s = time.monotonic()
    assert not uplink.wait_delivered(tmp_path, 2, 6, 60.0)
    assert time.monotonic() - started_s < 5.0


def test_the_trainer_loads_neither_torch_nor_a_websocket_client() -> None:
    program = (
        "import sys, gradiometer.spool, gradiometer.uplink, gradiometer.cli\n"
        "print(sorted({'torch', 'numpy', 'websockets', 'asyncio', 'urllib.request'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
