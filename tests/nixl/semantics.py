"""One program for two implementations of NIXL: prints the outcome of each row as JSON.

`python semantics.py PACKAGE` imports PACKAGE (`nixl_cu12`, `kvplan.nixl`). A row is a small use of
two agents in one process; its outcome is a value that JSON has, or the name of the exception.
"""

from __future__ import annotations

import json
import pickle
import socket
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
    """Two agents with memory, of which `here` knows `there`."""

    def __init__(self, api: Any, bindings: Any) -> None:
        self.api, self.bindings = api, bindings
        self.here, self.there = self.agent("here"), self.agent("there")
        self.mine = np.zeros(SIZE, np.uint8)
        self.theirs = (np.arange(SIZE) % 251).astype(np.uint8)
        self.registered = self.here.register_memory([self.of(self.mine)], "DRAM")
        self.exported = self.there.register_memory([self.of(self.theirs)], "DRAM")
        self.name = self.here.add_remote_agent(self.there.get_agent_metadata())

    def agent(self, name: str, **options: Any) -> Any:
        return self.api.nixl_agent(name, self.api.nixl_agent_config(**options))

    @staticmethod
    def of(array: Any) -> tuple[int, int, int, str]:
        return (array.ctypes.data, array.nbytes, 0, "")

    def lists(self, *ranges: tuple[int, int, int]) -> tuple[Any, Any]:
        """Descriptors of both ends, of ranges (local offset, remote offset, bytes)."""
        mine, theirs = self.mine.ctypes.data, self.theirs.ctypes.data
        return (
            self.here.get_xfer_descs([(mine + a, n, 0) for a, _, n in ranges], "DRAM"),
            self.here.get_xfer_descs([(theirs + b, n, 0) for _, b, n in ranges], "DRAM"),
        )

    def request(self, *ranges: tuple[int, int, int], op: str = "READ", note: bytes = b"") -> Any:
        mine, theirs = self.lists(*(ranges or [(0, 0, 4096)]))
        return self.here.initialize_xfer(op, mine, theirs, "there", note)

    def wait(self, handle: Any, note: bytes | None = None) -> str:
        state = self.here.transfer(handle) if note is None else self.here.transfer(handle, note)
        return self.end(handle, state)

    def end(self, handle: Any, state: str = "PROC") -> str:
        deadline = time.monotonic() + 10
        while state == "PROC" and time.monotonic() < deadline:
            state = self.here.check_xfer_state(handle)
        return state

    def notes(self, agent: Any, count: int) -> dict[str, list[bytes]]:
        """What has arrived once there are `count` messages, or after a second."""
        found: dict[str, list[bytes]] = {}
        deadline = time.monotonic() + 5
        while sum(map(len, found.values())) < count and time.monotonic() < deadline:
            for name, messages in agent.get_new_notifs().items():
                found.setdefault(name, []).extend(messages)
        return found


def raised(call: Callable[[], Any]) -> str:
    try:
        value = call()
    except Exception as error:
        return type(error).__name__
    return f"returned a {type(value).__name__}"


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
    return raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "nobody"))


@row
def a_prepared_list_of_an_unknown_agent(world: World) -> Any:
    _, theirs = world.lists((0, 0, 64))
    return raised(lambda: world.here.prep_xfer_dlist("nobody", theirs))


@row
def a_prepared_local_list_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    return raised(lambda: world.here.prep_xfer_dlist("", [(other.ctypes.data, 64, 0)], "DRAM"))


@row
def a_prepared_remote_list_that_is_not_registered(world: World) -> Any:
    other = np.zeros(64, np.uint8)
    return raised(lambda: world.here.prep_xfer_dlist("there", [(other.ctypes.data, 64, 0)], "DRAM"))


def prepared(world: World, count: int = 16, local: str = "") -> tuple[Any, Any]:
    mine = [(world.mine.ctypes.data + 64 * i, 64, 0) for i in range(count)]
    theirs = [(world.theirs.ctypes.data + 64 * i, 64, 0) for i in range(count)]
    return (
        world.here.prep_xfer_dlist(local, mine, "DRAM"),
        world.here.prep_xfer_dlist("there", theirs, "DRAM"),
    )


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
def memory_types_of_unequal_lists(world: World) -> Any:
    return raised(lambda: world.here.get_xfer_descs([(4096, 64, 0)], "NPU"))


