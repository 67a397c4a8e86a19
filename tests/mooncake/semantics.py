"""A program for two implementations of Mooncake's engine, which prints the outcome of each row.

`python semantics.py MODULE` imports MODULE (`mooncake.engine`, `kvplan.mooncake.engine`). A row is
a small use of two engines in one process. Its outcome is a value that JSON has, or an exception.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

Row = Callable[["World"], Any]
ROWS: dict[str, Row] = {}
SIZE = 1 << 16


def row(call: Row) -> Row:
    ROWS[call.__name__] = call
    return call


class World:
    """Two engines with memory."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.here, self.there = self.engine(), self.engine()
        self.mine = np.zeros(SIZE, np.uint8)
        self.theirs = (np.arange(SIZE) % 251).astype(np.uint8)
        self.a, self.b = self.mine.ctypes.data, self.theirs.ctypes.data
        assert self.here.register_memory(self.a, SIZE) == 0
        assert self.there.register_memory(self.b, SIZE) == 0
        self.peer = f"127.0.0.1:{self.there.get_rpc_port()}"

    def engine(self) -> Any:
        engine = self.module.TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        return engine

    def end(self, batch: int) -> int:
        status = 0
        deadline = time.monotonic() + 30
        while status == 0 and time.monotonic() < deadline:
            status = self.here.transfer_check_status(batch)
        return int(status)


def sign(number: int) -> str:
    """Return the sign only: error numbers differ, and programs look only for an error."""
    return "0" if number == 0 else "above 0" if number > 0 else "below 0"


def raised(call: Callable[[], Any]) -> str:
    try:
        value = call()
    except Exception as error:
        return type(error).__name__
    return f"returned a {type(value).__name__}"


@row
def a_read(world: World) -> Any:
    status = world.here.transfer_sync_read(world.peer, world.a + 8, world.b + 100, 5000)
    return status, bool((world.mine[8:5008] == world.theirs[100:5100]).all()), int(world.mine[5008])


@row
def a_write(world: World) -> Any:
    world.mine[:] = 255
    status = world.here.transfer_sync_write(world.peer, world.a, world.b + 100, 500)
    return status, world.theirs.tolist().count(255)


@row
def a_batch_of_reads(world: World) -> Any:
    local, remote = [world.a, world.a + 100, world.a + 64], [world.b + 1, world.b + 2, world.b + 3]
    status = world.here.batch_transfer_sync_read(world.peer, local, remote, [1, 2, 3])
    return status, world.mine[[0, 64, 65, 66, 100, 101]].tolist()


@row
def a_batch_of_writes(world: World) -> Any:
    world.mine[:] = 255
    status = world.here.batch_transfer_sync_write(
        world.peer, [world.a, world.a + 9], [world.b, world.b + 9], [4, 5]
    )
    return status, world.theirs[:16].tolist()


@row
def transfers_by_their_operation(world: World) -> Any:
    read, write = world.module.TransferOpcode.Read, world.module.TransferOpcode.Write
    return [
        world.here.transfer_sync(world.peer, world.a, world.b, 64, read),
        world.here.transfer_sync(world.peer, world.a, world.b, 64, write),
        world.here.batch_transfer_sync(world.peer, [world.a], [world.b], [64], read),
        repr(read),
        int(read),
        int(write),
    ]


@row
def an_asynchronous_batch(world: World) -> Any:
    batch = world.here.batch_transfer_async_read(world.peer, [world.a], [world.b + 1], [64])
    status = world.here.get_batch_transfer_status([batch])
    return sign(batch), status, int(world.mine[0])


@row
def several_asynchronous_batches(world: World) -> Any:
    batches = [
        world.here.batch_transfer_async_write(world.peer, [world.a + i], [world.b + i], [1])
        for i in range(5)
    ]
    return world.here.get_batch_transfer_status(batches), world.theirs[:7].tolist()


@row
def a_submitted_write(world: World) -> Any:
    world.mine[:] = 255
    batch = world.here.transfer_submit_write(world.peer, world.a, world.b, 64)
    return sign(batch), world.end(batch), world.theirs.tolist().count(255)


@row
def no_batches(world: World) -> Any:
    return world.here.get_batch_transfer_status([])


@row
def an_empty_batch(world: World) -> Any:
    return sign(world.here.batch_transfer_sync_read(world.peer, [], [], []))


@row
def lists_of_unequal_lengths(world: World) -> Any:
    return sign(world.here.batch_transfer_sync_read(world.peer, [world.a], [world.b], [64, 64]))


@row
def a_peer_that_does_not_exist(world: World) -> Any:
    return [
        sign(world.here.transfer_sync_read("127.0.0.1:1", world.a, world.b, 64)),
        world.here.batch_transfer_async_read("127.0.0.1:1", [world.a], [world.b], [64]),
    ]


