"""Rows about transfers: making, posting, watching and releasing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nixl.world import SIZE, World, raised, row


def prepared(world: World, count: int = 16, local: str = "") -> tuple[Any, Any]:
    mine = [(world.mine.ctypes.data + 64 * i, 64, 0) for i in range(count)]
    theirs = [(world.theirs.ctypes.data + 64 * i, 64, 0) for i in range(count)]
    return (
        world.here.prep_xfer_dlist(local, mine, "DRAM"),
        world.here.prep_xfer_dlist("there", theirs, "DRAM"),
    )


@row
def the_name_that_a_loaded_agent_has(world: World) -> Any:
    return repr(world.name)


@row
def a_read(world: World) -> Any:
    handle = world.request((8, 100, 5000))
    return world.wait(handle), bool((world.mine[8:5008] == world.theirs[100:5100]).all())


@row
def a_write(world: World) -> Any:
    world.mine[:] = 7
    return world.wait(world.request((8, 100, 500), op="WRITE")), world.theirs[
        99:601
    ].tolist().count(7)


@row
def a_handle_is_posted_again(world: World) -> Any:
    handle = world.request()
    return [world.wait(handle) for _ in range(3)]


@row
def a_state_before_it_was_posted(world: World) -> Any:
    handle = world.request()
    return raised(lambda: world.here.check_xfer_state(handle))


@row
def a_state_after_it_was_done(world: World) -> Any:
    handle = world.request()
    return world.wait(handle), world.here.check_xfer_state(handle)


@row
def an_operation_of_another_name(world: World) -> Any:
    return raised(lambda: world.request(op="SWAP"))


@row
def an_operation_in_small_letters(world: World) -> Any:
    return raised(lambda: world.request(op="read"))


@row
def lists_of_unequal_lengths(world: World) -> Any:
    mine, theirs = world.lists((0, 0, 64), (64, 64, 64))
    theirs.remDesc(0)
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "there"))


@row
def ranges_of_unequal_sizes(world: World) -> Any:
    mine = world.here.get_xfer_descs([(world.mine.ctypes.data, 64, 0)], "DRAM")
    theirs = world.here.get_xfer_descs([(world.theirs.ctypes.data, 65, 0)], "DRAM")
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "there"))


@row
def no_ranges(world: World) -> Any:
    empty = world.bindings.nixlXferDList(world.bindings.DRAM_SEG)
    outcome = raised(lambda: world.here.initialize_xfer("READ", empty, empty, "there"))
    return outcome, raised(lambda: world.here.get_xfer_descs([], "DRAM"))


@row
def a_local_range_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    mine = world.here.get_xfer_descs([(other.ctypes.data, 64, 0)], "DRAM")
    _, theirs = world.lists((0, 0, 64))
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "there"))


@row
def a_remote_range_that_is_not_registered(world: World) -> Any:
    mine, theirs = world.lists((0, SIZE - 32, 64))
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "there"))


@row
def a_transfer_with_an_unknown_agent(world: World) -> Any:
    mine, theirs = world.lists((0, 0, 64))
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "unknown"))


@row
def a_prepared_list_of_an_unknown_agent(world: World) -> Any:
    _, theirs = world.lists((0, 0, 64))
    return raised(lambda: world.here.prep_xfer_dlist("unknown", theirs))


@row
def a_prepared_local_list_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    return raised(lambda: world.here.prep_xfer_dlist("", [(other.ctypes.data, 64, 0)], "DRAM"))


@row
def a_prepared_remote_list_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    return raised(lambda: world.here.prep_xfer_dlist("there", [(other.ctypes.data, 64, 0)], "DRAM"))


@row
def prepared_lists(world: World) -> Any:
    mine, theirs = prepared(world)
    handle = world.here.make_prepped_xfer("READ", mine, [3, 1], theirs, [2, 9])
    state = world.wait(handle)
    expected = np.concatenate([world.theirs[576:640], world.theirs[:64] * 0, world.theirs[128:192]])
    return state, bool((world.mine[64:256] == expected).all()), int(world.mine[:64].sum())


@row
def the_local_names_of_prepared_lists(world: World) -> Any:
    return [
        raised(lambda name=name: prepared(world, local=name))
        for name in ("", "NIXL_INIT_AGENT", "here")
    ]


@row
def indices_of_numpy(world: World) -> Any:
    mine, theirs = prepared(world)
    outcomes = []
    for kind in ("i4", "u4", "i8", "u8", "f4", ">i4"):
        each = np.array([1, 2], kind)
        outcomes.append(
            raised(lambda each=each: world.here.make_prepped_xfer("READ", mine, each, theirs, each))
        )
    flat = np.zeros((2, 2), np.int32)
    outcomes.append(raised(lambda: world.here.make_prepped_xfer("READ", mine, flat, theirs, flat)))
    return outcomes


@row
def indices_out_of_range(world: World) -> Any:
    mine, theirs = prepared(world)
    make = world.here.make_prepped_xfer
    return [
        raised(lambda: make("READ", mine, [16], theirs, [0])),
        raised(lambda: make("READ", mine, [0], theirs, [16])),
        raised(lambda: make("READ", mine, [-1], theirs, [0])),
        raised(lambda: make("READ", mine, [0, 1], theirs, [0])),
        raised(lambda: make("READ", mine, [], theirs, [])),
    ]


@row
def the_sides_are_swapped(world: World) -> Any:
    mine, theirs = prepared(world)
    return raised(lambda: world.here.make_prepped_xfer("READ", theirs, [0], mine, [0]))


@row
def prepared_lists_as_arrays(world: World) -> Any:
    rows = np.array([[world.mine.ctypes.data + 64 * i, 64, 0] for i in range(4)], np.uint64)
    outcomes = [raised(lambda: world.here.prep_xfer_dlist("", rows, "DRAM"))]
    outcomes.append(raised(lambda: world.here.prep_xfer_dlist("", rows.astype(np.int64), "DRAM")))
    outcomes.append(raised(lambda: world.here.prep_xfer_dlist("", rows[:, :2].copy(), "DRAM")))
    strided = np.array([[world.mine.ctypes.data, 64, 0, 128, 4]], np.uint64)
    outcomes.append(raised(lambda: world.here.prep_xfer_dlist("", strided, "DRAM")))
    return outcomes


@row
def strided_lists(world: World) -> Any:
    mine = world.here.prep_xfer_dlist(
        "", np.array([[world.mine.ctypes.data, 64, 0, 128, 4]], np.uint64), "DRAM"
    )
    theirs = world.here.prep_xfer_dlist(
        "there", np.array([[world.theirs.ctypes.data, 64, 0, 64, 4]], np.uint64), "DRAM"
    )
    handle = world.here.make_prepped_xfer("READ", mine, [0, 1, 3], theirs, [1, 2, 3])
    state = world.wait(handle)
    return state, [int(world.mine[at]) for at in (1, 129, 257, 385)]


@row
def a_list_that_was_released(world: World) -> Any:
    mine, _ = prepared(world)
    world.here.release_dlist_handle(mine)
    return raised(lambda: world.here.release_dlist_handle(mine))


@row
def a_handle_that_was_released(world: World) -> Any:
    handle = world.request()
    world.wait(handle)
    world.here.release_xfer_handle(handle)
    return raised(lambda: world.here.release_xfer_handle(handle))


@row
def transfers_within_one_agent(world: World) -> Any:
    mine = world.here.get_xfer_descs([(world.mine.ctypes.data, 64, 0)], "DRAM")
    theirs = world.here.get_xfer_descs([(world.mine.ctypes.data + 64, 64, 0)], "DRAM")
    world.mine[64:128] = 9
    handle = world.here.initialize_xfer("READ", mine, theirs, "here")
    return world.wait(handle), int(world.mine[:64].sum())


@row
def prepared_transfers_within_one_agent(world: World) -> Any:
    world.mine[64:128] = 9
    mine = world.here.prep_xfer_dlist("", [(world.mine.ctypes.data, 64, 0)], "DRAM")
    theirs = world.here.prep_xfer_dlist("here", [(world.mine.ctypes.data + 64, 64, 0)], "DRAM")
    handle = world.here.make_prepped_xfer("READ", mine, [0], theirs, [0], b"loop")
    return world.wait(handle), int(world.mine[:64].sum()), sorted(world.notes(world.here, 1))


@row
def ranges_that_overlap(world: World) -> Any:
    return world.wait(world.request((0, 0, 64), (32, 128, 64)))


@row
def telemetry_that_was_not_asked_for(world: World) -> Any:
    handle = world.request()
    world.wait(handle)
    return raised(lambda: world.here.get_xfer_telemetry(handle))


@row
def telemetry(world: World) -> Any:
    world.here = world.agent("other", capture_telemetry=True)
    world.here.register_memory([world.of(world.mine)], "DRAM")
    world.here.add_remote_agent(world.there.get_agent_metadata())
    handle = world.request((0, 0, 64), (64, 128, 64))
    before = raised(lambda: world.here.get_xfer_telemetry(handle))
    world.wait(handle)
    found = world.here.get_xfer_telemetry(handle)
    return (
        before,
        type(found).__name__,
        found.totalBytes,
        found.descCount,
        found.startTime > 1.7e15,
        found.postDuration >= 0,
        found.xferDuration >= found.postDuration,
        type(found.startTime).__name__,
    )


@row
def costs_and_backends_of_a_transfer(world: World) -> Any:
    handle = world.request()
    return world.here.query_xfer_backend(handle), raised(
        lambda: world.here.estimate_xfer_cost(handle)
    )


@row
def views_of_memory(world: World) -> Any:
    mine, _ = world.lists((0, 0, 64))
    return raised(lambda: world.here.prep_mem_view(mine))
