"""Rows about an agent: its memory, messages, metadata, backends and links."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tests.nixl.world import SIZE, World, raised, row
from tests.support.ports import free_port


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
    return raised(lambda: world.here.send_notif("unknown", b"x"))


@row
def notifications_are_taken_once(world: World) -> Any:
    world.here.send_notif("there", b"once")
    world.notes(world.there, 1)
    return world.there.get_new_notifs()


@row
def notifications_that_are_kept(world: World) -> Any:
    world.wait(world.request(note=b"tag and more"))
    deadline = time.monotonic() + 30
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
        check("unknown", b"tag"),
        {name: list(map(repr, notes)) for name, notes in world.there.update_notifs().items()},
    ]


@row
def a_tag_inside_of_a_notification(world: World) -> Any:
    world.here.send_notif("there", b"some tag inside")
    deadline = time.monotonic() + 30
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
        check("unknown"),
        check("unknown", some),
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
        lambda: world.here.make_connection("unknown")
    )


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
def metadata_by_a_listening_thread(world: World) -> Any:
    port, fourth_port = free_port(), free_port("0.0.0.0")
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
