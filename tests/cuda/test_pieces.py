"""GPU memory of another process in pieces, like torch's expandable segments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import numpy as np
import pytest

import kvplan
from kvnative._backend import NativeError
from kvnative._cuda_share import export
from kvplan import CacheDesc, DataType, Placement, Rows, Transfer
from kvplan.transport.local.descriptors import MAX_BATCH, ask
from kvplan.transport.local.link import LocalLink
from tests.ascend.simulator import Log
from tests.cuda.side import GRANULE, SESSION, Other, Side, pattern
from tests.cuda_sim.simulator import CudaControls
from tests.support.few_descriptors import spare_descriptors
from tests.support.held import Held
from tests.support.refusals import refused
from tests.support.rights import denying

NUM_PIECES = 4 * MAX_BATCH + 44  # more than fit into a message, or into one call of Linux
BLOCK = 3 << 19  # bytes; every third block lies in two pieces
NUM_BLOCKS = NUM_PIECES * GRANULE // BLOCK


@pytest.fixture
def side(cuda_simulator: CudaControls) -> Iterator[Side]:
    """This process on device 0. A test that leaks resources fails."""
    side = Side(0)
    yield side
    assert side.close() == {}


@pytest.fixture
def other(cuda_simulator: CudaControls) -> Iterator[Other]:
    """The owner of memory, on device 0, too. A test that leaks resources there fails."""
    other = Other()
    yield other
    if not other.dead:
        assert other.call("close") == {}
    other.close()


def linked(side: Side, other: Other) -> LocalLink:
    """Return a link whose requests for descriptors the owner answers."""
    other.call("answer", side.metadata())
    return side.transport.connect(other.call("metadata"), session=SESSION)


def offered(other: Other, num_pieces: int) -> int:
    """Return the address of registered memory in pieces."""
    there: int = other.call("expandable", [True] * num_pieces)
    other.call("register", there, num_pieces * GRANULE)
    return there


def pull(side: Side, link: LocalLink, there: int, num_blocks: int, src: list[int]) -> bytes:
    """Return blocks of the peer's memory at an address."""
    desc = CacheDesc(1, (num_blocks, BLOCK), DataType.DT_UINT8, Placement.DEVICE)
    here = side.allocate("kvplan", 9, len(src) * BLOCK)
    target = CacheDesc(1, (len(src), BLOCK), DataType.DT_UINT8, Placement.DEVICE)
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(target, list(range(len(src))))), local="dst")
    memory = link.memory([there], num_blocks * BLOCK)
    kvplan.execute(plan, memory, side.local(here, len(src) * BLOCK))
    found = side.contents(here, len(src) * BLOCK)
    side.free(here)
    return found


def written(other: Other, there: int, blocks: list[int]) -> bytes:
    """Write blocks to the peer's memory; return them."""
    content = [pattern(block, BLOCK).tobytes() for block in blocks]
    for block, data in zip(blocks, content, strict=True):
        other.call("write", there + block * BLOCK, data)
    return b"".join(content)


def test_more_pieces_than_a_message_holds(side: Side, other: Other, sim_log: Log) -> None:
    """A tensor of many pieces is one range here, and all descriptors for it are closed."""
    there = offered(other, NUM_PIECES)
    blocks = [0, 1, 64, 85, 86, 211, NUM_BLOCKS - 2, NUM_BLOCKS - 1, 2]
    expected = written(other, there, blocks)
    before = other.call("num_descriptors")
    with linked(side, other) as link:
        assert pull(side, link, there, NUM_BLOCKS, blocks) == expected
        assert len(sim_log.calls("cuMemImportFromShareableHandle")) == NUM_PIECES
        reserved = sim_log.calls("cuMemAddressReserve", pid=os.getpid())
        assert [call.fields["bytes"] for call in reserved].count(NUM_PIECES * GRANULE) == 1
    assert other.call("num_descriptors") <= before + 4  # its link and its socket
    other.call("deregister", there)
    other.call("free_expandable", there, NUM_PIECES)


