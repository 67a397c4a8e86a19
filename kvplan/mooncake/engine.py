"""`TransferEngine`: ranges of addresses, peers named "host:port", and statuses as numbers."""

from __future__ import annotations

import ctypes
import json
import mmap
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from functools import wraps
from itertools import count
from typing import Any, ClassVar, Concatenate, Final, ParamSpec

from kvnative._signals import Mutex, signals_deferred
from kvplan.addressed.engine import REFUSALS, AddressedEngine
from kvplan.addressed.names import split_name, where_named
from kvplan.engine.option_sources import configured
from kvplan.engine.options import Options
from kvplan.engine.ranges import AddressRanges
from kvplan.mooncake.values import (
    Read,
    TransferNotify,
    TransferOpcode,
    Write,
    check_text,
    columns_of,
    decoded,
    direction_of,
    encoded,
    timeout_ms,
    uint,
    uints,
)
from kvplan.planning.ranges import span_text
from kvplan.status import LLMException, LLMStatusCode, invalid, timed_out
from kvplan.system.logs import Log
from kvplan.types import Placement
from kvplan.validation import as_bytes, shown

__all__ = [
    "P2P",
    "SUPPORT_MUSA",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "Write",
]

_log = Log("kvplan.mooncake")

SUPPORT_MUSA: Final = False
P2P: Final = "P2PHANDSHAKE"
"""The only accepted metadata server: the names of peers are their listening addresses."""

_CONNECT_MS: Final = 10_000
_IN_FLIGHT, _DONE, _FAILED, _TIMED_OUT = 0, 1, -1, -2

_Opcode = TransferOpcode  # the engine has an attribute of that name
_P = ParamSpec("_P")
_Call = Callable[Concatenate["TransferEngine", _P], int]


