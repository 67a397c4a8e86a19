"""Metadata of the transport `tcp`."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvnative._backend import MAX_STRIPES
from kvplan.transport.metadata import ProcessMetadata, Range, check_printable, check_slots
from kvplan.validation import resolved

MAX_CONNECTIONS: Final = MAX_STRIPES  # per link and direction of requests
MAX_BUSY_POLL_US: Final = 10_000
MAX_SLOTS: Final = 1 << 16  # registrations of one transport


@resolved
class Metadata(ProcessMetadata, frozen=True, tag="kvplan.tcp 2"):
    """Everything that a peer needs to reach this process, except connections.

    Attributes:
        connections: The maximum number of connections per link and direction of requests.
        encrypt: True if this process requires encryption of all data.
        ranges: The registered memory.
    """

    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)]
    encrypt: bool
    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        check_printable(host=self.host)
        check_slots(self.ranges, MAX_SLOTS)
