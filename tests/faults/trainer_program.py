"""A trainer without torch, run as a process by tests: writes numbered records to its spool, then ends as it is told.

`python -m tests.faults.trainer_program SPOOL URL RUN_ID RANK STEPS END`; prints a line per record. STEPS 0: for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from gradiometer import spool, uplink, wire

ATTEMPT = 1_800_000_000_000


def main() -> None:
    root, url, run_id, rank, num_steps, end = sys.argv[1:]
    source = wire.SourceInfo(rank=int(rank), attempt=ATTEMPT, world_size=2, pid=os.getpid())
    run = wire.RunInfo(run_id=run_id, project="tests", name=run_id, created_s=time.time())
    writer = spool.open_source(Path(root), run, source)
    fault_log = (writer.directory / "fault.log").open("w")
    faulthandler.enable(fault_log)
    uplink.ensure_running(writer.attempt_directory, url=url, token=None)
    schema = wire.ScalarSchema(schema_id=1, columns=(wire.Column("train/loss"),))
    say(writer, wire.encode(schema))
    step = 0
    while step < int(num_steps) or num_steps == "0":
        step += 1
        values = ctypes.c_double(1.0 / step)
        frame = wire.Frame(schema_id=1, steps=(step,), times=(time.time(),), values=bytes(values))
        say(writer, wire.encode(frame))
        time.sleep(0.002)
    finish(writer, end)


def say(writer: spool.SpoolWriter, record: bytes) -> None:
    seq = writer.append(record)
    uplink.wake(writer.attempt_directory)
    print(seq, flush=True)


def finish(writer: spool.SpoolWriter, end: str) -> None:
    match end:
        case "normal":
            attributes = {"code": 0, "signal": None, "inferred": False, "reason": "finished"}
            say(writer, wire.encode(wire.Event(kind="exit", time=time.time(), attributes=attributes)))
        case "segfault":
            ctypes.string_at(0)
        case "_exit":
            os._exit(3)
        case "exit":
            sys.exit(2)
        case "exception":
            raise RuntimeError("the training failed")
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        case "wait":
            signal.pause()


if __name__ == "__main__":
    main()
