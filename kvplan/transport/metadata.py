"""Metadata that all transports publish to peers: MessagePack, validated while it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvplan.device.sharing import AllocationRef
from kvplan.status import invalid
from kvplan.validation import printable, shown

MAX_NBYTES: Final = 32 << 20  # of one document
_MAX_EXPLAINED_NBYTES: Final = 1 << 20  # a refusal of a larger document does not quote the value
_MAX_TEXT: Final = 300

# MessagePack itself ends at 2**64 - 1.
Address = Annotated[int, Meta(ge=1)]
Uint64 = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Pid = Annotated[int, Meta(ge=1, lt=2**31)]
Descriptor = Annotated[int, Meta(ge=0, lt=2**31)]
Instance = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=64)]

Document: TypeAlias = bytes | bytearray | memoryview | str

_T = TypeVar("_T")


def boot_id() -> str:
    """Return the id of the running kernel, which names the host: its containers share one kernel.

    Another host, or the same one after its next boot, has another id.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the metadata. Subclasses raise ValueError for fields that contradict each other."""


class Extent(Record, frozen=True):
    """Memory [address, address + nbytes) of a process."""

    address: Address
    nbytes: Size

    def __post_init__(self) -> None:
        if self.address + self.nbytes > 2**64:
            raise ValueError(
                f"address {self.address} + nbytes {self.nbytes} ends past 2**64; the sum must be "
                "in [2, 2**64]"
            )

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether [address, address + nbytes) lies inside."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class Range(Extent, frozen=True):
    """Registered memory [address, address + nbytes) of a process.

    Attributes:
        slot, generation: Identify the registration, which is valid while this slot has this
            generation in the owner's generation table.
        writable: True if peers may write to the memory.
    """

    slot: Annotated[int, Meta(ge=0, lt=2**24)]
    generation: Number
    writable: bool

    @property
    def is_preferred(self) -> bool:
        """True if this range is preferred to others that hold the same tensor."""
        return False

    @property
    def is_announced(self) -> bool:
        """True if peers announce their use of the memory, so that the owner can wait for them."""
        return self.writable

    @property
    def is_mapped(self) -> bool:
        """True if the owner cannot revoke a peer's access to the memory."""
        return True

    def __str__(self) -> str:
        return f"{self.address:#x}+{self.nbytes}{'' if self.writable else ' (read-only)'}"


class PeerMetadata(Record, frozen=True, tag_field="schema"):
    """The metadata of one process. Its tag names the transport and the version of the format.

    `str()` of it names the peer in messages: "process 12 of node3".
    """

    @property
    def ranges(self) -> tuple[Any, ...]:
        """The registered memory."""
        raise NotImplementedError

    @property
    def owner(self) -> str:
        """The publishing transport, unique among all transports: "instance 0a1b..."."""
        raise NotImplementedError

    def is_of_owner(self, other: Self) -> bool:
        """Return whether `other` was published by the same transport."""
        return self.owner == other.owner

    def to_bytes(self) -> bytes:
        """Encode the metadata."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Decode and validate the metadata of a peer."""
        if not isinstance(blob, bytes | bytearray | memoryview):
            raise TypeError(f"metadata must be bytes, not {type(blob).__name__}")
        return read(cls, blob, "peer metadata", msgspec.msgpack.decode)


class InstanceMetadata(PeerMetadata, frozen=True):
    """Metadata of a transport that is identified by a random number.

    Attributes:
        instance: 32 hexadecimal digits, unique to this transport.
    """

    instance: Instance

    @property
    def owner(self) -> str:
        """See `PeerMetadata.owner`."""
        return f"instance {self.instance}"


class ProcessMetadata(InstanceMetadata, frozen=True):
    """Metadata of a transport whose peers may be on other hosts.

    Attributes:
        host, pid: The process, for messages.
    """

    host: Name
    pid: Pid

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


def read(
    kind: type[_T],
    data: bytes | bytearray | memoryview | str,
    name: str,
    decode: Callable[..., Any],
) -> _T:
    """Decode and validate `data` as a `kind`; LLM_PARAM_INVALID names the wrong field."""
    if len(data) > MAX_NBYTES:
        raise invalid(f"{name} has {len(data)} bytes; at most {MAX_NBYTES} are allowed")
    try:
        document: _T = decode(data, type=kind)
    except msgspec.ValidationError as error:
        reason = _explain(error, kind, data, decode)
    except (ValueError, RecursionError, TypeError) as error:  # TypeError: msgspec 0.19, for keys
        reason = f"cannot be decoded: {error}"
    else:
        return document
    raise invalid(f"{name}: {printable(reason[:_MAX_TEXT])}")


def check_slots(ranges: Iterable[Range], num_slots: int) -> None:
    """Raise ValueError unless the slot of each range is in [0, num_slots)."""
    for i, item in enumerate(ranges):
        if item.slot >= num_slots:
            raise ValueError(f"ranges[{i}].slot={item.slot} is out of range [0, {num_slots})")


def check_printable(**texts: str) -> None:
    """Raise ValueError unless each text can be shown on a terminal."""
    for name, text in texts.items():
        if not text.isprintable():
            raise ValueError(f"{name} is {shown(text)}; it must consist of printable characters")


def check_inside(name: str, part: Extent, whole_name: str, whole: Extent | AllocationRef) -> None:
    """Raise ValueError unless `part` lies inside `whole`."""
    if not 0 <= part.address - whole.address <= whole.nbytes - part.nbytes:
        raise ValueError(
            f"{name} at {part.address}, nbytes {part.nbytes}, is not inside its {whole_name} at "
            f"{whole.address}, nbytes {whole.nbytes}"
        )


def _explain(error: Exception, kind: type[Any], data: Document, decode: Callable[..., Any]) -> str:
    """Return the field, its value and the allowed range. msgspec's messages lack the value."""
    text, _, place = str(error).rpartition(" - at `$")
    text, place = (text, place.rstrip("`").lstrip(".")) if text else (place, "")
    if error.__cause__ is not None:  # raised by a __post_init__, which names the fields
        return f"{place}: {text}" if place else text
    found = ""
    if len(data) <= _MAX_EXPLAINED_NBYTES:
        try:
            value = decode(data)
            for field, index in re.findall(r"(\w+)|\[(\d+)\]", place):
                value = value[int(index)] if index else value[field]
            found = f"{place or 'document'} is {shown(value)}"
        except (ValueError, LookupError, TypeError, RecursionError):
            found = ""
    expected = f"{text[:1].lower()}{text[1:]}"
    if place == "schema":
        expected = f"this kvplan reads {kind.__struct_config__.tag!r}"
    return f"{found or place or 'document'}; {expected}"


def tag_of(instance: str) -> int:
    """Return the 32-bit number that marks announced writes to the transport `instance`."""
    return int(instance[:8], 16)
