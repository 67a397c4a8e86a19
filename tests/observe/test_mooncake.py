"""Mooncake's engine, observed, with arguments by position and by name."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.observe import Observer
from kvplan.observe.observer import peer_number
from kvplan.observe.surfaces import wrap_mooncake
from kvplan.recording import read


class TransferEngine:
    """An engine with the argument names of the original's bindings."""

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        return 0

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        return 0

    def batch_register_memory(
        self, buffer_addresses: list[int], capacities: list[int], location: str = "*"
    ) -> int:
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        return 0

    def batch_unregister_memory(self, buffer_addresses: list[int]) -> int:
        return 0

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        return 0

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any
    ) -> int:
        if buffers is None:
            raise TypeError("buffers")
        return 0


def observed(**methods: Callable[..., Any]) -> type[Any]:
    """Return a new class, with these methods instead of its own, which are not wrapped yet."""
    return type("TransferEngine", (), vars(TransferEngine) | methods)


def begun(engine: Any, name: str = "host:1") -> Any:
    assert engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


CALLS = [
    ("register_memory", {"buffer_addr": 1000, "capacity": 64}),
    ("batch_register_memory", {"buffer_addresses": [2000, 3000], "capacities": [32, 16]}),
    (
        "transfer_sync_read",
        {"target_hostname": "p", "buffer": 1008, "peer_buffer_address": 7, "length": 8},
    ),
    (
        "batch_transfer_sync_write",
        {
            "target_hostname": "p",
            "buffers": [2000, 3001],
            "peer_buffer_addresses": [7, 9],
            "lengths": [2, 4],
        },
    ),
    ("unregister_memory", {"buffer_addr": 1000}),
    ("batch_unregister_memory", {"buffer_addresses": [2000, 3000]}),
]


@pytest.mark.parametrize("num_by_position", [0, 1, 4])
def test_arguments_may_have_names(tmp_path: Path, num_by_position: int) -> None:
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = observed()  # type: ignore[attr-defined]
    observer = Observer(tmp_path)
    wrap_mooncake(module, observer)
    engine = begun(module.TransferEngine())
    for method, given in CALLS:
        positions = [*given.values()][:num_by_position]
        names = dict([*given.items()][num_by_position:])
        assert getattr(engine, method)(*positions, **names) == 0
    observer.close()
    (path,) = tmp_path.glob("*.kvrec")
    recording = read(path)
    rows = [(row.operation, row.fields.get("bytes")) for row in recording.events]
    registered = [("register_cache", nbytes) for nbytes in (64, 32, 16)]
    assert rows == [("observe", None), *registered, *[("unregister_cache", None)] * 3]
    caches = [row.fields["cache"] for row in recording.events if "cache" in row.fields]
    assert caches == [0, 1, 2] * 2
    pull, push = recording.transfers
    assert (pull.operation, pull.nbytes) == ("pull_ranges", 8)
    assert (push.operation, push.nbytes) == ("push_ranges", 6)


@pytest.mark.parametrize("method", ["initialize", "initialize_ext"])
@pytest.mark.parametrize(
    ("given", "name"), [("host", "host:15428"), ("host:1", "host:1"), ("[::1]:7", "[::1]:7")]
)
def test_an_engine_has_the_name_by_which_peers_know_it(
    tmp_path: Path, method: str, given: str, name: str
) -> None:
    """A name without a port gets that of the engine."""
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = observed(  # type: ignore[attr-defined]
        get_rpc_port=lambda engine: 15428, initialize_ext=lambda engine, *names: 0
    )
    observer = Observer(tmp_path)
    wrap_mooncake(module, observer)
    assert getattr(module.TransferEngine(), method)(given, "P2PHANDSHAKE", "tcp", "") == 0
    observer.close()
    (path,) = tmp_path.glob("*.kvrec")
    recording = read(path)
    assert [row.fields["name"] for row in recording.events] == [name]
    assert recording.header.cluster_id == peer_number(name)


def test_an_engine_at_the_place_of_another_has_a_recording_of_its_own(tmp_path: Path) -> None:
    """An id is reused: the earlier recording is complete, with all of its calls."""
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = observed()  # type: ignore[attr-defined]
    observer = Observer(tmp_path)
    wrap_mooncake(module, observer)
    engine = begun(module.TransferEngine(), "first:1")
    memory = np.zeros(64, np.uint8)
    assert engine.register_memory(memory.ctypes.data, 64) == 0
    # stands for an engine that is collected, and another made in its place
    begun(engine, "second:1")
    gc.collect()
    observer.flush()
    (path,) = tmp_path.glob("*first*.kvrec")
    first = read(path)
    assert first.complete
    assert [row.operation for row in first.events] == ["observe", "register_cache"]
    observer.close()
    (path,) = tmp_path.glob("*second*.kvrec")
    assert [row.operation for row in read(path).events] == ["observe"]


@pytest.mark.parametrize("method", ["transfer_sync_read", "batch_transfer_sync_write"])
def test_a_transfer_that_raises_is_recorded_with_its_reason(tmp_path: Path, method: str) -> None:
    def stopped(*_: object) -> int:
        raise TimeoutError("the peer is stopped")

    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = observed(**{method: stopped})  # type: ignore[attr-defined]
    observer = Observer(tmp_path)
    wrap_mooncake(module, observer)
    engine = begun(module.TransferEngine())
    engine.register_memory(1000, 64)
    with pytest.raises(TimeoutError, match="the peer is stopped"):
        getattr(engine, method)("p", *([[1000], [7], [8]] if "batch" in method else [1000, 7, 8]))
    observer.close()
    (path,) = tmp_path.glob("*.kvrec")
    (transfer,) = read(path).transfers
    assert transfer.failed
    assert (transfer.nbytes, transfer.error) == (0, "TimeoutError: the peer is stopped")


STRANGE: dict[str, tuple[Any, ...]] = {
    "none": ([], [], []),
    "of 0 bytes": ([1000], [7], [0]),
    "beyond int64": ([2**63], [7], [8]),
    "of other lengths": ([1000, 1008, 1016], [7, 8], [8, 8, 8]),
    "no numbers": (None, [7], [8]),
    "no number inside": ([None], [7], [8]),
}


@pytest.mark.parametrize("given", STRANGE.values(), ids=STRANGE)
def test_ranges_that_cannot_move_end_neither_the_recording_nor_its_readers(
    tmp_path: Path, given: tuple[Any, ...]
) -> None:
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = observed()  # type: ignore[attr-defined]
    observer = Observer(tmp_path)
    wrap_mooncake(module, observer)
    engine = begun(module.TransferEngine())
    engine.register_memory(1000, 64)
    with suppress(TypeError):
        engine.batch_transfer_sync_write("p", *given)
    engine.batch_transfer_sync_write("p", [1000], [7], [8])
    observer.close()
    (path,) = tmp_path.glob("*.kvrec")
    *before, last = read(path).transfers
    assert last.nbytes == 8
    assert all(transfer.plan is None for transfer in before)
