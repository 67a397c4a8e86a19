"""What goes from producer to consumer with a request, and the messages between their exchanges."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvplan.status import invalid
from kvplan.system.logs import LimitedLog, Log
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
_encoder = msgspec.msgpack.Encoder()


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


@dataclass(frozen=True, slots=True)
class Handle:
    """The identity of one offered request: random bytes, which no other request has.

    `Exchange.enter` makes one. A serving engine whose workers each offer a part of a request makes
    it itself (`Handle.new()`), once for each request, and gives it to all of them.

    Attributes:
        value: 16 bytes. A peer that does not know them cannot fetch, renew or free the request.

    Raises:
        LLMException: LLM_PARAM_INVALID: value is not 16 bytes.
    """

    value: bytes

    def __post_init__(self) -> None:
        if type(self.value) is not bytes or len(self.value) != HANDLE_NBYTES:
            raise invalid(f"value={shown(self.value)} must be {HANDLE_NBYTES} bytes")

    def __str__(self) -> str:
        return f"request {self.value.hex()[:8]}"

    @classmethod
    def of(cls, value: bytes) -> Handle | None:
        """Return the handle that a message has; None: it has none."""
        return cls(value) if len(value) == HANDLE_NBYTES else None

    @classmethod
    def new(cls) -> Handle:
        """Return a handle that no other request has."""
        return cls(secrets.token_bytes(HANDLE_NBYTES))


def token_digest(tokens: Sequence[int], *extra: str) -> bytes:
    """16 bytes that say which tokens a cache was computed of.

    Args:
        tokens: their ids, from the first on.
        extra: what else the cache depends on, such as the name and the path of an adapter.
    """
    digest = blake2b(array("q", tokens).tobytes(), digest_size=16, person=b"kvplan.tokens.1")
    for it in extra:
        text = it.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def check_transfer(transfer: object) -> str:
    """Check the name of a transfer; empty: there is none."""
    if not isinstance(transfer, str) or len(transfer) > MAX_TRANSFER or not transfer.isprintable():
        raise invalid(
            f"transfer={shown(transfer)} must be of at most {MAX_TRANSFER} printable characters"
        )
    return transfer


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A kvplan engine that has a part of a request's cache: a worker of the producer.

    Attributes:
        cluster_id: of the engine.
        address: where it listens.
    """

    cluster_id: Annotated[int, Meta(ge=0, le=2**53 - 1)]  # what each JSON library keeps
    address: Annotated[str, Meta(max_length=256)]


_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2}){1,32}$")]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference as a JSON object."""

    protocol: int
    instance: _Hex
    sources: Annotated[tuple[Source, ...], Meta(min_length=1, max_length=1024)]
    handle: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{2}){0,32}$")] = ""
    num_tokens: Annotated[int, Meta(ge=0)] = 0
    transfer: Transfer = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the cache of a request is, or will be, which travels with it to the consumer.

    Attributes:
        instance: of the producer; another after a restart.
        handle: of the request there; None beside a transfer.
        digest: of what was computed (`token_digest`); the consumer compares it with its own.
        num_tokens: that were computed, from the first on.
        sources: the producer's workers, by rank.
        transfer: what producer and consumer were told to call the request, before it had finished;
            empty: it has finished, and has a handle.
    """

    instance: bytes
    handle: Handle | None
    digest: bytes
    num_tokens: int
    sources: tuple[Source, ...]
    transfer: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return self.transfer or str(self.handle)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object, for any channel."""
        wire = _Wire(
            PROTOCOL,
            self.instance.hex(),
            self.sources,
            "" if self.handle is None else self.handle.value.hex(),
            self.digest.hex(),
            self.num_tokens,
            self.transfer,
        )
        plain: dict[str, Any] = msgspec.to_builtins(wire)
        return plain

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Reference:
        """Check and read what `to_dict` has made.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is no reference, or of another version.
        """
        try:
            wire = msgspec.convert(dict(given), _Wire)
        except Exception as error:  # the sender decides which: nesting raises RecursionError
            raise invalid(f"reference={shown(given)} is none of kvplan.serving: {error}") from None
        if wire.protocol != PROTOCOL:
            raise invalid(
                f"reference has protocol={wire.protocol} of kvplan.serving, and here is {PROTOCOL}"
            )
        if not wire.transfer and not (wire.handle and wire.digest and wire.num_tokens):
            raise invalid(
                f"reference={shown(given)} must have handle, digest and num_tokens of a request "
                "that has finished, or transfer, the name of one that will"
            )
        return cls(
            bytes.fromhex(wire.instance),
            Handle(bytes.fromhex(wire.handle)) if wire.handle else None,
            bytes.fromhex(wire.digest),
            wire.num_tokens,
            wire.sources,
            check_transfer(wire.transfer),
        )


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What has to be the same on both sides, so that one's cache means something to the other.

    Args:
        fields: name and value of each, in the order in which they are compared.

    Raises:
        LLMException: LLM_PARAM_INVALID: more than fits into a message.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        if (nbytes := sum(len(f"{k}{v}".encode()) + 8 for k, v in self.fields.items())) > (
            MAX_FIELDS
        ):
            raise invalid(f"fields has {nbytes} bytes; at most {MAX_FIELDS} fit into a message")

    def difference(self, theirs: Mapping[str, str]) -> str:
        """Which field differs, and how; empty if none does."""
        for name in (*self.fields, *(it for it in theirs if it not in self.fields)):
            ours, other = self.fields.get(name), theirs.get(name)
            if ours != other:
                return f"{name} is {shown(ours)} here and {shown(other)} there"
        return ""