@row
def remote_memory_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    return sign(world.here.transfer_sync_read(world.peer, world.a, other.ctypes.data, 64))


@row
def a_registration_twice(world: World) -> Any:
    return sign(world.here.register_memory(world.a, SIZE))


@row
def a_registration_that_overlaps(world: World) -> Any:
    return sign(world.here.register_memory(world.a + 64, 64))


@row
def a_deregistration(world: World) -> Any:
    unregister = world.here.unregister_memory
    return unregister(world.a), sign(unregister(world.a)), sign(unregister(4096))


@row
def registrations_in_a_batch(world: World) -> Any:
    arrays = [np.zeros(64, np.uint8) for _ in range(4)]
    addresses = [array.ctypes.data for array in arrays]
    return [
        world.here.batch_register_memory(addresses, [64] * 4),
        world.here.transfer_sync_read(world.peer, addresses[2], world.b + 7, 8),
        arrays[2][:8].tolist(),
        world.here.batch_unregister_memory(addresses),
        sign(world.here.batch_register_memory(addresses, [64])),
    ]


@row
def memory_of_the_engine(world: World) -> Any:
    engine = world.here
    address = engine.allocate_managed_buffer(100)
    wrote = engine.write_bytes_to_buffer(address, b"0123456789", 10)
    found = engine.read_bytes_from_buffer(address, 10)
    status = engine.transfer_sync_read(world.peer, address, world.b + 1, 4)
    read = engine.read_bytes_from_buffer(address, 4)
    return [
        sign(address), wrote, repr(found), status, repr(read),
        engine.free_managed_buffer(address, 100),
    ]  # fmt: skip


@row
def the_first_buffer_of_a_segment(world: World) -> Any:
    return world.here.get_first_buffer_address(world.peer) == world.b


@row
def ports(world: World) -> Any:
    return world.here.get_rpc_port() > 0, world.here.get_rpc_port() != world.there.get_rpc_port()


@row
def an_engine_that_is_not_initialized(world: World) -> Any:
    engine = world.module.TransferEngine()
    return sign(engine.get_rpc_port())


@row
def notifications(world: World) -> Any:
    module = world.module
    read = module.TransferOpcode.Read
    note = module.TransferNotify("name", "message")
    status = world.here.batch_transfer_sync(world.peer, [world.a], [world.b], [64], read, note)
    found: list[Any] = []
    deadline = time.monotonic() + 30
    while not found and time.monotonic() < deadline:
        found = world.there.get_notifies()
    return status, [(each.name, each.msg) for each in found], world.there.get_notifies()


@row
def values_of_notifications(world: World) -> Any:
    note = world.module.TransferNotify("name", "message")
    note.msg = "other"
    return note.name, note.msg, raised(world.module.TransferNotify)


@row
def a_probe(world: World) -> Any:
    return sign(world.here.send_probe(world.peer)), sign(world.here.send_probe("127.0.0.1:1"))


@row
def transfers_with_itself(world: World) -> Any:
    own = f"127.0.0.1:{world.here.get_rpc_port()}"
    world.mine[64:128] = 9
    return world.here.transfer_sync_read(own, world.a, world.a + 64, 64), int(world.mine[:64].sum())


@row
def arguments_of_other_types(world: World) -> Any:
    return [
        raised(lambda: world.here.register_memory("text", 64)),
        raised(lambda: world.here.register_memory(world.a, -1)),
        raised(lambda: world.here.transfer_sync_read(17, world.a, world.b, 64)),
        raised(lambda: world.here.batch_transfer_sync_read(world.peer, 17, [world.b], [64])),
        raised(lambda: world.here.transfer_check_status("text")),
    ]


@row
def more_than_2048_descriptors(world: World) -> Any:
    count = 4096
    local = [world.a + 8 * i for i in range(count)]
    remote = [world.b + 8 * i for i in range(count)]
    status = world.here.batch_transfer_sync_read(world.peer, local, remote, [4] * count)
    return status, world.here.transfer_sync_read(world.peer, world.a, world.b, 64)


@row
def names(world: World) -> Any:
    own = {"close", "datadist"}  # names of kvplan
    public = [name for name in dir(world.module.TransferEngine) if not name.startswith("_")]
    return sorted({*public} - own), sorted(world.module.TransferOpcode.__members__)


def main() -> None:
    module = import_module(sys.argv[1])
    for name in sys.argv[2:] or ROWS:
        try:
            outcome = ROWS[name](World(module))
        except Exception as error:
            outcome = f"the row raised {type(error).__name__}: {error}"
        print(json.dumps([name, outcome], default=repr), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
