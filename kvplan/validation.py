"""Checks of arguments; each refusal names the argument, its value and the allowed range."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from numbers import Real
from operator import index
from pathlib import Path
from reprlib import Repr
from typing import Any, SupportsIndex, TypeVar

import msgspec

from kvplan.status import invalid

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT64_MAX = 2**63 - 1

_T = TypeVar("_T")

_SHORT = Repr()
_SHORT.maxother = _SHORT.maxstring = 200


def shown(value: object) -> str:
    """Return the repr of `value` for a message; a long one is cut."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """Return `text` as one line without control characters for terminals."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.splitlines()))


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text to a file. An OSError names the file: that of a full disk names none."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a regular file; refuse others, which may block or not end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise invalid(f"{os.fspath(path)} is not a regular file")


def resolved(kind: type[_T]) -> type[_T]:
    """Resolve a struct's fields at import: msgspec crashes if two threads do so simultaneously.

    Decorate every struct for which no module has a decoder.
    """
    msgspec.msgpack.Decoder(kind)
    return kind


def mismatch(value: object, *expected: type) -> str:
    """Return `int or str, not float`; with modules if two types have the same name."""
    kinds = (*expected, type(value))
    twice = type(value).__name__ in [kind.__name__ for kind in expected]
    *needed, found = [
        f"{kind.__module__}.{kind.__qualname__}" if twice else kind.__name__ for kind in kinds
    ]
    return f"{' or '.join(needed)}, not {found}"


def check_type(name: str, value: object, expected: type[_T]) -> _T:
    """Return `value` if it is an `expected`; a bool is not an int."""
    if type(value) is expected:  # almost always
        return value
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"{name}={shown(value)} must be {mismatch(value, expected)}")
    return value


def is_unicode(text: str) -> bool:
    """Return False for text with surrogates, which UTF-8 cannot represent."""
    return text.isascii() or re.search("[\ud800-\udfff]", text) is None


def as_bytes(name: str, value: Any) -> bytes:
    """Return text or any buffer as bytes."""
    if isinstance(value, str):
        if is_unicode(value):
            return value.encode()
        raise ValueError(f"{name}={shown(value)} is not Unicode text")
    with suppress(TypeError):
        return bytes(memoryview(value))
    raise TypeError(f"{name}={shown(value)} must be str or bytes-like, not {type(value).__name__}")


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is not one of the allowed words."""
    if check_type(name, value, str) not in allowed:
        raise invalid(f"{name}={shown(value)} must be one of {', '.join(allowed)}")


def check_mapping(name: str, value: object) -> None:
    """Refuse a value that is not a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={shown(value)} must be a mapping, not {type(value).__name__}")


def check_width(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an int in [low, high], the width of a field."""
    number = value if type(value) is int else check_type(name, value, int)
    if not low <= number <= high:
        raise ValueError(f"{name}={number} is out of range [{low}, {high}]")
    return number


def check_range(name: str, value: object, low: int, high: int) -> None:
    """Refuse a value that is not an int in [low, high]."""
    if not low <= check_type(name, value, int) <= high:
        raise invalid(f"{name}={value} is out of range [{low}, {high}]")


def check_timeout(timeout_ms: Any, *, positive: bool = False) -> None:
    """Refuse a timeout that is negative, not a number, or a bool; if `positive`, refuse 0 too."""
    if timeout_ms is None:
        return
    is_number = isinstance(timeout_ms, float | int | Real)
    if isinstance(timeout_ms, bool) or not is_number:
        raise TypeError(f"timeout_ms={shown(timeout_ms)} must be a number or None")
    try:
        number = float(timeout_ms)
    except OverflowError:
        raise ValueError(f"timeout_ms={shown(timeout_ms)} must be in the range of floats") from None
    if not number >= 0 or (positive and number == 0):
        allowed = "> 0" if positive else ">= 0"
        raise ValueError(f"timeout_ms={timeout_ms} must be {allowed} or None")


def take_ints(value: object, *names: str) -> None:
    """Convert attributes of a frozen value, such as np.int64, to int."""
    for name in names:
        if type(number := getattr(value, name)) is not int:
            object.__setattr__(value, name, as_int(name, number))


def as_int(name: str, value: SupportsIndex) -> int:
    """Return `value` as an int, such as an integer of NumPy; refuse a bool."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return index(value)
    raise TypeError(f"{name}={shown(value)} must be {mismatch(value, int)}")


def check_index(name: str, value: SupportsIndex, size: int) -> int:
    """Return `value` if it is an index in [0, size)."""
    if type(value) is int and 0 <= value < size:  # almost always
        return value
    number = as_int(name, value)
    if not 0 <= number < size:
        raise invalid(f"{name}={number} is out of range [0, {size})")
    return number
