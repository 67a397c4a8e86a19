"""What serving engines say to each other: each message is one notification of kvplan engines."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvplan.status import invalid
from kvplan.validation import printable, shown

PROTOCOL: Final = 1
"""Version of these messages; engines of different versions refuse each other."""

MAX_PART: Final = 3500  # bytes of a lease in one message; a notification has at most 4096
MAX_PARTS: Final = 8192
MAX_TRANSFER: Final = 128  # characters
MAX_FIELDS: Final = 3500  # bytes of what is compared

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Transfer = Annotated[str, Meta(max_length=MAX_TRANSFER)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """What this side's cache and model are; answered with the other side's.

    Attributes:
        fields: name and value of each.
        answer: whether it is the answer.
    """

    fields: dict[str, str]
    answer: bool


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks for the leases of a request, which is answered when it has finished.

    Attributes:
        number: of the asker, for the answer.
        instance, sequence, digest, transfer: of the reference.
        part, parts, data: a piece of `Goal.to_bytes`, where the producer shall push what it
            computes; parts come in their order.
    """

    number: Number
    instance: bytes
    sequence: Number
    digest: bytes
    transfer: Transfer = ""
    part: Number = 0
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    data: bytes = b""


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A part of the leases of all groups, in the order of the parts.

    Attributes:
        number: of the ask.
        sequence: of the request there.
        pushed: tokens before this one are where the asker wanted them; 0: none was pushed.
        part, parts: which of how many.
        data: a piece of `encode_leases`.
    """

    number: Number
    sequence: Number
    pushed: Number
    part: Number
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    data: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Why there is no lease, or no agreement.

    Attributes:
        number: of the ask.
        reason: for people.
    """

    number: Number
    reason: str

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))


class Done(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """This reader needs the blocks of a request no more, or never did.

    Attributes:
        instance, sequence, digest, transfer: of the reference.
        readers: how many have to say so before the blocks are free.
    """

    instance: bytes
    sequence: Number
    digest: bytes
    readers: Annotated[int, Meta(ge=1, le=4096)]
    transfer: Transfer = ""


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """These requests are still waited for: their leases shall not expire yet.

    Attributes:
        instance, sequences: of the references.
    """

    instance: bytes
    sequences: Annotated[tuple[Number, ...], Meta(max_length=256)]


Message = Hello | Ask | Grant | Refusal | Done | Renew

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The notification that a message is."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read and check a notification.

    Raises:
        LLMException: LLM_PARAM_INVALID: it is none of the messages.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"data={shown(data)} is no message of kvplan.serving: {error}") from None


def pieces(data: bytes) -> list[bytes]:
    """What of a lease, or of more, goes into one message each; at least one piece."""
    return [data[at : at + MAX_PART] for at in range(0, len(data), MAX_PART)] or [b""]


def grants(number: int, sequence: int, pushed: int, leases: bytes) -> list[Grant]:
    """The parts in which leases are sent."""
    parts = pieces(leases)
    return [Grant(number, sequence, pushed, part, len(parts), it) for part, it in enumerate(parts)]
