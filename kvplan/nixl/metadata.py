"""Metadata of an agent, its address and registered memory, and a port to exchange metadata."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from kvplan.control.endpoint import Endpoint
from kvplan.links.address_index import AddressIndex, Extent
from kvplan.nixl.lists import Rows
from kvplan.nixl.values import nixl_mem_t, nixlMismatchError
from kvplan.status import LLMException
from kvplan.system.limits import start_thread
from kvplan.system.logs import LimitedLog, Log

_log = LimitedLog(Log("kvplan.nixl"))

MAGIC: Final = b"kvplan.nixl 1\n"
_MAX_NBYTES: Final = 64 << 20
_TIMEOUT_S: Final = 5.0

_Uint64 = Annotated[int, Meta(ge=0)]  # MessagePack itself ends at 2**64 - 1
Region = tuple[Annotated[int, Meta(ge=0, le=4)], _Uint64, _Uint64, _Uint64]
"""Registered memory: kind, address, bytes, device."""


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Facts that peers need about an agent. None of them is secret."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    instance: _Uint64  # the cluster id of its engine
    address: str  # where its engine listens; empty if left out
    is_partial: bool
    regions: list[Region]

    def to_bytes(self) -> bytes:
        """Encode the metadata."""
        return MAGIC + msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Metadata:
        """Decode metadata; raise nixlMismatchError for anything else."""
        if not data.startswith(MAGIC):
            raise nixlMismatchError(
                f"{len(data)} bytes are not metadata of kvplan.nixl; both agents must be kvplan's"
            )
        try:
            found = _DECODER.decode(data[len(MAGIC) :])
            if found.address:
                Endpoint.parse(found.address)
        except (msgspec.MsgspecError, UnicodeDecodeError, LLMException, RecursionError) as error:
            raise nixlMismatchError(f"the metadata of an agent is malformed: {error}") from None
        return found


_DECODER: Final = msgspec.msgpack.Decoder(Metadata)


class Regions:
    """Registered memory, which is searched for descriptors."""

    def __init__(self, who: str, regions: Iterable[Region] = ()) -> None:
        self._who = who
        self.regions: dict[Region, None] = dict.fromkeys(regions)
        self._found: dict[int, AddressIndex[None]] = {}

    def add(self, regions: Iterable[Region]) -> None:
        """Add memory."""
        self.regions.update(dict.fromkeys(regions))
        self._found = {}

    def remove(self, region: Region) -> None:
        """Remove memory."""
        self.regions.pop(region, None)
        self._found = {}

    def check(self, side: str, kind: nixl_mem_t, rows: Rows) -> None:
        """Raise LLM_KV_CACHE_NOT_EXIST with the first descriptor that is not in this memory."""
        index = self._found.get(kind)
        if index is None:
            index = self._found[kind] = AddressIndex(
                self._who, [Extent(at, size, None, 0) for each, at, size, _ in self.regions
                            if each == kind]
            )  # fmt: skip
        starts, sizes = (np.ascontiguousarray(rows[:, column]) for column in (0, 1))
        index.cut(side, starts, starts, sizes)


class Listener:
    """A port with a thread, for agents that ask for metadata, or send or withdraw theirs."""

    def __init__(
        self, host: str, port: int, local: Callable[[], bytes], load: Callable[[bytes], object],
        drop: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._local, self._load, self._drop = local, load, drop
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        try:
            start_thread("kvplan-nixl-listen", self._run)
        except LLMException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                try:
                    client.settimeout(_TIMEOUT_S)
                    self._answer(client, receive(client))
                except Exception as error:  # a peer may send anything
                    _log.warning("the listening thread has refused a peer: %s", error)

    def _answer(self, client: socket.socket, request: bytes) -> None:
        if request == b"get":
            send(client, self._local())
        elif request.startswith(b"put "):
            self._load(request[4:])
        elif request.startswith(b"drop "):
            self._drop(request[5:].decode())
        else:
            raise ValueError(f"a request of {len(request)} bytes is not get, put or drop")


def ask(host: str, port: int, request: bytes, *, has_answer: bool = False) -> bytes:
    """Send a request to a listener; return its answer, empty unless `has_answer`."""
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as peer:
        send(peer, request)
        return receive(peer) if has_answer else b""


def send(peer: socket.socket, data: bytes) -> None:
    """Send the length of a message, then the message."""
    peer.sendall(len(data).to_bytes(4, "little") + data)


def receive(peer: socket.socket) -> bytes:
    """Receive a message that `send` sent."""
    size = int.from_bytes(_exactly(peer, 4), "little")
    if size > _MAX_NBYTES:
        raise ValueError(f"a message of {size} bytes is longer than {_MAX_NBYTES}")
    return _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := peer.recv(min(size - len(data), 1 << 20))):
            raise ConnectionError(f"the peer has closed after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)