@row
def a_list_of_video_memory(world: World) -> Any:
    return raised(lambda: world.here.prep_xfer_dlist("", [(4096, 64, 0)], "VRAM"))


@row
def memory_types_by_their_names(world: World) -> Any:
    kinds = ("DRAM", "VRAM", "FILE", "BLOCK", "OBJ", "cpu", "cuda")
    return [str(world.here.get_xfer_descs([(4096, 64, 0)], kind).getType()) for kind in kinds]


@row
def a_registration_twice(world: World) -> Any:
    return raised(lambda: world.here.register_memory([world.of(world.mine)], "DRAM"))


@row
def a_registration_of_nothing(world: World) -> Any:
    empty = np.zeros(0, np.uint8)
    return [
        raised(lambda: world.here.register_memory([], "DRAM")),
        raised(lambda: world.here.register_memory([(world.mine.ctypes.data, 0, 0, "")], "DRAM")),
        raised(lambda: world.here.register_memory(empty, "DRAM")),
    ]


@row
def a_registration_without_a_memory_type(world: World) -> Any:
    return raised(lambda: world.here.register_memory([world.of(world.mine)]))


@row
def a_registration_of_a_file(world: World) -> Any:
    return raised(lambda: world.here.register_memory([(0, 64, 0, "/tmp/none")], "FILE"))


@row
def a_registration_with_an_unknown_backend(world: World) -> Any:
    return raised(lambda: world.here.register_memory([world.of(world.mine)], "DRAM", ["GDS"]))


@row
def a_deregistration(world: World) -> Any:
    first = raised(lambda: world.here.deregister_memory(world.registered))
    return (
        first,
        raised(world.request),
        raised(lambda: world.here.deregister_memory(world.registered)),
    )


@row
def a_deregistration_of_a_part(world: World) -> Any:
    part = world.here.get_reg_descs([(world.mine.ctypes.data, 64, 0, "")], "DRAM")
    return raised(lambda: world.here.deregister_memory(part))


@row
def a_deregistration_of_what_was_not_registered(world: World) -> Any:
    other = world.here.get_reg_descs([(4096, 64, 0, "")], "DRAM")
    return raised(lambda: world.here.deregister_memory(other))


@row
def notifications_of_transfers(world: World) -> Any:
    for i in range(5):
        world.wait(world.request((0, 0, 64), note=b"note %d" % i))
    return {name: list(map(repr, notes)) for name, notes in world.notes(world.there, 5).items()}


@row
def a_notification_of_a_repost(world: World) -> Any:
    handle = world.request(note=b"first")
    world.wait(handle)
    world.wait(handle, b"second")
    world.wait(handle)
    return {name: list(map(repr, notes)) for name, notes in world.notes(world.there, 3).items()}


@row
def notifications_alone(world: World) -> Any:
    for i in range(3):
        world.here.send_notif("there", b"n%d" % i)
    return {name: list(map(repr, notes)) for name, notes in world.notes(world.there, 3).items()}


@row
def notifications_of_zero_bytes_and_binary_ones(world: World) -> Any:
    outcomes = [
        raised(lambda: world.here.send_notif("there", b"\x00\xff\x80")),
        raised(lambda: world.here.send_notif("there", b"a")),
    ]
    return outcomes, {
        name: list(map(repr, notes)) for name, notes in world.notes(world.there, 2).items()
    }


@row
def a_notification_of_20000_bytes(world: World) -> Any:
    outcome = raised(lambda: world.here.send_notif("there", b"x" * 20000))
    return outcome, {
        name: list(map(len, notes)) for name, notes in world.notes(world.there, 1).items()
    }


@row
def a_notification_to_an_unknown_agent(world: World) -> Any:
    return raised(lambda: world.here.send_notif("nobody", b"x"))


@row
def notifications_are_taken_once(world: World) -> Any:
    world.here.send_notif("there", b"once")
    world.notes(world.there, 1)
    return world.there.get_new_notifs()


