"""What serving engines say to each other: each message is one notification of kvplan engines."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvplan.logs import LimitedLog, Log
from kvplan.status import invalid
from kvplan.validation import printable, shown

peer_log = LimitedLog(Log("kvplan.serving"))
"""Log of what peers cause: each kind of line is limited."""

PROTOCOL: Final = 2
"""Version of these messages; engines of different versions refuse each other."""

MAX_PART: Final = 3500  # bytes of a lease in one message; a notification has at most 4096
MAX_PARTS: Final = 8192
MAX_TRANSFER: Final = 128  # characters
MAX_FIELDS: Final = 3500  # bytes of what is compared
MAX_INSTANCE: Final = 32  # bytes
MAX_REASON: Final = 1000  # characters
MAX_HANDLES: Final = 128  # in one message
HANDLE_NBYTES: Final = 16

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Transfer = Annotated[str, Meta(max_length=MAX_TRANSFER)]
Instance = Annotated[bytes, Meta(max_length=MAX_INSTANCE)]
HandleValue = Annotated[bytes, Meta(max_length=HANDLE_NBYTES)]
"""The bytes of a handle; empty: a transfer is meant."""
ExactHandle = Annotated[bytes, Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Hello(_Message, frozen=True, tag=0):
    """What this side's cache and model are; answered with the other side's.

    Attributes:
        fields: name and value of each.
        instance: of the sender's process.
        answer: whether it is the answer.
    """

    fields: dict[str, str]
    instance: Instance
    answer: bool


class Ask(_Message, frozen=True, tag=1):
    """Asks for the leases of a request, which is answered when it has finished.

    Attributes:
        number: of the asker, for the answer.
        instance, handle, digest, transfer: of the reference.
        part, parts, data: a piece of `Goal.to_bytes`, where the producer shall push what it
            computes; parts come in their order.
    """

    number: Number
    instance: Instance
    handle: HandleValue
    digest: bytes
    transfer: Transfer = ""
    part: Number = 0
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    data: bytes = b""


class Grant(_Message, frozen=True, tag=2):
    """A part of the leases of all groups, in the order of the parts.

    Attributes:
        number: of the ask.
        handle: of the request there.
        pushed: tokens before this one are where the asker wanted them; 0: none was pushed.
        part, parts: which of how many.
        data: a piece of `encode_leases`.
    """

    number: Number
    handle: ExactHandle
    pushed: Number
    part: Number
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    data: bytes


class Refusal(_Message, frozen=True, tag=3):
    """Why there is no lease, or no agreement.

    Attributes:
        number: of the ask.
        reason: for people.
    """

    number: Number
    reason: Annotated[str, Meta(max_length=MAX_REASON)]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))


class Done(_Message, frozen=True, tag=4):
    """This reader needs the blocks of a request no more, or never did.

    Attributes:
        instance, digest, transfer: of the reference.
        handle: of the request there; empty if only its transfer is known.
        readers: how many have to say so before the blocks are free.
    """

    instance: Instance
    handle: HandleValue
    digest: bytes
    readers: Annotated[int, Meta(ge=1, le=4096)]
    transfer: Transfer = ""


class Renew(_Message, frozen=True, tag=5):
    """These requests are still waited for: their leases shall not expire yet.

    A peer that was not given a handle cannot make one up, so it renews only what it may read.

    Attributes:
        instance: of the producer.
        handles: of the requests there.
    """

    instance: Instance
    handles: Annotated[tuple[ExactHandle, ...], Meta(max_length=MAX_HANDLES)]


class Waiting(_Message, frozen=True, tag=6):
    """The answer to an ask for a request that is not entered yet; a grant or a refusal follows.

    Attributes:
        number: of the ask.
    """

    number: Number


Message = Hello | Ask | Grant | Refusal | Done | Renew | Waiting

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The notification that a message is."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read and check a notification."""
    try:
        return _decoder.decode(data)
    except Exception as error:  # the peer's input decides which: nesting raises RecursionError
        raise invalid(f"data={shown(data)} is no message of kvplan.serving: {error}") from None


def pieces(data: bytes) -> list[bytes]:
    """What of a lease, or of more, goes into one message each; at least one piece."""
    return [data[at : at + MAX_PART] for at in range(0, len(data), MAX_PART)] or [b""]


def grants(number: int, handle: bytes, pushed: int, leases: bytes) -> list[Grant]:
    """The parts in which leases are sent."""
    parts = pieces(leases)
    return [
        Grant(number, handle, pushed, part, len(parts), data) for part, data in enumerate(parts)
    ]