def _returns_status(failed: int = _FAILED, name: str = "") -> Callable[[_Call[_P]], _Call[_P]]:
    """Make a method return `failed` for a refusal of the engine, and log why under `name`."""

    def decorate(method: _Call[_P]) -> _Call[_P]:
        @wraps(method)
        def call(engine: TransferEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> int:
            try:
                return method(engine, *args, **kwargs)
            except REFUSALS as error:
                _log.warning("%s: %s", name or method.__name__ + _target(args), error, stacklevel=2)
                return failed

        return call

    return decorate


def _target(args: Sequence[object]) -> str:
    """Return the peer or the address of a call for the log."""
    if not args:
        return ""
    return f" {args[0]:#x}" if isinstance(args[0], int) else f" {shown(args[0])}"


class TransferEngine:
    """An engine. Failed calls return -1 unless stated otherwise, and log why (`kvplan.mooncake`).

    Once a call has returned -1, no byte of its transfer moves. Any thread may call the methods.

    Every method raises TypeError for an argument of the wrong type.
    """

    TransferOpcode: ClassVar[type[IntEnum]] = TransferOpcode

    def __init__(self) -> None:
        self._engine: AddressedEngine | None = None
        self._own = ""  # the name by which peers know this engine
        self._mutex = Mutex()
        self._starts: tuple[int, ...] = ()  # addresses of registered memory, ascending
        # Size, handle and placement, by address.
        self._registered: dict[int, tuple[int, int, Placement]] = {}
        self._buffers: dict[int, mmap.mmap] = {}  # managed buffers, by address
        self._empty: set[int] = set()  # batches without ranges, which are done
        self._empty_numbers = count(1 << 62)  # above the numbers of requests

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None
    ) -> int:
        """Start the engine. It listens on a free port, or at llm.ListenIpInfo; see `get_rpc_port`.

        Protocol and device have no effect: the options of kvplan select a transport.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    @_returns_status()
    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None,
        metadata_type: str,
    ) -> int:  # fmt: skip
        """Start the engine; see `initialize`."""
        for name, value in (
            ("local_hostname", local_hostname), ("metadata_server", metadata_server),
            ("protocol", protocol), ("device_name", "" if device_name is None else device_name),
            ("metadata_type", metadata_type),
        ):  # fmt: skip
            check_text(name, value)
        if metadata_server != P2P:
            raise invalid(f"metadata_server={shown(metadata_server)} must be {P2P!r}")
        host, _ = split_name(local_hostname, "local_hostname")
        listens = {} if "listen_ip_info" in configured() else {"llm.ListenIpInfo": f"{host}:0"}
        with self._mutex:
            if self._engine is not None:
                raise LLMException("the engine is initialized already")
            engine = AddressedEngine(secrets.randbits(64), Options.of(listens), where_named, _log)
            try:
                self._own = f"{host}:{_port_of(engine)}"
            except LLMException:
                engine.datadist.finalize()
                raise
            self._engine = engine
        _log.info("%s: protocol %s has no effect", self._own, shown(protocol))
        return 0

    def close(self) -> None:
        """End transfers and links. Not in Mooncake, which does this when an engine is freed."""
        with self._mutex:
            engine, self._engine = self._engine, None
            self._starts = ()
            self._registered.clear()
            self._empty.clear()
        if engine is not None:
            engine.datadist.finalize()
        self._buffers.clear()

    def __del__(self, ignoring: Any = suppress) -> None:  # a global may be gone at exit
        with ignoring(Exception):
            self.close()

    @_returns_status()
    def get_rpc_port(self) -> int:
        """Return the port of this engine, for its name "host:port"."""
        return _port_of(self._running())

    @property
    def datadist(self) -> Any:
        """The engine of kvplan, for `on_plan`, `metrics` and `links`. Not in Mooncake.

        Raises:
            LLMException: LLM_FAILED: not initialized.
        """
        return self._running().datadist

    def get_engine(self) -> TransferEngine:
        """Return this engine."""
        return self

    def get_engine_ptr(self) -> int:
        """Return 0: no C++ engine exists."""
        return 0

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return a topology without devices as JSON; kvplan chooses devices itself."""
        return json.dumps({"cpu:0": [[], []]})

    @_returns_status()
    def send_probe(self, peer_server_name: str) -> int:
        """Connect with a peer unless it is connected."""
        self._cluster(peer_server_name)
        return 0

    warmup_efa_segment = send_probe

    # Memory.

    @_returns_status()
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let transfers use memory until it is unregistered; overlapping memory is refused."""
        self._register(uint("buffer_addr", buffer_addr), uint("capacity", capacity), location)
        return 0

    def _register(self, address: int, nbytes: int, location: str) -> None:
        check_text("location", location)
        engine = self._running()
        with self._mutex:
            place = bisect_right(self._starts, address)
            for start in self._starts[max(place - 1, 0) : place + 1]:
                size = self._registered[start][0]
                if address < start + size and start < address + nbytes:
                    raise invalid(
                        f"{span_text(address, nbytes)} overlaps {span_text(start, size)}, "
                        "which is registered"
                    )
            has_device = engine.datadist.device is not None
            on_device = has_device and location.startswith(("cuda", "npu"))
            kind = Placement.DEVICE if on_device else Placement.HOST
            with signals_deferred:  # until the registration is known
                try:
                    handle = engine.register(address, nbytes, kind)
                except LLMException:
                    if not has_device or location != "*":
                        raise
                    kind = Placement.DEVICE
                    handle = engine.register(address, nbytes, kind)
                self._registered[address] = nbytes, handle, kind
                self._starts = (*self._starts[:place], address, *self._starts[place:])

    @_returns_status()
    def unregister_memory(self, buffer_addr: int) -> int:
        """Withdraw memory; on return no transfer uses it."""
        self._unregister(uint("buffer_addr", buffer_addr))
        return 0

    def _unregister(self, address: int) -> None:
        engine = self._running()
        if (known := self._registered.get(address)) is None:
            raise invalid(f"no registered memory begins at {address:#x}")
        engine.deregister(known[1])
        # Last: an interrupted call can be repeated, and overlaps are refused until then.
        with signals_deferred, self._mutex:
            if self._registered.get(address) is known:  # no other thread was faster
                self._starts = tuple(start for start in self._starts if start != address)
                del self._registered[address]

    @_returns_status()
    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Register several pieces of memory; after a failure none of them is registered."""
        addresses = uints("buffer_addresses", buffer_addresses).tolist()
        sizes = uints("capacities", capacities).tolist()
        if len(addresses) != len(sizes):
            raise invalid(f"{len(addresses)} buffer_addresses and {len(sizes)} capacities")
        with ExitStack() as undo:
            for address, nbytes in zip(addresses, sizes, strict=True):
                with signals_deferred:
                    self._register(address, nbytes, location)
                    undo.callback(self.unregister_memory, address)  # logs a failure
            undo.pop_all()
        return 0

    @_returns_status()
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Withdraw several pieces of memory."""
        for address in uints("buffer_addresses", buffer_addresses).tolist():
            self._unregister(address)
        return 0

    @_returns_status(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """Allocate and register memory; return its address, or 0 after a failure."""
        memory = mmap.mmap(-1, max(1, uint("length", length)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with signals_deferred:
            self._register(address, len(memory), "cpu")
            self._buffers[address] = memory
        return address

    @_returns_status()
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Free memory that `allocate_managed_buffer` returned; `length` is not used."""
        if (memory := self._buffers.get(uint("buffer_addr", buffer_addr))) is None:
            raise invalid(f"buffer_addr={buffer_addr:#x} must come from allocate_managed_buffer")
        for start in self._starts:  # the program may have registered parts of the buffer
            if buffer_addr <= start < buffer_addr + len(memory):
                self._unregister(start)
        self._buffers.pop(buffer_addr, None)  # another thread may have freed it
        return 0

    @_returns_status()
    def write_bytes_to_buffer(self, dest_address: int, data: bytes | str, length: int) -> int:
        """Copy bytes to registered memory."""
        given = as_bytes("data", data)
        address, nbytes = uint("dest_address", dest_address), uint("length", length)
        if nbytes > len(given):
            raise invalid(f"length={nbytes} is out of range [0, {len(given)}], the bytes of data")
        self._check_host(address, nbytes)
        ctypes.memmove(address, given, nbytes)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return bytes of registered memory.

        Raises:
            LLMException: LLM_PARAM_INVALID: not registered, or memory of a device.
        """
        address, nbytes = uint("source_address", source_address), uint("length", length)
        self._check_host(address, nbytes)
        return ctypes.string_at(address, nbytes)

    def _check_host(self, address: int, nbytes: int) -> None:
        """Refuse bytes that are not registered, or that the host cannot reach."""
        starts = self._starts
        place = bisect_right(starts, address) - 1
        known = self._registered.get(starts[place]) if place >= 0 else None
        if known is None or address + nbytes > starts[place] + known[0]:
            raise invalid(f"{span_text(address, nbytes)} is not registered")
        if known[2] is Placement.DEVICE:
            raise invalid(f"{span_text(address, nbytes)} is memory of a device")

    @_returns_status(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Return the address of the first memory that a peer has registered, or 0."""
        if segment_name == self._own:
            return next(iter([*self._registered]), 0)
        return self._running().first_address(self._cluster(segment_name))

    # Transfers.

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Write to a peer; 0: every byte has arrived."""
        one = ([buffer], [peer_buffer_address], [length])
        return self.batch_transfer_sync(target_hostname, *one, Write)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Read from a peer; 0: every byte has arrived."""
        one = ([buffer], [peer_buffer_address], [length])
        return self.batch_transfer_sync(target_hostname, *one, Read)

    def transfer_sync(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        opcode: _Opcode, notify: TransferNotify | None = None, transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Read or write; 0: all bytes and the notification have arrived."""
        one = ([buffer], [peer_buffer_address], [length])
        return self.batch_transfer_sync(target_hostname, *one, opcode, notify)

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Write several ranges to a peer."""
        lists = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_sync(target_hostname, *lists, Write)

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Read several ranges from a peer."""
        lists = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_sync(target_hostname, *lists, Read)

    @_returns_status()
    def batch_transfer_sync(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], opcode: _Opcode, notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Read or write ranges, or none; 0: all bytes and the notification have arrived."""
        columns = columns_of(buffers, peer_buffer_addresses, lengths)
        engine, direction = self._running(), direction_of(opcode)
        started = time.monotonic()
        cluster = self._cluster(target_hostname)
        if notify is None and not len(columns[0]):
            return 0
        *firsts, last = [None] if notify is None else engine.connections.frames(*encoded(notify))
        for frame in firsts:
            engine.datadist.notify(cluster, frame or b"")
        if not len(columns[0]):
            engine.datadist.notify(cluster, last or b"")
            return 0
        left_ms = timeout_ms(columns[2]) - (time.monotonic() - started) * 1000
        ranges = AddressRanges(cluster, *columns, direction)
        engine.datadist.run(ranges, timeout_ms=max(0.0, left_ms), notify=last)
        return 0

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Begin to write several ranges; return the batch, or 0 after a failure."""
        lists = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_async(target_hostname, *lists, Write)

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Begin to read several ranges; return the batch, or 0 after a failure."""
        lists = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_async(target_hostname, *lists, Read)

    @_returns_status()
    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Begin to write a range; return the batch, or -1 after a failure."""
        one = ([buffer], [peer_buffer_address], [length])
        return self.batch_transfer_async(target_hostname, *one, Write) or _FAILED

    @_returns_status(0)
    def batch_transfer_async(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int], opcode: _Opcode, transport_hint: str = "",
    ) -> int:  # fmt: skip
        """Begin to read or write ranges, or none; return the batch, or 0 after a failure."""
        columns = columns_of(buffers, peer_buffer_addresses, lengths)
        engine = self._running()
        engine.requests.check_room(len(self._empty))
        deadline = time.monotonic() + timeout_ms(columns[2]) / 1000
        cluster, direction = self._cluster(target_hostname), direction_of(opcode)
        if not len(columns[0]):
            self._empty.add(batch := next(self._empty_numbers))
            return batch
        ranges = AddressRanges(cluster, *columns, direction)
        text = f"{opcode.name} of {len(ranges)} ranges"
        return engine.submit(ranges, target_hostname, text, deadline)

    @_returns_status()
    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for batches, and forget them; return 0, or -1 if one of them has failed."""
        self._running()
        statuses = {self._awaited(batch) for batch in uints("batch_ids", batch_ids).tolist()}
        return 0 if statuses <= {_DONE} else _FAILED

    @_returns_status(name="get_batch_transfer_status")  # the error has the number of the batch
    def _awaited(self, batch: int) -> int:
        """Wait for a batch, and return its status; an unknown one has failed."""
        if batch not in self._empty:
            request = self._running().requests.get(batch)
            request.task.wait_done(max(0.0, (request.data - time.monotonic()) * 1000))
        return self._status(batch)

    @_returns_status(name="transfer_check_status")
    def transfer_check_status(self, batch_id: int) -> int:
        """Return the status of a batch: 1: done; 0: in flight; -1: failed; -2: timeout.

        A batch that is not in flight is forgotten.
        """
        return self._status(uint("batch_id", batch_id))

    def _status(self, batch: int) -> int:
        requests = self._running().requests
        if batch in self._empty:
            self._empty.discard(batch)
            return _DONE
        request = requests.get(batch)
        if not request.task.done and time.monotonic() >= request.data:
            request.task.cancel(timed_out("the transfer took too long"))
        if (ended := requests.take(batch)) is None:
            return _IN_FLIGHT
        if (error := ended.error(_log, batch)) is None:
            return _DONE
        return _TIMED_OUT if error.status_code is LLMStatusCode.LLM_TIMEOUT else _FAILED

    def get_notifies(self) -> list[TransferNotify]:
        """Return the messages that have arrived since the last call."""
        found = self._engine.connections.take_messages() if self._engine is not None else []
        return [decoded(each.name, each.body) for each in found]

    def _running(self) -> AddressedEngine:
        if self._engine is None:
            raise LLMException("the engine is not initialized; call initialize() first")
        return self._engine

    def _cluster(self, name: str) -> int:
        """Connect with a peer unless it is connected, and return its cluster id."""
        check_text("target_hostname", name)
        engine = self._running()
        if name == self._own:
            return engine.datadist.cluster_id
        return engine.connect(name, _CONNECT_MS)


def _port_of(engine: AddressedEngine) -> int:
    """Return the port at which an engine listens."""
    return split_name(engine.datadist.listen_address or "", "listen_address")[1] or 0
