"""Bytes of tensors, counted by storage; and what follows from a peak that others may reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradiometer.capture import memory, memory_ledger
from gradiometer.capture.memory import StorageBytes


def counted(*tensors):
    count = StorageBytes(set())
    count.add(tensors)
    return count


def test_a_storage_counts_once_and_whole():
    base = torch.zeros(100)
    count = counted(base, base.view(10, 10), base[:3], nn.Parameter(base))
    assert count.total == 400
    assert counted(base[:3]).total == 400, "what a view keeps alive is occupied"
    assert counted(torch.zeros(0)).total == 0


def test_by_dtype_and_device():
    count = counted(torch.zeros(5), torch.zeros(7, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int8))
    assert count.by_dtype == {"float32": 20, "bfloat16": 14, "int8": 3}
    assert (count.total, count.on(torch.device("cpu")), count.on(torch.device("cuda", 0))) == (37, 37, 0)


def test_what_was_counted_before_is_not_counted_again():
    first, seen = torch.zeros(4), set()
    one, other = StorageBytes(seen), StorageBytes(seen)
    one.add([first])
    other.add([first, torch.zeros(2)])
    assert (one.total, other.total) == (16, 8)


def test_tensors_made_of_others_and_tensors_without_memory():
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (5, 2), check_invariants=True)
    assert counted(sparse).total == 2 * 8 + 4 * 4
    assert counted(torch.zeros(9, device="meta")).total == 0
    assert counted(nn.parameter.UninitializedParameter()).total == 0


def test_a_layout_without_storages_is_told_apart():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no such layout")
    count = counted(torch.zeros(4).to_mkldnn(), torch.zeros(2))
    assert (count.num_unknown, count.total) == (1, 8)


def test_optimizer_states_may_be_nested():
    a, b, c = (torch.zeros(1) for _ in range(3))
    found = list(memory.tensors_in({"step": 3, "a": a, "past": [b, (c,)], "none": None, "name": "x"}))
    assert [id(one) for one in found] == [id(a), id(b), id(c)]


def device_ledger():
    told = []
    watched = SimpleNamespace(device=torch.device("cuda", 0), unavailable=lambda *what: told.append(what))
    return memory_ledger.DeviceLedger(watched), told


def test_a_peak_that_fell_was_reset_by_somebody():
    ledger, told = device_ledger()
    found = [ledger.of_peak(peak, 100.0) for peak in (150.0, 500.0, 500.0, 300.0, 300.0, 250.0, 90.0)]
    assert [one[memory_ledger.PEAK_RESETS] for one in found] == [0, 0, 0, 1, 1, 2, 3]
    assert [one[memory_ledger.ACTIVATIONS] for one in found] == [50, 400, 400, 200, 200, 150, 0]
    assert told == []


def test_the_allocators_numbers_by_name(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"current": 600, "peak": 900}},
        "reserved_bytes": {"all": {"current": 1000, "peak": 1000}},
        "inactive_split_bytes": {"all": {"current": 250, "peak": 300}},
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert memory.device_numbers(torch.device("cuda", 0)) == {
        "memory/allocated_bytes": 600.0,
        "memory/reserved_bytes": 1000.0,
        "memory/peak_allocated_bytes": 900.0,
        "memory/alloc_retries": 2.0,
        "memory/fragmentation_fraction": 0.25,
    }
    stats["reserved_bytes"]["all"]["current"] = 0
    assert memory.device_numbers(torch.device("cuda", 0))["memory/fragmentation_fraction"] == 0.0
