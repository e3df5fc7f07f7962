"""How fast a real server takes in, makes durable and folds what agents send over their own protocol.

    python benchmarks/ingest.py [--engine sqlite|postgresql] [--only bulk,scalars,runs,ranks,ack] [--seconds 300]

The server is a process of its own with a database of its own for each workload; the agents are WebSocket connections
of this process. A value is acknowledged when the ack that covers it has come, which the server sends after the commit,
and folded when REST shows it. Afterwards values are read back over REST and compared bit for bit.

* `bulk`: one run, 169 layers x 7 statistics and a loss per step (1,184 values), as fast as the window allows
* `scalars`: one run, 10 metrics x 1,000,000 steps, float64: exp(random walk) with 5 % of noise
* `runs`: `bulk` in 50 runs at once
* `ranks`: 1,024 ranks that each hold a shard of 169 layers, 1,184 values each at 1 step/s for `--seconds`
* `ack`: 50 runs x 1,184 values x 10 steps/s for a fifth of `--seconds`: from the send of a step to its ack, after the
  first two seconds, in which every series of every run is made

Prints a line for each and writes `benchmarks/results/ingest_<engine>_<date>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ingest_agents as agents
import numpy as np
import processes
import record
import sqlalchemy
from ingest_agents import Agent
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
NUM_LAYERS = 169
LAYER_VALUES = NUM_LAYERS * 7
VALUES_PER_STEP = LAYER_VALUES + 1
STEPS_PER_FRAME = 8
"""What an agent puts into one record of layers at most."""
POOL_STEPS = 4096
"""Steps of different values; then they begin again, far beyond the length of a block."""
WARMUP_STEPS = 20
NUM_RANKS, NUM_RUNS = 1024, 50
SCALARS = ("train/loss", "train/lr", "train/accuracy", "eval/loss", *(f"custom/metric_{i}" for i in range(6)))
READ_STEPS = 4000


class Load:
    """One workload: what it sends, and what must be there afterwards. `figures` collects what was measured."""

    def __init__(self, server: processes.Server) -> None:
        self.server = server
        self.figures: dict[str, Any] = {}
        self.pool_SLP = agents.partials(POOL_STEPS, NUM_LAYERS)
        self.loss_S = agents.noisy_walks(POOL_STEPS, 1)[:, 0]

    def records(self, num_steps: int) -> list[bytes]:
        """Layers and loss of steps 1.. in the records that an agent makes of them."""
        found = [agents.layer_schema(NUM_LAYERS), agents.scalar_schema("train/loss")]
        for first in range(1, num_steps + 1, STEPS_PER_FRAME):
            steps = np.arange(first, min(first + STEPS_PER_FRAME, num_steps + 1)) % POOL_STEPS
            found.append(agents.frame(1, first, self.pool_SLP[steps].reshape(len(steps), -1)))
            found.append(agents.frame(2, first, self.loss_S[steps, None]))
        return found

    async def lag_s(self, run_id: str, last_step: int, metric: str = "train/loss") -> float:
        """Seconds from now until REST shows `last_step`."""
        began_s = time.perf_counter()
        query = {"series": [{"run": run_id, "metric": metric}], "from": last_step, "to": last_step}
        while True:
            [answer] = (await asyncio.to_thread(self.server.post, "/series/query", query))["series"]
            if answer["points"]["step"] == [last_step]:
                return time.perf_counter() - began_s
            await asyncio.sleep(0.02)

    def check_scalar(self, run_id: str, values: dict[str, NDArray[np.float64]]) -> int:
        """Compare metrics whose steps are 1, 2, ...; returns how many values are the same."""
        num_steps = len(next(iter(values.values())))
        for first in range(1, num_steps + 1, READ_STEPS):
            last = min(first + READ_STEPS - 1, num_steps)
            query = {
                "series": [{"run": run_id, "metric": name} for name in values],
                "from": first,
                "to": last,
            }
            for name, answer in zip(
                values, self.server.post("/series/query", query | {"buckets": 5000})["series"], strict=True
            ):
                points = answer["points"]
                assert points["step"] == list(range(first, last + 1)), (run_id, name, first)
                assert np.array_equal(np.array(points["mean"]), values[name][first - 1 : last]), (
                    run_id,
                    name,
                    first,
                )
        return num_steps * len(values)

    def check_layers(self, run_id: str, partials_SLP: NDArray[np.float64]) -> int:
        """Compare all statistics of steps 1, 2, ...; returns how many values are the same."""
        num_steps = len(partials_SLP)
        for name, values_SL in agents.layer_statistics(partials_SLP).items():
            for first in range(1, num_steps + 1, READ_STEPS):
                last = min(first + READ_STEPS - 1, num_steps)
                path = f"/runs/{run_id}/layers?statistic={name}&from={first}&to={last}&columns={READ_STEPS}"
                answer = self.server.get(path)
                assert answer["steps"] == list(range(first, last + 1)), (run_id, name, first)
                got_LS = np.array(answer["values"], dtype=np.float64)
                assert np.array_equal(got_LS.T, values_SL[first - 1 : last]), (run_id, name, first)
        return num_steps * LAYER_VALUES

    def check(self, run_id: str, num_steps: int) -> int:
        """Compare what `records(num_steps)` holds."""
        steps = np.arange(1, num_steps + 1) % POOL_STEPS
        same = self.check_scalar(run_id, {"train/loss": self.loss_S[steps]})
        return same + self.check_layers(run_id, self.pool_SLP[steps])


async def bulk(load: Load, options: argparse.Namespace) -> int:
    num_steps = options.steps
    records = load.records(num_steps)
    agent = await Agent(load.server.url, "bulk").open()
    await timed(load, num_steps * VALUES_PER_STEP, lambda: agents.send_all(agent, records), "bulk", num_steps)
    await agent.close()
    return await asyncio.to_thread(load.check, "bulk", num_steps)


async def scalars(load: Load, options: argparse.Namespace) -> int:
    num_steps, per_frame = options.scalar_steps, 1000
    values_SC = agents.noisy_walks(num_steps, len(SCALARS))
    records = [agents.scalar_schema(*SCALARS)]
    records += [
        agents.frame(2, at + 1, values_SC[at : at + per_frame]) for at in range(0, num_steps, per_frame)
    ]
    agent = await Agent(load.server.url, "scalars").open()
    await timed(load, values_SC.size, lambda: agents.send_all(agent, records), "scalars", num_steps)
    await agent.close()
    columns = {name: values_SC[:, at] for at, name in enumerate(SCALARS)}
    return await asyncio.to_thread(load.check_scalar, "scalars", columns)


async def runs(load: Load, options: argparse.Namespace) -> int:
    num_steps = max(STEPS_PER_FRAME, options.steps // NUM_RUNS)
    records = load.records(num_steps)
    opened = [await Agent(load.server.url, f"run-{number}").open() for number in range(NUM_RUNS)]

    async def send() -> None:
        await asyncio.gather(*(agents.send_all(agent, records) for agent in opened))

    await timed(load, NUM_RUNS * num_steps * VALUES_PER_STEP, send, f"run-{NUM_RUNS - 1}", num_steps)
    await asyncio.gather(*(agent.close() for agent in opened))
    names = [f"run-{number}" for number in range(NUM_RUNS)]
    return sum([await asyncio.to_thread(load.check, name, num_steps) for name in names])


async def timed(
    load: Load, num_values: int, send: Callable[[], Awaitable[None]], run_id: str, last: int
) -> None:
    """Send, wait for the last ack, then for the fold."""
    began_s = time.perf_counter()
    await send()
    acked_s = time.perf_counter() - began_s
    lag_s = await load.lag_s(run_id, last)
    load.figures |= {
        "values": num_values,
        "acked_values_per_s": round(num_values / acked_s),
        "folded_values_per_s": round(num_values / (acked_s + lag_s)),
        "lag_s": round(lag_s, 2),
    }


async def ranks(load: Load, options: argparse.Namespace) -> int:
    num_ranks = options.ranks
    seats = asyncio.Semaphore(64)

    async def join(rank: int) -> Agent:
        async with seats:
            agent = await Agent(load.server.url, "ranks", rank=rank, world_size=num_ranks).open()
            schema = agents.layer_schema(NUM_LAYERS, rank=rank, num_shards=num_ranks)
            await agent.send(schema, agents.scalar_schema("train/loss"))
            await agent.drained()
            return agent

    opened = await asyncio.gather(*(join(rank) for rank in range(num_ranks)))

    def at(rank: int, step: int) -> int:
        return (rank * 31 + step * 17) % POOL_STEPS

    async def step_of_all(step: int) -> None:
        for rank, agent in enumerate(opened):
            place = at(rank, step)
            await agent.send(
                agents.frame(1, step, load.pool_SLP[place].reshape(1, -1), step_s=1.0),
                agents.frame(2, step, load.loss_S[place].reshape(1, 1), step_s=1.0),
            )

    for agent in opened:
        agent.latencies_s.clear()
    began_s = time.perf_counter()
    num_steps = await at_rate(step_of_all, options.seconds, 1.0)
    await asyncio.gather(*(agent.drained() for agent in opened))
    lag_s = await load.lag_s("ranks", num_steps)
    spent_s = max(num_steps, time.perf_counter() - began_s)
    load.figures |= latencies(opened) | {
        "values": num_steps * num_ranks * VALUES_PER_STEP,
        "values_per_s": round(num_steps * num_ranks * VALUES_PER_STEP / spent_s),
        "seconds": num_steps,
        "lag_s": round(lag_s, 2),
    }
    await asyncio.gather(*(agent.close() for agent in opened))
    return await asyncio.to_thread(check_ranks, load, num_ranks, num_steps, at)


def check_ranks(load: Load, num_ranks: int, num_steps: int, at: Callable[[int, int], int]) -> int:
    places = [[at(rank, step) for rank in range(num_ranks)] for step in range(1, num_steps + 1)]
    merged_SLP = np.stack([agents.merged(load.pool_SLP[of_step]) for of_step in places])
    same = load.check_layers("ranks", merged_SLP)
    for rank in range(0, num_ranks, max(1, num_ranks // 16)):
        expected = [load.loss_S[of_step[rank]] for of_step in places]
        query = {"series": [{"run": "ranks", "metric": "train/loss", "rank": rank}], "buckets": 5000}
        [answer] = load.server.post("/series/query", query)["series"]
        assert answer["points"]["mean"] == expected, rank
        same += num_steps
    return same


async def ack(load: Load, options: argparse.Namespace) -> int:
    every_s, seconds = 0.1, max(2, options.seconds // 5)
    opened = [await Agent(load.server.url, f"run-{number}").open() for number in range(NUM_RUNS)]
    for agent in opened:
        await agent.send(agents.layer_schema(NUM_LAYERS), agents.scalar_schema("train/loss"))
        await agent.drained()
        agent.latencies_s.clear()

    async def one(number: int, agent: Agent) -> int:
        await asyncio.sleep(number * every_s / NUM_RUNS)

        async def step_of(step: int) -> None:
            if step == WARMUP_STEPS:
                agent.latencies_s.clear()
            place = step % POOL_STEPS
            await agent.send(
                agents.frame(1, step, load.pool_SLP[place].reshape(1, -1)),
                agents.frame(2, step, load.loss_S[place].reshape(1, 1)),
            )

        num_steps = await at_rate(step_of, seconds, every_s)
        await agent.drained()
        return num_steps

    began_s = time.perf_counter()
    [num_steps] = set(await asyncio.gather(*(one(number, agent) for number, agent in enumerate(opened))))
    num_values = NUM_RUNS * num_steps * VALUES_PER_STEP
    spent_s = time.perf_counter() - began_s
    lag_s = await load.lag_s(f"run-{NUM_RUNS - 1}", num_steps)
    load.figures |= latencies(opened) | {
        "values": num_values,
        "values_per_s": round(num_values / spent_s),
        "lag_s": round(lag_s, 2),
    }
    await asyncio.gather(*(agent.close() for agent in opened))
    names = [f"run-{number}" for number in range(0, NUM_RUNS, 10)]
    return sum([await asyncio.to_thread(load.check, name, num_steps) for name in names])


async def at_rate(send: Callable[[int], Awaitable[None]], seconds: float, every_s: float) -> int:
    """Send steps 1, 2, ... one each `every_s`; returns how many."""
    num_steps = round(seconds / every_s)
    began_s = time.perf_counter()
    for step in range(1, num_steps + 1):
        await send(step)
        await asyncio.sleep(max(0.0, began_s + step * every_s - time.perf_counter()))
    return num_steps


def latencies(opened: Sequence[Agent]) -> dict[str, Any]:
    found = record.spread(latency for agent in opened for latency in agent.latencies_s)
    return {f"ack_{name}": value for name, value in found.items()}


def stored(database: str) -> dict[str, float]:
    """Bytes per value of the blocks, by kind of series, and of the whole database without its free pages."""
    blobs = """
        SELECT s.kind, s.key, SUM(c.n * s.width), SUM(length(c.data) + length(c.summary) + coalesce(length(c.steps), 0) + 80)
        FROM chunk c JOIN series s ON s.run_id = c.run_id AND s.series_id = c.series_id GROUP BY s.kind, s.key"""
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(blobs).all()
        if engine.dialect.name == "sqlite":
            one = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        else:
            one = "SELECT pg_total_relation_size('chunk') + pg_total_relation_size('series')"
        total = connection.exec_driver_sql(one).scalar_one()
    engine.dispose()
    # Some statistics of healthy layers hardly vary; the goal is for those that do.
    varied = ("layer/norm", "layer/rms", "layer/mean", "layer/std", "layer/abs_max")
    groups = {
        "layers": [row for row in rows if row[0] == "layer"],
        "layers_that_vary": [
            row for row in rows if row[0] == "layer" and row[1].removeprefix("_").endswith(varied)
        ],
        "scalars": [row for row in rows if row[0] == "scalar"],
    }
    found = {
        f"bytes_per_value_{name}": round(
            float(sum(row[3] for row in group) / sum(row[2] for row in group)), 2
        )
        for name, group in groups.items()
        if group
    }
    num_values = sum(row[2] for row in rows if row[1] != "_time")
    return found | {"bytes_per_value_of_all_tables": round(float(total / num_values), 2)}


@contextlib.contextmanager
def database_of(engine: str, folder: Path) -> Iterator[str]:
    """URL of an empty database."""
    if engine == "sqlite":
        yield f"sqlite:///{folder / 'benchmark.db'}"
        return
    sys.path.insert(0, str(ROOT))
    from tests.support.postgres import PostgresCluster

    with contextlib.closing(PostgresCluster()) as cluster:
        yield cluster.create_database()


WORKLOADS: dict[str, Callable[[Load, argparse.Namespace], Awaitable[int]]] = {
    "bulk": bulk, "scalars": scalars, "runs": runs, "ranks": ranks, "ack": ack,
}  # fmt: skip


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="gradiometer-ingest-") as text,
        database_of(options.engine, Path(text)) as database,
    ):
        with processes.Server(Path(text), database=database) as server:
            load = Load(server)
            same = asyncio.run(WORKLOADS[name](load, options))
            load.figures |= {
                "load_1min": round(os.getloadavg()[0], 1),
                "server_cpu_s": round(processes.cpu_s(server.pid), 1),
                "client_cpu_s": round(time.process_time(), 1),
                "read_back_alike": same,
                "server_peak_mib": round(processes.memory_mib(server.pid, peak=True)),
            }
        load.figures |= stored(database)
    return load.figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--seconds", type=int, default=300, help="of `ranks` (300); `ack` takes a fifth")
    parser.add_argument(
        "--steps", type=int, default=12_000, help="of `bulk`, and of all runs of `runs` together"
    )
    parser.add_argument("--scalar-steps", type=int, default=1_000_000, help="of `scalars`")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, help="of `ranks`")
    options = parser.parse_args()
    figures: dict[str, Any] = {"engine": options.engine}
    for name in options.only.split(","):
        figures[name] = measure(name, options)
        print(name, figures[name], flush=True)
    path = record.save("ingest", figures, name=f"ingest_{options.engine}")
    print(path.name)


if __name__ == "__main__":
    main()
