"""Says which CURVE clients may connect: libzmq asks it (ZAP, ZeroMQ RFC 27) for every one."""

from __future__ import annotations

import asyncio
from typing import Final, cast

import zmq

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_ADMITTED, _REFUSED = (b"200", b"OK"), (b"400", b"not the key of this cluster")


class Gatekeeper:
    """Admits the clients whose public key is the domain's name in hexadecimal; holds no state.

    Args:
        socket: a ROUTER (REP would insist on turns), which is closed with it.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._descriptor = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._answer)

    def close(self) -> None:
        """Stop answering: nobody is admitted any more."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            envelope, request = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
            code, text = _REFUSED
            match request:
                case [b"1.0", _, domain, _, _, b"CURVE", public] if public.hex() == domain.decode():
                    code, text = _ADMITTED
            request_id = request[1] if len(request) > 1 else b""
            reply = [_VERSION, request_id, code, text, b"", b""]
            self._socket.send_multipart([*envelope, *reply])
