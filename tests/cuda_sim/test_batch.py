"""Batch copies: refusals, the failed copy, and the order inside a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import pytest

from tests.cuda_sim.cuda_library import CopyAttributes, Cuda, in_process

INVALID_VALUE = 1
SIZE_MAX = 2**64 - 1
N, ITEM = 4096, 64


def batch(
    cuda: Cuda,
    copies: Sequence[tuple[int, int, int]],
    stream: int | None,
    attributes: Sequence[tuple[int, int]] = ((0, 1),),
    *,
    second: bool = False,
) -> tuple[int, int]:
    """Submit copies (dst, src, nbytes); return code and failIdx.

    ``attributes`` are pairs of the first copy's index and the order.
    """
    wide = max(1, len(copies))
    dsts, srcs, sizes = ((ctypes.c_uint64 * wide)(*[copy[i] for copy in copies]) for i in range(3))
    rows = (CopyAttributes * len(attributes))(
        *[CopyAttributes(order=attribute[1]) for attribute in attributes]
    )
    firsts = (ctypes.c_size_t * len(attributes))(*[attribute[0] for attribute in attributes])
    common = (dsts, srcs, sizes, len(copies), rows, firsts, len(attributes))
    if second:
        return cuda.cuMemcpyBatchAsync_v2(*common, stream), SIZE_MAX
    failed = ctypes.c_size_t(77)
    return cuda.cuMemcpyBatchAsync(*common, ctypes.byref(failed), stream), failed.value


@pytest.fixture
def memory_and_stream(cuda: Cuda) -> Iterator[tuple[int, int, int]]:
    """Device memory, pinned memory with the number of its item in each byte, and a stream."""
    device, host = cuda.made("cuMemAlloc_v2", N), cuda.made("cuMemHostAlloc", N, 1)
    stream = cuda.made("cuStreamCreate", 1)
    (ctypes.c_ubyte * N).from_address(host)[:] = [i // ITEM for i in range(N)]
    yield device, host, stream
    cuda.ok("cuMemFree_v2", device)
    cuda.ok("cuMemFreeHost", host)
    cuda.ok("cuStreamDestroy_v2", stream)


@pytest.mark.parametrize("second", [False, True])
def test_all_copies_are_made(
    cuda: Cuda, memory_and_stream: tuple[int, int, int], second: bool
) -> None:
    device, host, stream = memory_and_stream
    reversed_copies = [(device + N - ITEM - i, host + i, ITEM) for i in range(0, N, ITEM)]
    assert batch(cuda, reversed_copies, stream, second=second) == (0, SIZE_MAX)
    cuda.ok("cuStreamSynchronize", stream)
    assert bytes(cuda.view(device, N))[::ITEM] == bytes(range(N // ITEM - 1, -1, -1))


def test_bad_batches_are_refused(cuda: Cuda, memory_and_stream: tuple[int, int, int]) -> None:
    device, host, stream = memory_and_stream
    good = [(device + i, host + i, ITEM) for i in range(0, 4 * ITEM, ITEM)]
    assert batch(cuda, good, None) == (INVALID_VALUE, SIZE_MAX)
    assert batch(cuda, [], stream) == (INVALID_VALUE, SIZE_MAX)
    for attributes in ([(1, 1)], [(0, 0)], [(0, 1), (4, 1)], [(0, 1), (0, 1)], [(0, 1)] * 5):
        assert batch(cuda, good, stream, attributes) == (INVALID_VALUE, SIZE_MAX)
    for bad in [(device, host, 0), (0, host, ITEM), (device, 0, ITEM)]:
        assert batch(cuda, [*good[:2], bad, *good[3:]], stream) == (INVALID_VALUE, 2)
    cuda.ok("cuStreamSynchronize", stream)
    assert set(cuda.view(device, N)) == {0xA5}  # nothing was copied


def test_copies_of_a_batch_must_not_depend_on_each_other(
    cuda: Cuda, memory_and_stream: tuple[int, int, int]
) -> None:
    device, host, stream = memory_and_stream
    with cuda.violating("depend on each other"):
        batch(cuda, [(device, host, ITEM), (device + ITEM - 1, host, ITEM)], stream)
    with cuda.violating("depend on each other"):
        batch(cuda, [(device, host, ITEM), (device + ITEM, device + 1, ITEM)], stream)
    before = cuda.violations()
    assert batch(cuda, [(device, host, ITEM), (device + ITEM, host, ITEM)], stream)[0] == 0
    cuda.ok("cuStreamSynchronize", stream)
    assert cuda.violations() == before


def test_a_partial_fault_makes_half_of_the_copies_in_any_order(
    cuda: Cuda, memory_and_stream: tuple[int, int, int]
) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", N), cuda.made("cuStreamCreate", 1)
    cuda.fault("cuMemcpyBatchAsync:1=partial:719")
    assert (
        batch(
            cuda, [(memory + i, memory_and_stream[1] + i, ITEM) for i in range(0, N, ITEM)], stream
        )[0]
        == 0
    )
    assert cuda.cuStreamSynchronize(stream) == 719
    made = [item != 0xA5 for item in cuda.view(memory, N)[::ITEM]]
    assert sum(made) == len(made) // 2
    assert not all(made[: len(made) // 2])
    cuda.ok("cuCtxDestroy_v2", own)


def test_older_drivers_lack_batch_calls() -> None:
    program = "answer([hasattr(cuda.library, 'cuMemcpyBatchAsync' + end) for end in ('', '_v2')])"
    assert in_process(program, "12.8") == [True, False]
    assert in_process(program, "12.4") == [False, False]
