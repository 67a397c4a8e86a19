"""Values of Mooncake's engine, and the checks and conversions of its arguments."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvplan.status import invalid
from kvplan.validation import UINT64_MAX, as_bytes, check_type, shown

_TIMEOUT_VARIABLE: Final = "MC_TRANSFER_TIMEOUT"
_TIMEOUT_S, _LEAST_S = 30, 5  # and 1 ns for each byte
_NS_PER_MS: Final = 1e6

Column = NDArray[np.uint64]


class TransferOpcode(IntEnum):
    """The direction of a transfer, as its caller sees it."""

    __str__ = Enum.__str__

    Read = 0
    Write = 1


Read, Write = TransferOpcode.Read, TransferOpcode.Write


class TransferNotify:
    """A message, which the peer reads by `get_notifies`."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name: str = name
        self.msg: str = msg

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"


def direction_of(opcode: TransferOpcode) -> Literal["pull", "push"]:
    """Return the engine's word for the direction of a transfer."""
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"opcode={shown(opcode)} must be a TransferOpcode")
    return "pull" if opcode is Read else "push"


def timeout_ms(sizes: Column) -> float:
    """Return a transfer's timeout: MC_TRANSFER_TIMEOUT (30 s, at least 5 s) plus 1 ns a byte."""
    text = os.environ.get(_TIMEOUT_VARIABLE, "")
    seconds = int(text) if text.isdecimal() else _TIMEOUT_S
    return max(seconds, _LEAST_S) * 1000 + int(sizes.sum()) / _NS_PER_MS


def columns_of(*lists: Sequence[int]) -> tuple[Column, Column, Column]:
    """Return the columns of a batch: local addresses, addresses in the peer, and sizes."""
    names = ("buffers", "peer_buffer_addresses", "lengths")
    local, remote, sizes = (uints(*pair) for pair in zip(names, lists, strict=True))
    if not len(local) == len(remote) == len(sizes):
        raise invalid(
            f"{len(local)} buffers, {len(remote)} peer_buffer_addresses, {len(sizes)} lengths"
        )
    return local, remote, sizes


def uints(name: str, values: Any) -> Column:
    """Return a list of addresses or sizes as a column; raise TypeError for anything else."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} is a {type(values).__name__}; it must be a list of int")
    try:
        return np.frombuffer(array("Q", values), np.uint64) if values else np.empty(0, np.uint64)
    except (OverflowError, TypeError) as error:
        raise TypeError(f"{name} must have integers in [0, 2**64): {error}") from None


def uint(name: str, value: Any) -> int:
    """Return an address or a size as int; raise TypeError for anything else."""
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int")
    number = int(value)
    if not 0 <= number <= UINT64_MAX:
        raise TypeError(f"{name}={number:#x} is out of range [0, 2**64)")
    return number


def check_text(name: str, value: object) -> None:
    """Raise TypeError for a value that is not text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be str")


def encoded(notify: TransferNotify) -> tuple[bytes, bytes]:
    """Return the name and the text of a message as bytes."""
    check_type("notify", notify, TransferNotify)
    return as_bytes("notify.name", notify.name), as_bytes("notify.msg", notify.msg)


def decoded(name: bytes, msg: bytes) -> TransferNotify:
    """Return a message that has arrived; bytes that are not UTF-8 are replaced."""
    return TransferNotify(name.decode(errors="replace"), msg.decode(errors="replace"))
