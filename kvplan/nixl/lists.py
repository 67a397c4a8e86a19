"""Lists of descriptors: rows of an address, a size and a device, with a kind of memory."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvplan.nixl.values import nixl_mem_t, nixlNotFoundError
from kvplan.validation import as_bytes

Rows = NDArray[np.uint64]


def rows_of(descs: Iterable[Any]) -> Rows:
    """Return descriptors as rows of address, size and device.

    Fewer than 3 numbers raise IndexError; a number outside uint64 raises RuntimeError.
    """
    given = list(descs)
    if set(map(len, given)) - {3}:
        given = [(desc[0], desc[1], desc[2]) for desc in given]
    try:
        flat = array("Q", chain.from_iterable(given))
    except (TypeError, OverflowError) as error:
        raise RuntimeError(f"a descriptor has three integers in [0, 2**64): {error}") from None
    return np.frombuffer(flat, np.uint64).reshape(-1, 3) if flat else np.empty((0, 3), np.uint64)


def rows_of_array(values: Any) -> Rows:
    """Return a copy of a three-column array of 64-bit integers, as rows."""
    if values.ndim != 2 or values.shape[1] != 3 or values.dtype.kind not in "iu":
        raise ValueError(f"an array of {values.dtype}{values.shape} must be 3 columns of integers")
    if values.dtype.itemsize != 8:
        raise ValueError(f"an array of {values.dtype} must have integers of 64 bits")
    rows: Rows = values.astype(np.uint64, order="C")  # a copy, in native byte order
    return rows


class DescList:
    """Descriptors of one kind of memory."""

    TEXT: ClassVar[type | None] = None  # type of a fourth column
    __slots__ = ("_count", "_rows", "_texts", "_type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, type: Any, descs: Any = 0) -> None:  # noqa: A002
        self._type = nixl_mem_t(type)
        self._rows: Rows = np.empty((0, 3), np.uint64)
        self._texts: list[Any] = []
        if isinstance(descs, np.ndarray):
            self._rows = rows_of_array(descs)
            self._texts = [self.TEXT()] * len(self._rows) if self.TEXT else []
        elif isinstance(descs, list):
            if self.TEXT:
                self._texts = [self._text(desc) for desc in descs]
                descs = [desc[:3] for desc in descs]
            self._rows = rows_of(descs)
        elif not isinstance(descs, int):
            raise TypeError(f"descs is a {descs.__class__.__name__}; it must be a list or an array")
        self._count = len(self._rows)

    @property
    def rows(self) -> Rows:
        """The address, size and device of each descriptor."""
        return self._rows[: self._count]

    @property
    def texts(self) -> list[Any]:
        """The fourth column."""
        return self._texts

    def getType(self) -> nixl_mem_t:  # noqa: N802 - names of the original
        """Return the kind of memory."""
        return self._type

    def descCount(self) -> int:  # noqa: N802
        """Return the number of descriptors."""
        return self._count

    def isEmpty(self) -> bool:  # noqa: N802
        """Return True for a list without descriptors."""
        return self._count == 0

    def append(self, desc: Any) -> None:
        """Add a descriptor."""
        row = rows_of([desc[:3]])
        if self.TEXT:
            self._texts.append(self._text(desc))
        if self._count == len(self._rows):
            grown = np.empty((max(8, 2 * self._count), 3), np.uint64)
            grown[: self._count] = self._rows
            self._rows = grown
        self._rows[self._count] = row[0]
        self._count += 1

    addDesc = append  # noqa: N815

    def index(self, desc: Any) -> int:
        """Return the index of an address, size and device; raise nixlNotFoundError if absent."""
        for place in np.flatnonzero((self.rows == rows_of([desc[:3]])).all(axis=1)).tolist():
            return int(place)
        raise nixlNotFoundError(f"the list has no descriptor {desc}")

    def remDesc(self, index: int) -> None:  # noqa: N802
        """Remove a descriptor."""
        self._rows = np.delete(self.rows, self._place(index), axis=0)
        self._count -= 1
        if self._texts:
            del self._texts[index]

    def clear(self) -> None:
        """Remove all descriptors."""
        self.__init__(self._type)  # type: ignore[misc]

    def print(self) -> None:
        """Write the list to the standard output."""
        lines = [f"DescList of mem type {int(self._type)}"]
        lines += [f"  {self[place]}" for place in range(self._count)]
        sys.stdout.write("\n".join(lines) + "\n")

    def _place(self, index: Any) -> int:
        if not hasattr(index, "__index__") or index < 0:
            raise TypeError(f"an index of a list is an integer >= 0, not {index!r}")
        if index >= self._count:
            raise IndexError(f"Index {index} is out of range [0, {self._count})")
        return int(index)

    def _text(self, desc: Any) -> Any:
        text = desc[3]
        if self.TEXT is bytes:
            return as_bytes("desc[3]", text) if isinstance(text, str) else bytes(text)
        return text.decode() if isinstance(text, bytes) else str(text)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        row = tuple(self._rows[self._place(index)].tolist())
        return (*row, self._texts[index]) if self.TEXT else row

    def __setitem__(self, index: int, desc: Any) -> None:
        row, place = rows_of([desc[:3]]), self._place(index)
        if self.TEXT:
            self._texts[place] = self._text(desc)
        self._rows[place] = row[0]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        same = self._type == other._type and self._texts == other._texts
        return bool(same and np.array_equal(self.rows, other.rows))

    def __reduce__(self) -> tuple[Any, ...]:
        descs = [self[place] for place in range(self._count)]
        return type(self), (int(self._type), descs)


class nixlXferDList(DescList):  # noqa: N801
    """Ranges to transfer: address, size, device."""


class nixlRegDList(DescList):  # noqa: N801
    """Memory to register: address, size, device, and metadata as bytes."""

    TEXT = bytes

    def trim(self) -> nixlXferDList:
        """Return the list without its texts."""
        return nixlXferDList(self._type, self.rows.copy())


class nixlRemoteDList(DescList):  # noqa: N801
    """Ranges of remote memory: address, size, device, and the agent."""

    TEXT = str

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("cannot pickle 'nixlRemoteDList' object")
