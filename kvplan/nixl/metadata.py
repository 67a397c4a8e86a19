"""Metadata of an agent, its address and registered memory, and a port to exchange metadata."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Final

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
_REQUEST_S: Final = 5.0  # timeout of a listener for a request
_ANSWER_S: Final = 30.0  # of an agent for an answer: requests of others may come first
_PAUSE_S: Final = 0.1  # if this process has no free descriptor

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
        found = self._found  # first: another thread replaces it after a change of the regions
        index = found.get(kind)
        if index is None:
            index = found[kind] = AddressIndex(
                self._who, [Extent(at, size, None, 0) for each, at, size, _ in list(self.regions)
                            if each == kind]
            )  # fmt: skip
        starts, sizes = (np.ascontiguousarray(rows[:, column]) for column in (0, 1))
        index.cut(side, starts, starts, sizes)


class Listener:
    """A port with a thread, for agents that ask for metadata, or send or withdraw theirs."""

    def __init__(self, host: str, port: int, agent: Any) -> None:
        self._agent = agent  # a proxy: this thread keeps no agent alive
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._pid, self._closed = os.getpid(), threading.Event()
        self._socket = socket.create_server((host, port), family=family)
        try:
            start_thread("kvplan-nixl-listen", self._run)
        except LLMException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        if os.getpid() == self._pid:  # a forked child shares the socket with its parent
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:  # closed, or out of descriptors
                self._closed.wait(_PAUSE_S)
                continue
            with client:
                try:
                    self._answer(client, receive(client, _REQUEST_S))
                except Exception as error:  # a peer may send anything
                    _log.warning("the listening thread has refused a peer: %s", error)

    def _answer(self, client: socket.socket, request: bytes) -> None:
        if request == b"get":
            send(client, self._agent.getLocalMD())
        elif request.startswith(b"put "):
            self._agent.loadRemoteMD(request[4:])
        elif request.startswith(b"drop "):
            self._agent.invalidateRemoteMD(request[5:].decode())
        else:
            raise ValueError(f"a request of {len(request)} bytes is not get, put or drop")


def ask(host: str, port: int, request: bytes, *, has_answer: bool = False) -> bytes:
    """Send a request to a listener; return its answer, empty unless `has_answer`."""
    with socket.create_connection((host, port), timeout=_REQUEST_S) as peer:
        send(peer, request)
        return receive(peer) if has_answer else b""


def send(peer: socket.socket, data: bytes) -> None:
    """Send the length of a message, then the message."""
    peer.sendall(len(data).to_bytes(4, "little") + data)


def receive(peer: socket.socket, timeout_s: float = _ANSWER_S) -> bytes:
    """Receive a message that `send` sent, all of it within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    size = int.from_bytes(_exactly(peer, 4, deadline), "little")
    if size > _MAX_NBYTES:
        raise ValueError(f"a message of {size} bytes is longer than {_MAX_NBYTES}")
    return _exactly(peer, size, deadline)


def _exactly(peer: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError(f"{len(data)} of {size} bytes have arrived in time")
        peer.settimeout(left_s)
        with suppress(TimeoutError):  # the next turn says how many bytes have arrived
            if not (piece := peer.recv(min(size - len(data), 1 << 20))):
                raise ConnectionError(f"the peer has closed after {len(data)} of {size} bytes")
            data += piece
    return bytes(data)
