"""The native sources as a library, to call what is not for Python and to send raw messages."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from ctypes import byref, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint
from ctypes import c_void_p as pointer
from pathlib import Path

from kvplan.transport.ucx.library import find

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PULL, DATA, PUSH, DONE, CANCEL = range(4, 9)
ASK, LAST, FINAL = 1, 2, 1
TOKEN = 16


NATIVE = ROOT / "kvnative/src"
# What an end does not need.
ONE_SIDED = {"ucx_one_sided", "ucx_region", "ucx_mover", "ucx_move_request", "ucx_operation"}


def build_all(folder: Path) -> ctypes.CDLL:
    """What an end of UCX is made of, and hostile.c."""
    ends = [it for it in sorted(NATIVE.glob("ucx_*.c")) if it.stem not in ONE_SIDED]
    others = [NATIVE / f"{name}.c" for name in ("clock", "copy", "job", "report")]
    return build(folder, HERE / "hostile.c", *ends, *others)


def build(folder: Path, *sources: Path) -> ctypes.CDLL:
    """Compile and load; with the sanitizers that this run has."""
    made = folder / "libhostile.so"
    checked = os.environ.get("KVPLAN_SANITIZE", "")
    subprocess.run(
        [
            *("gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread"),
            *([f"-fsanitize={checked}", "-fno-sanitize-recover=all"] if checked else []),
            *(f"-I{ROOT / 'include'}", f"-I{NATIVE}"),
            *(str(source) for source in sources),
            *("-o", str(made)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(made))


class Failure(ctypes.Structure):
    _fields_ = (("status", c_int), ("code", c_int), ("message", c_char * 256))


class HostileEnd:
    """An end without anybody who serves; its links say what they are told to."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = library
        self._ucx = ctypes.create_string_buffer(1 << 16)
        self._end, failure = pointer(), Failure()
        path = os.fsencode(find().path)
        if library.kvn_ucx_library_open(path, self._ucx, byref(failure)):
            raise RuntimeError(failure.message.decode())

        class Setting(ctypes.Structure):
            _fields_ = (("name", c_char_p), ("value", c_char_p))

        setting = Setting(b"NET_DEVICES", b"lo")
        if library.kvn_ucx_end_create(
            self._ucx, 0, byref(setting), c_size_t(1), b"", byref(self._end), byref(failure)
        ):
            raise RuntimeError(failure.message.decode())
        nbytes = c_size_t()
        library.kvn_ucx_end_address.restype = pointer
        start = library.kvn_ucx_end_address(self._end, byref(nbytes))
        self.address = ctypes.string_at(start, nbytes.value)

    def link(self, token: bytes, peer_address: bytes) -> HostileLink:
        link, failure = pointer(), Failure()
        if self._calls.kvn_ucx_link_create(
            self._end, token, peer_address, c_size_t(len(peer_address)), byref(link), byref(failure)
        ):
            raise RuntimeError(failure.message.decode())
        return HostileLink(self._calls, link, token)

    def close(self) -> None:
        self._calls.kvn_ucx_end_close(self._end)


class HostileLink:
    """One of its links."""

    def __init__(self, library: ctypes.CDLL, link: pointer, token: bytes) -> None:
        self._calls, self._link, self.token = library, link, token

    def connect(self) -> None:
        failure = Failure()
        if self._calls.hostile_connect(self._link, c_int64(20_000_000_000), byref(failure)):
            raise RuntimeError(failure.message.decode())

    def say(self, message: int, header: bytes, payload: bytes = b"", times: int = 1) -> int:
        """Send it with the link's token before the header; KVN_ status."""
        return self.say_raw(message, self.token + header, payload, times)

    def say_raw(self, message: int, header: bytes, payload: bytes = b"", times: int = 1) -> int:
        status: int = self._calls.hostile_say(
            self._link,
            c_uint(message),
            header,
            c_size_t(len(header)),
            payload,
            c_size_t(len(payload)),
            c_uint(times),
        )
        return status

    @property
    def failed(self) -> bool:
        failure = Failure()
        self._calls.kvn_ucx_link_has_failed.restype = ctypes.c_bool
        return bool(self._calls.kvn_ucx_link_has_failed(self._link, byref(failure)))


def piece(address: int, nbytes: int, index: int = 0) -> bytes:
    return struct.pack("<QII", address, nbytes, index)


def range_of(slot: int, generation: int) -> bytes:
    return struct.pack("<QII", generation, slot, 0)


def pull(request: int, part: int, pieces: int, ranges: int, first: int = 0) -> bytes:
    return struct.pack("<QQQII", request, part, first, pieces, ranges)


def data(request: int, part: int, at: int, skip: int, flags: int = 0) -> bytes:
    return struct.pack("<QQIIII", request, part, at, skip, flags, 0)


def push(
    request: int, sequence: int, pieces: int, ranges: int, flags: int = 0, first: int = 0
) -> bytes:
    return struct.pack("<QQQIIII", request, sequence, first, pieces, ranges, flags, 0)


def done(request: int, number: int, reason: int = 0, of: int = 0, failed: int = 0) -> bytes:
    return struct.pack("<QQQII", request, number, failed, reason, of)


def cancel(request: int, of: int = 0) -> bytes:
    return struct.pack("<QII", request, of, 0)