@row
def notifications_that_are_kept(world: World) -> Any:
    world.wait(world.request(note=b"tag and more"))
    deadline = time.monotonic() + 5
    found = {}
    while not found and time.monotonic() < deadline:
        found = world.there.update_notifs()
    kept = {name: list(map(repr, notes)) for name, notes in found.items()}
    check = world.there.check_remote_xfer_done
    return [
        kept,
        check("here", b"other"),
        check("here", b"tag"),
        check("here", b"tag"),
        check("nobody", b"tag"),
        {name: list(map(repr, notes)) for name, notes in world.there.update_notifs().items()},
    ]


@row
def a_tag_inside_of_a_notification(world: World) -> Any:
    world.here.send_notif("there", b"some tag inside")
    deadline = time.monotonic() + 5
    while not world.there.update_notifs() and time.monotonic() < deadline:
        pass
    check = world.there.check_remote_xfer_done
    return check("here", b"tag"), check("here", b"tag", tag_is_prefix=False)


@row
def metadata_of_nonsense(world: World) -> Any:
    return [
        raised(lambda data=data: world.here.add_remote_agent(data)) for data in (b"", b"nonsense")
    ]


@row
def metadata_of_its_own(world: World) -> Any:
    return raised(lambda: world.here.add_remote_agent(world.here.get_agent_metadata()))


@row
def metadata_twice(world: World) -> Any:
    again = world.here.add_remote_agent(world.there.get_agent_metadata())
    return repr(again), world.wait(world.request())


@row
def metadata_that_is_checked(world: World) -> Any:
    check = world.here.check_remote_metadata
    theirs = world.theirs.ctypes.data
    some = world.here.get_xfer_descs([(theirs, 64, 0)], "DRAM")
    more = world.here.get_xfer_descs([(theirs, SIZE + 1, 0)], "DRAM")
    return (
        check("there"),
        check("there", some),
        check("there", more),
        check("nobody"),
        check("nobody", some),
    )


@row
def memory_registered_after_the_metadata(world: World) -> Any:
    late = np.full(64, 5, np.uint8)
    world.there.register_memory([world.of(late)], "DRAM")
    mine, _ = world.lists((0, 0, 64))
    theirs = world.here.get_xfer_descs([(late.ctypes.data, 64, 0)], "DRAM")
    before = raised(lambda: world.here.initialize_xfer("READ", mine, theirs, "there"))
    world.here.add_remote_agent(world.there.get_agent_metadata())
    handle = world.here.initialize_xfer("READ", mine, theirs, "there")
    return before, world.wait(handle), int(world.mine[0])


@row
def partial_metadata(world: World) -> Any:
    late = np.full(64, 5, np.uint8)
    more = world.there.register_memory([world.of(late)], "DRAM")
    data = world.there.get_partial_agent_metadata(more, False, [])
    name = world.here.add_remote_agent(data)
    mine, _ = world.lists((0, 0, 64))
    theirs = world.here.get_xfer_descs([(late.ctypes.data, 64, 0)], "DRAM")
    handle = world.here.initialize_xfer("READ", mine, theirs, "there")
    return repr(name), world.wait(handle), world.wait(world.request())


@row
def partial_metadata_for_a_stranger(world: World) -> Any:
    third = world.agent("third")
    without = world.there.get_partial_agent_metadata(world.exported, False, [])
    whole = world.there.get_partial_agent_metadata(world.exported, True, [])
    nothing = world.there.get_partial_agent_metadata(
        world.bindings.nixlRegDList(world.bindings.DRAM_SEG), True, []
    )
    return [
        raised(lambda data=data: third.add_remote_agent(data)) for data in (without, nothing, whole)
    ]


@row
def partial_metadata_of_unregistered_memory(world: World) -> Any:
    other = world.there.get_reg_descs([(4096, 64, 0, "")], "DRAM")
    return raised(lambda: world.there.get_partial_agent_metadata(other, True, []))


@row
def metadata_of_an_agent_without_memory(world: World) -> Any:
    third = world.agent("third")
    name = world.here.add_remote_agent(third.get_agent_metadata())
    world.here.send_notif("third", b"hello")
    return repr(name), {
        name: list(map(repr, notes)) for name, notes in world.notes(third, 1).items()
    }


