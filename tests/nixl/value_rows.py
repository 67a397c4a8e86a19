"""Rows about values: lists of descriptors, exceptions and enumerations."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from tests.nixl.world import World, raised, row


@row
def lists_have_items(world: World) -> Any:
    api = world.here
    one = api.get_xfer_descs([(4096, 64, 3), (8192, 1, 0)], "DRAM")
    reg = api.get_reg_descs([(4096, 64, 3, "name")], "VRAM")
    one.append((1, 2, 3))
    one.addDesc((4, 5, 6))
    one.remDesc(0)
    one[1] = (9, 9, 9)
    return [
        one.descCount(),
        [one[i] for i in range(one.descCount())],
        one.index((4, 5, 6)),
        raised(lambda: one.index((7, 7, 7))),
        raised(lambda: one.remDesc(17)),
        [reg[0], reg.trim()[0], type(reg.trim()).__name__],
        [one.isEmpty(), str(one.getType()), repr(reg.getType())],
        one == api.get_xfer_descs([(8192, 1, 0), (9, 9, 9), (4, 5, 6)], "DRAM"),
        one == api.get_xfer_descs([(8192, 1, 0), (9, 9, 9), (4, 5, 6)], "VRAM"),
    ]


@row
def lists_refuse_what_is_no_descriptor(world: World) -> Any:
    one = world.here.get_xfer_descs([(4096, 64, 3), (8192, 1, 0)], "DRAM")
    return [
        raised(lambda: one[-1]),
        raised(lambda: len(one)),
        raised(lambda: hash(one)),
        raised(lambda: one.append((1, 2))),
        raised(lambda: one.append((1, 2, -3))),
        raised(lambda: one.append((1.5, 2, 3))),
    ]


@row
def lists_of_memory_need_a_text(world: World) -> Any:
    reg = world.here.get_reg_descs([(4096, 64, 3, "name")], "VRAM")
    return raised(lambda: reg.append((1, 2, 3)))


@row
def lists_of_remote_memory(world: World) -> Any:
    remote = world.here.get_remote_descs([(4096, 64, 0, "there")], "DRAM")
    return (
        type(remote).__name__,
        remote[0],
        remote.descCount(),
        raised(lambda: pickle.dumps(remote)),
    )


@row
def lists_are_cleared(world: World) -> Any:
    one = world.here.get_xfer_descs([(4096, 64, 3)], "DRAM")
    one.clear()
    return one.isEmpty(), one.descCount()


@row
def lists_of_other_things(world: World) -> Any:
    xfer, reg = world.here.get_xfer_descs, world.here.get_reg_descs
    array = np.array([[4096, 64, 0]], np.uint64)
    one, four = [(4096, 64, 0)], [(4096, 64, 0, "")]
    return [
        raised(lambda: xfer(array, "DRAM")),
        raised(lambda: reg(array, "DRAM")),
        raised(lambda: xfer(array.astype(np.int32), "DRAM")),
        raised(lambda: xfer(array.astype(float), "DRAM")),
        raised(lambda: xfer(one)),
        raised(lambda: xfer(array)),
        raised(lambda: xfer(17, "DRAM")),
        raised(lambda: xfer([17], "DRAM")),
        raised(lambda: xfer("text", "DRAM")),
        raised(lambda: xfer(None, "DRAM")),
        raised(lambda: reg(one, "DRAM")),
        raised(lambda: xfer(four, "DRAM")),
        raised(lambda: xfer(xfer(one, "DRAM"))),
        raised(lambda: reg(xfer(one, "DRAM"))),
        raised(lambda: xfer(reg(four, "DRAM"))),
        raised(lambda: xfer([(-1, 2, 3)], "DRAM")),
        raised(lambda: xfer([(1 << 64, 2, 3)], "DRAM")),
    ]


@row
def lists_are_pickled(world: World) -> Any:
    api = world.here
    one = api.get_xfer_descs([(4096, 64, 3)], "DRAM")
    reg = api.get_reg_descs([(4096, 64, 3, "name")], "VRAM")
    return [
        pickle.loads(pickle.dumps(one)) == one,
        pickle.loads(pickle.dumps(reg)) == reg,
        api.deserialize_descs(api.get_serialized_descs(one)) == one,
        raised(lambda: api.deserialize_descs(b"nonsense")),
    ]


@row
def exceptions(world: World) -> Any:
    names = [name for name in vars(world.bindings) if name.endswith("Error")]
    return sorted((name, vars(world.bindings)[name].__mro__[1].__name__) for name in names)


@row
def enums(world: World) -> Any:
    found = world.bindings
    kinds = ("nixl_mem_t", "nixl_xfer_op_t", "nixl_status_t", "nixl_cost_t", "nixl_thread_sync_t")
    members = {kind: vars(found)[kind].__members__.items() for kind in kinds}
    return [
        {kind: sorted((name, int(value)) for name, value in members[kind]) for kind in kinds},
        sorted(name for name in vars(found) if name.isupper()),
        [repr(found.DRAM_SEG), str(found.NIXL_READ), found.DRAM_SEG == 0],
        [found.NIXL_INIT_AGENT, found.DEFAULT_COMM_PORT],
        [str(each) for each in world.api.nixl_thread_sync_t],
    ]
