"""What a process tells its peers about its device and the memory it has registered, as JSON.

Checked as strictly as the local transport's: it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvplan.transport.documents import Document, fields_of, write_schema
from kvplan.transport.hccl.device_address import DeviceAddress

SCHEMA: Final = "kvplan.hccl"
SCHEMA_VERSION: Final = 1
MAX_NBYTES: Final = 32 << 20
MAX_SLOTS: Final = 1 << 24

_PEER: Final = Document("peer metadata", MAX_NBYTES)
_ADDRESS = (1, 2**64 - 1)
_SIZE = (1, 2**63 - 1)
_NUMBER = (0, 2**63 - 1)
_BOARD = {"address": _ADDRESS, "num_slots": (1, MAX_SLOTS)}
_RANGE = {"address": _ADDRESS, "nbytes": _SIZE, "slot": (0, MAX_SLOTS - 1), "generation": _NUMBER}
_REGION = {"number": _NUMBER, "address": _ADDRESS, "nbytes": _SIZE}
_TOP = ("instance", "product", "device", "board", "newest", "ranges")


@dataclass(frozen=True, slots=True)
class BoardRef:
    """Where the registration board lies in the device's memory: a word of 8 bytes for each slot."""

    address: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class RegionRef:
    """Memory [address, address + nbytes) that HCCL knows; numbers rise with each new region."""

    number: int
    address: int
    nbytes: int

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies inside."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Range:
    """Registered memory [address, address + nbytes) of a process.

    `slot` and `generation` say on the board whether it is still registered; `regions` are what HCCL
    knows it as, in the order of addresses.
    """

    address: int
    nbytes: int
    slot: int
    generation: int
    writable: bool
    on_device: bool
    regions: tuple[RegionRef, ...]

    @property
    def arena(self) -> None:
        """None: nothing of it is mapped anywhere."""

    def region_of(self, address: int, nbytes: int) -> RegionRef | None:
        """The one region that holds [address, address + nbytes); None: it takes several."""
        return next((it for it in self.regions if it.holds(address, nbytes)), None)

    def __str__(self) -> str:
        kind = "device" if self.on_device else "host"
        return f"{self.address:#x}+{self.nbytes} ({kind}{'' if self.writable else ', read-only'})"


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a peer needs to reach this process's device.

    Attributes:
        instance: 32 hexadecimal digits, which no other transport has.
        product: of the device, such as "A2".
        device: where it is.
        board: of registrations.
        newest: the highest number of a region so far; a connection that is made later has bound
            all of them, but for those that have gone.
        ranges: that it names.
    """

    instance: str
    product: str
    device: DeviceAddress
    board: BoardRef
    newest: int
    ranges: tuple[Range, ...] = ()

    def to_bytes(self) -> bytes:
        """As JSON, UTF-8."""
        fields = {
            "instance": self.instance,
            "product": self.product,
            "device": self.device.to_dict(),
            "board": fields_of(self.board),
            "newest": self.newest,
            "ranges": [
                {**fields_of(it), "regions": [fields_of(region) for region in it.regions]}
                for it in self.ranges
            ],
        }
        return write_schema(SCHEMA, SCHEMA_VERSION, fields)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Metadata:
        """Check and read what `to_bytes` of a peer has written.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and the allowed range.
            TypeError: `blob` is not bytes.
        """
        document = _PEER.read_schema(blob, SCHEMA, SCHEMA_VERSION)
        fields = _PEER.fields("", document, {"schema", "schema_version", *_TOP})
        board = _PEER.fields("board", fields["board"], set(_BOARD))
        ref = BoardRef(**_PEER.numbers("board", board, _BOARD))
        newest = _PEER.numbers("document", fields, {"newest": _NUMBER})["newest"]
        ranges = _PEER.elements("ranges", fields["ranges"])
        return cls(
            _PEER.text("instance", fields["instance"], _is_instance, "32 hexadecimal digits"),
            _PEER.text("product", fields["product"], _is_name, "1 to 64 printable characters"),
            DeviceAddress.of_fields(_PEER, "device", fields["device"]),
            ref,
            newest,
            tuple(_range(f"ranges[{i}]", it, ref, newest) for i, it in enumerate(ranges)),
        )


def _range(path: str, value: object, board: BoardRef, newest: int) -> Range:
    fields = _PEER.fields(path, value, {"writable", "on_device", "regions", *_RANGE})
    numbers = _PEER.numbers(path, fields, _RANGE)
    writable = _PEER.flag(f"{path}.writable", fields["writable"])
    on_device = _PEER.flag(f"{path}.on_device", fields["on_device"])
    _PEER.check_range(path, numbers, board.num_slots)
    regions = []
    at, end = numbers["address"], numbers["address"] + numbers["nbytes"]
    for i, given in enumerate(_PEER.elements(f"{path}.regions", fields["regions"])):
        where = f"{path}.regions[{i}]"
        region = RegionRef(
            **_PEER.numbers(where, _PEER.fields(where, given, set(_REGION)), _REGION)
        )
        if region.number > newest:
            raise _PEER.bad(f"{where}.number is {region.number}; the newest region is {newest}")
        if not region.address <= at < region.address + region.nbytes:
            raise _PEER.bad(
                f"{where} at {region.address}, nbytes {region.nbytes}, does not have byte {at}"
            )
        at = min(end, region.address + region.nbytes)
        regions.append(region)
    if at < end:
        raise _PEER.bad(f"{path}.regions end at {at}; the range ends at {end}")
    return Range(writable=writable, on_device=on_device, regions=tuple(regions), **numbers)


def _is_instance(text: str) -> bool:
    return len(text) == 32 and all(it in "0123456789abcdef" for it in text)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable()