def test_pieces_are_written_by_a_push(side: Side, other: Other) -> None:
    there = offered(other, 3)
    other.call("write", there, bytes(3 * GRANULE))
    desc = CacheDesc(1, (4, BLOCK), DataType.DT_UINT8, Placement.DEVICE)
    here = side.allocate("kvplan", 5, 4 * BLOCK)
    plan = kvplan.plan(Transfer(Rows(desc, [0, 2]), Rows(desc, [3, 1])), local="src")
    with linked(side, other) as link:
        memory = link.memory([there], 4 * BLOCK, writable=True)
        kvplan.execute(plan, side.local(here, 4 * BLOCK), memory)
        del memory
    found = np.frombuffer(other.call("contents", there, 4 * BLOCK), np.uint8).reshape(4, BLOCK)
    expected = pattern(5, 4 * BLOCK).reshape(4, BLOCK)[[0, 2]]
    assert np.array_equal(found[[3, 1]], expected)
    assert not found[[0, 2]].any()
    other.call("deregister", there)
    other.call("free_expandable", there, 3)


def test_a_registered_part_has_only_its_own_pieces(side: Side, other: Other, sim_log: Log) -> None:
    there = other.call("expandable", [True] * 6)
    part = there + GRANULE + 4096
    other.call("register", part, 2 * BLOCK)
    expected = written(other, part, [1])
    with linked(side, other) as link:
        assert pull(side, link, part, 2, [1]) == expected
        assert len(sim_log.calls("cuMemImportFromShareableHandle")) == 2
    other.call("deregister", part)
    other.call("free_expandable", there, 6)