@row
def a_removed_agent(world: World) -> Any:
    outcomes = [raised(lambda: world.here.remove_remote_agent("there"))]
    outcomes.append(raised(world.request))
    outcomes.append(raised(lambda: world.here.remove_remote_agent("there")))
    outcomes.append(repr(world.here.add_remote_agent(world.there.get_agent_metadata())))
    outcomes.append(world.wait(world.request()))
    return outcomes


@row
def a_handle_of_a_removed_agent(world: World) -> Any:
    handle = world.request()
    world.here.remove_remote_agent("there")
    return raised(lambda: world.here.transfer(handle))


@row
def connections(world: World) -> Any:
    return raised(lambda: world.here.make_connection("there")), raised(
        lambda: world.here.make_connection("nobody")
    )


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


@row
def queries_of_files(world: World) -> Any:
    return raised(lambda: world.here.query_memory([(0, 0, 0, "/tmp/none")], "POSIX", "FILE"))


@row
def queries_of_memory(world: World) -> Any:
    return raised(lambda: world.here.query_memory([world.of(world.mine)], "UCX", "DRAM"))


@row
def plugins(world: World) -> Any:
    return (
        "UCX" in world.here.get_plugin_list(),
        world.here.get_plugin_mem_types("UCX"),
        raised(lambda: world.here.get_plugin_params("none")),
    )


@row
def backends(world: World) -> Any:
    here = world.here
    return [
        sorted(here.backends),
        here.get_backend_mem_types("UCX"),
        raised(lambda: here.get_backend_params("none")),
        raised(lambda: here.create_backend("none")),
        raised(lambda: here.create_backend("UCX")),
    ]


@row
def an_agent_without_backends(world: World) -> Any:
    third = world.agent("third", backends=[])
    outcome = raised(lambda: third.register_memory([world.of(world.mine)], "DRAM"))
    third.create_backend("UCX")
    return (
        outcome,
        raised(lambda: third.register_memory([world.of(world.mine)], "DRAM")),
        sorted(third.backends),
    )


@row
def an_agent_with_an_unknown_backend(world: World) -> Any:
    return raised(lambda: world.agent("third", backends=["none"]))


@row
def attributes(world: World) -> Any:
    here = world.here
    return here.name, sorted(here.nixl_mems), sorted(here.nixl_ops), type(here.agent).__name__


@row
def an_agent_without_a_name(world: World) -> Any:
    return raised(lambda: world.agent(""))


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


@row
def metadata_by_a_listening_thread(world: World) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        port, fourth_port = one.getsockname()[1], other.getsockname()[1]
    third = world.agent("third", enable_listen_thread=True, listen_port=port)
    third.register_memory([world.of(np.zeros(64, np.uint8))], "DRAM")
    fourth = world.agent("fourth", enable_listen_thread=True, listen_port=fourth_port)
    fourth.fetch_remote_metadata("third", "127.0.0.1", port)

    def comes(agent: Any, name: str, expected: bool = True) -> bool:
        deadline = time.monotonic() + 30
        while agent.check_remote_metadata(name) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(agent.check_remote_metadata(name))

    first = comes(fourth, "third")
    fourth.send_local_metadata("127.0.0.1", port)
    second = comes(third, "fourth")
    fourth.invalidate_local_metadata("127.0.0.1", port)
    return first, second, comes(third, "fourth", expected=False)


@row
def a_metadata_server_that_is_not_there(world: World) -> Any:
    return [
        raised(lambda: world.here.fetch_remote_metadata("third")),
        raised(world.here.send_local_metadata),
        raised(lambda: world.here.fetch_remote_metadata("third", "127.0.0.1", 1)),
    ]


def main() -> None:
    package = sys.argv[1]
    api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
    wanted = sys.argv[2:]
    for name, call in ROWS.items():
        if wanted and name not in wanted:
            continue
        try:
            outcome = call(World(api, bindings))
        except Exception as error:
            outcome = f"the row raised {type(error).__name__}: {error}"
        print(json.dumps([name, outcome], default=repr), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
