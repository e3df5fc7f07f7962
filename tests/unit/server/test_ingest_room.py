"""What all connections together may hold."""

from __future__ import annotations

import asyncio

from gradiometer_server.ingest.room import SMALLEST_WINDOW_BYTES, WINDOW_BYTES, Room


async def test_who_comes_when_it_is_full_waits_in_line() -> None:
    room, order = Room(limit_bytes=100), []

    async def hold(name: str, num_bytes: int) -> None:
        await room.take(num_bytes)
        order.append(name)

    await hold("first", 80)
    waiting = [asyncio.create_task(hold(name, size)) for name, size in (("large", 60), ("small", 10))]
    await asyncio.sleep(0)
    assert order == ["first"], "the small one would fit, but not before the large one"
    room.give_back(80)
    await asyncio.gather(*waiting)
    assert order == ["first", "large", "small"]
    assert room.held_bytes == 70


async def test_one_message_fits_into_an_empty_room_however_large_it_is() -> None:
    room = Room(limit_bytes=100)
    await asyncio.wait_for(room.take(1000), 5)
    room.give_back(1000)
    assert room.held_bytes == 0


async def test_who_leaves_while_waiting_holds_nobody_up() -> None:
    room = Room(limit_bytes=100)
    await room.take(100)
    gone, next_one = asyncio.create_task(room.take(50)), asyncio.create_task(room.take(60))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    room.give_back(100)
    await asyncio.wait_for(next_one, 5)
    assert room.held_bytes == 60


async def test_who_leaves_when_its_turn_has_just_come_gives_it_back() -> None:
    room = Room(limit_bytes=100)
    await room.take(100)
    gone = asyncio.create_task(room.take(50))
    await asyncio.sleep(0)
    room.give_back(100)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert room.held_bytes == 0


async def test_a_thousand_agents_get_smaller_windows() -> None:
    room = Room()
    room.num_connections = 1
    assert room.window_bytes() == WINDOW_BYTES
    room.num_connections = 1024
    assert room.window_bytes() == 256 * 1024
    room.num_connections = 100_000
    assert room.window_bytes() == SMALLEST_WINDOW_BYTES