def test_two_tensors_may_share_a_piece(side: Side, other: Other) -> None:
    """Each tensor has a mapping of the piece, which does not depend on the other mapping."""
    there = other.call("expandable", [True] * 3)
    second = there + 3 * GRANULE // 2
    for tensor in (there, second):
        other.call("register", tensor, 3 * GRANULE // 2)
    expected = written(other, there, [0, 1, 2, 3])
    with linked(side, other) as link:
        kept = link.memory([there], 3 * GRANULE // 2)
        assert pull(side, link, second, 2, [0, 1]) == expected[2 * BLOCK :]
        other.call("deregister", second)
        assert pull(side, link, there, 2, [0, 1]) == expected[: 2 * BLOCK]
        del kept
    other.call("deregister", there)
    other.call("free_expandable", there, 3)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_piece_that_may_not_be_exported_is_refused(side: Side, bad: int) -> None:
    """The owner's log names the setting."""
    address = side.expandable([index != bad for index in range(3)])
    with refused(
        "LLM_FEATURE_NOT_ENABLED",
        rf"{address + bad * GRANULE:#x} was allocated so that no peer can map it \(its handle "
        "types lack the POSIX file descriptor\\): of torch 2.5 or later unset "
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
    ):
        side.register(address, 3 * GRANULE)
    side.free_expandable(address, 3)


def test_memory_behind_the_last_piece_is_refused(side: Side) -> None:
    address = side.expandable([True, True])
    with pytest.raises(NativeError, match="is not memory that was allocated on a GPU"):
        export(side.device.native, address, 2 * GRANULE + 1)
    side.free_expandable(address, 2)


def test_an_unmapped_piece_stays_valid_in_existing_mappings(side: Side, other: Other) -> None:
    """Existing mappings keep the memory; later ones are refused."""
    there = offered(other, 3)
    expected = written(other, there, [0, 1, 3])
    with linked(side, other) as link:
        held = link.memory([there], 3 * GRANULE)
        other.call("unmap_piece", there + GRANULE)
        assert pull(side, link, there, 4, [0, 1, 3]) == expected
        del held
        before = Held.now()
        with refused("LLM_FEATURE_NOT_ENABLED", "was unmapped or replaced since it was registered"):
            link.memory([there], 3 * GRANULE)
        other.call("map_piece", there + GRANULE)
        with refused("LLM_FEATURE_NOT_ENABLED", "was unmapped or replaced since it was registered"):
            link.memory([there], 3 * GRANULE)
        before.check_nothing_new()
    other.call("deregister", there)
    other.call("free_expandable", there, 3)


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle:2", "cuMemMap:3", "cuMemSetAccess:1"]
)
def test_a_failure_in_the_middle_leaves_no_resources(
    side: Side, other: Other, cuda_simulator: CudaControls, call: str
) -> None:
    there = offered(other, 3)
    expected = written(other, there, [1])
    with linked(side, other) as link:
        cuda_simulator.add_fault(f"{call}=2")
        with refused("LLM_DEVICE_OUT_OF_MEMORY", call.partition(":")[0]):
            link.memory([there], 3 * GRANULE)
        assert pull(side, link, there, 4, [1]) == expected
    other.call("deregister", there)
    other.call("free_expandable", there, 3)


def test_an_owner_with_few_descriptors_sends_smaller_batches(side: Side, other: Other) -> None:
    """The owner makes as many descriptors as it can at a time."""
    there = offered(other, 8)
    expected = written(other, there, [0, 9])
    with linked(side, other) as link:
        other.call("spare_descriptors", 4)
        assert pull(side, link, there, 10, [0, 9]) == expected
        other.call("spare_descriptors", None)
    other.call("deregister", there)
    other.call("free_expandable", there, 8)


LIMIT = r"which cannot be mapped: .*Too many open files: RLIMIT_NOFILE is \d+ \(ulimit -n\)"


def test_a_receiver_with_too_few_descriptors_fails_cleanly(side: Side, other: Other) -> None:
    """The error names the limit. No descriptor of a batch is kept, and a later attempt succeeds."""
    num_pieces = MAX_BATCH + 1
    there = offered(other, num_pieces)
    expected = written(other, there, [0, 85])
    with linked(side, other) as link:
        before, of_owner = Held.now(), other.call("num_descriptors")
        # Without a socket; then with descriptors for a part of a batch.
        for spare in (0, 1, 2, MAX_BATCH):
            with spare_descriptors(spare), refused("LLM_OUT_OF_MEMORY", LIMIT):
                link.memory([there], num_pieces * GRANULE)
            before.check_nothing_new()
        with pytest.raises(PermissionError):  # the owner answers requests one by one
            ask(other.pid, link.metadata.descriptors, b"", 0)
        assert other.call("num_descriptors") <= of_owner + 1  # the connection of that request
        assert pull(side, link, there, 86, [0, 85]) == expected
    other.call("deregister", there)
    other.call("free_expandable", there, num_pieces)


@pytest.mark.parametrize(
    ("rights", "spare"), [("", 0), (denying("pidfd_getfd"), 0), (denying("pidfd_getfd"), 1)]
)
def test_a_receiver_without_descriptors_fails_cleanly(
    side: Side, cuda_simulator: CudaControls, rights: str, spare: int
) -> None:
    """Memory with a single descriptor, which is duplicated or sent, fails likewise."""
    there = side.offer("kvplan", 1)
    other = Other()
    try:
        other.run(rights)
        other.call("answer", side.metadata())
        with side.transport.connect(other.call("metadata"), session=SESSION):
            refusal = other.run(
                """
                from kvplan import LLMException
                from tests.cuda.side import NBYTES
                from tests.support.few_descriptors import spare_descriptors
                from tests.support.few_descriptors import spare_descriptors
                from tests.support.held import Held
                [link] = side._links
                before = Held.now()
                with spare_descriptors(spare):
                    try:
                        link.memory([there], NBYTES)
                    except LLMException as error:
                        result = str(error)
                before.check_nothing_new()
                link.memory([there], NBYTES)
                """,
                spare=spare,
                there=there,
            )
        assert re.search(LIMIT + r" \(LLM_OUT_OF_MEMORY\)", refusal), refusal
        assert other.call("close") == {}
    finally:
        other.close()


def test_an_owner_that_does_not_answer_is_reported(side: Side, other: Other) -> None:
    """The owner has no link to this process."""
    there = offered(other, 1)
    with (
        side.transport.connect(other.call("metadata"), session=SESSION) as link,
        refused("LLM_FEATURE_NOT_ENABLED", "which needs one user and one network namespace"),
    ):
        link.memory([there], GRANULE)
    other.call("deregister", there)
    other.call("free_expandable", there)


def test_descriptors_are_made_on_request(side: Side) -> None:
    address = side.expandable([True] * 3)
    exported = export(side.device.native, address + 5, 2 * GRANULE)
    assert (exported.address, exported.nbytes, exported.num_pieces) == (address, 3 * GRANULE, 3)
    assert (exported.fd, exported.handle) == (-1, b"")
    with pytest.raises(IndexError, match=r"first=3 is out of range \[0, 3\)"):
        exported.take(3, 1)
    side.unmap_piece(address)
    with pytest.raises(ValueError, match="was unmapped or replaced"):
        exported.take(0, 3)
    side.map_piece(address)
    side.free_expandable(address, 3)
