"""Trial copies of scattered blocks, in each way that bytes can move on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvnative._backend import NativeError
from kvnative._host import Arena
from kvplan.device.cuda import CudaDevice
from kvplan.execution.transfers import Transfers
from kvplan.planning import planner
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException
from kvplan.transport.protocol import Kind
from kvplan.types import BlocksCacheKey, CacheDesc, DataType, LlmRole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.device.device import Device
    from kvplan.device.memory import DeviceMemory
    from kvplan.transport.ucx.link import UcxLink
    from kvplan.transport.ucx.transport import UcxTransport

    Tensors = NDArray[np.uint8] | list[NDArray[np.uint8]]


class Way(NamedTuple):
    """A way between caches of one process, in both directions.

    Attributes:
        local, remote: kinds of memory.
        note: the means.
    """

    local: Kind
    remote: Kind
    note: str


def ways_within(device: Device | None) -> list[Way]:
    """Return the ways between caches of one process."""
    ways = [Way("host", "host", "plain copies, on a pool of threads")]
    if device is not None:
        copies = "copies of CUDA" if isinstance(device, CudaDevice) else "batch copies of ACL"
        ways.append(Way("host", "device", copies))
        ways.append(Way("device", "device", "asynchronous copies on several streams, one device"))
    return ways


_DESC: Final = CacheDesc(num_tensors=2, shape=(8, 32 << 10), data_type=DataType.DT_UINT8)
_TIMEOUT_MS: Final = 10_000
# The blocks at each stop: those of one go to those of the next.
_STOPS: Final = ([0, 2, 5, 7], [6, 1, 3, 0], [4, 7, 2, 5])
_GIVEN, _CAME, _BACK = _STOPS


def of_copies(way: Way, device: Device | None) -> dict[str, object]:
    """Try copies in a way; return its description and the result."""
    try:
        with ExitStack() as stack, Transfers() as transfers:
            fault = _wrong_within(way, device, transfers, stack)
    except (LLMException, NativeError, MemoryError) as error:
        fault = _text_of(error)
    one_by_one = "" if device is None else device.native.fallback_reason
    return {**way._asdict(), "works": not fault, "why_not": fault, "one_by_one": one_by_one}


def _wrong_within(way: Way, device: Device | None, transfers: Transfers, stack: ExitStack) -> str:
    """Return the blocks that came back wrong, in words; empty if there are none."""
    given, got = (_host(device, stack) for _ in range(2))
    generator = np.random.default_rng(7)
    given[:] = generator.integers(1, 256, given.shape, np.uint8)
    stops: list[Any] = [list(given)]
    if device is not None and way.remote == "device":
        stops += [_on(device) for _ in range(1 + (way.local == "device"))]
    stops.append(list(got))
    tables = [*_STOPS[: len(stops) - 1], _STOPS[0]]
    for (source, target), (from_blocks, to_blocks) in zip(
        pairwise(stops), pairwise(tables), strict=True
    ):
        plan = planner.plan(Transfer(Rows(_DESC, from_blocks), Rows(_DESC, to_blocks)), local="dst")
        transfers.execute(plan, source, target, timeout_ms=_TIMEOUT_MS)
    wrong = np.flatnonzero((got != given)[:, _STOPS[0]].any(axis=(0, 2)))
    return f"blocks {[_STOPS[0][index] for index in wrong]} came back wrong" if len(wrong) else ""


def between_engines(transport: str) -> str:
    """Pull and push over a transport on the loopback; return the way of the bytes."""
    from kvplan.control.auth import ClusterKey
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.engine.options import Options
    from kvplan.links import ClusterInfo

    with ExitStack() as stack:
        # A temporary key, as the first use of the user's key would make it.
        key = Path(stack.enter_context(TemporaryDirectory(prefix="kvplan-info-"))) / "key"
        ClusterKey.generate().save(key)
        common = Options(transport=transport, accelerator="none", cluster_key_file=str(key))
        owner, user = LlmDataDist(1, LlmRole.MIX), LlmDataDist(2, LlmRole.MIX)
        for engine, address in ((owner, "127.0.0.1:0"), (user, "")):
            engine.initialize(replace(common, listen_ip_info=address))
            stack.callback(engine.finalize)
        user.link_clusters([ClusterInfo(1, str(owner.listen_address))]).raise_for_status()
        there, here = BlocksCacheKey(1), user.allocate_blocks_cache(_DESC)
        tensors = owner.arrays(owner.allocate_blocks_cache(_DESC, there))
        expected = _fill(tensors)
        user.pull_blocks(there, here, _GIVEN, _CAME, timeout_ms=_TIMEOUT_MS)
        user.push_blocks(here, there, _CAME, _BACK, timeout_ms=_TIMEOUT_MS)
        _check_came(tensors, expected, transport)
        return user.links()[0].way


def over_ucx(ours: UcxTransport, theirs: UcxTransport) -> dict[str, object]:
    """Pull and push blocks between two ends of this process; return the result."""
    way = ""
    try:
        with ExitStack() as stack:
            arena = theirs.allocate(_DESC.nbytes)
            registration = theirs.register(arena)
            stack.callback(theirs.deregister, registration)
            link = ours.connect(theirs.metadata(), timeout_ms=_TIMEOUT_MS)
            stack.callback(link.close)
            way = link.way
            _copy_over(link, arena)
    except (LLMException, NativeError, MemoryError) as error:
        return {"way": way, "works": False, "why_not": _text_of(error)}
    return {"way": way, "works": True, "why_not": ""}


def _copy_over(link: UcxLink, arena: Arena) -> None:
    there = _tensors(memoryview(arena))
    here = list(_tensors(bytearray(_DESC.nbytes)))
    expected = _fill(there)
    addresses = [int(tensor.ctypes.data) for tensor in there]
    remote = link.memory(addresses, _DESC.tensor_nbytes, writable=True)
    with Transfers(threads=1) as transfers:
        pull = planner.plan(Transfer(Rows(_DESC, _GIVEN), Rows(_DESC, _CAME)), local="dst")
        transfers.execute(pull, remote, here, timeout_ms=_TIMEOUT_MS)
        push = planner.plan(Transfer(Rows(_DESC, _CAME), Rows(_DESC, _BACK)), local="src")
        transfers.execute(push, here, remote, timeout_ms=_TIMEOUT_MS)
    _check_came(there, expected, "ucx")


def _fill(tensors: Tensors) -> NDArray[np.uint8]:
    """Fill tensors with random bytes; return the expected content after both copies."""
    for number, tensor in enumerate(tensors):
        tensor[:] = np.random.default_rng(number).integers(1, 256, tensor.shape, np.uint8)
    expected = np.array(tensors)
    expected[:, _BACK] = expected[:, _GIVEN]
    return expected


def _check_came(tensors: Tensors, expected: NDArray[np.uint8], over: str) -> None:
    if not np.array_equal(tensors, expected):
        raise LLMException(f"blocks {_GIVEN} were pulled or pushed wrong over {over}")


def _tensors(whole: bytearray | memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(whole, np.uint8).reshape(_DESC.num_tensors, *_DESC.shape)


def _text_of(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def _host(device: Device | None, stack: ExitStack) -> NDArray[np.uint8]:
    """Return tensors in an arena, pinned for the device."""
    arena = Arena(_DESC.nbytes)
    tensors = _tensors(memoryview(arena))
    if device is not None:
        pinned = device.pin(tensors.ctypes.data, tensors.nbytes, arena)
        stack.callback(pinned.close)
    return tensors


def _on(device: Device) -> DeviceMemory:
    from kvplan.device.memory import DeviceMemory

    buffer = device.allocate(_DESC.nbytes)
    addresses = [buffer.address + i * _DESC.tensor_nbytes for i in range(_DESC.num_tensors)]
    return DeviceMemory.from_addresses(device, _DESC, addresses, owner=buffer)
