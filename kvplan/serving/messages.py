"""References of requests, and the messages between exchanges."""

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
from kvplan.validation import check_type, printable, resolved, shown

peer_log = LimitedLog(Log("kvplan.serving"))
"""Rate-limited log for lines that peers can cause."""

PROTOCOL: Final = 4
"""Version of these messages. References of other versions are refused."""

MAX_PART: Final = 3500  # bytes of leases or a goal in one message; a notification has 4096 at most
MAX_PARTS: Final = 8192
MAX_TRANSFER: Final = 128  # characters
MAX_FIELDS: Final = 3500  # bytes of the fields of a Compatibility
MAX_INSTANCE: Final = 32  # bytes
MAX_REASON: Final = 1000  # characters
MAX_HANDLES: Final = 128  # in one message
HANDLE_NBYTES: Final = 16

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Transfer = Annotated[str, Meta(max_length=MAX_TRANSFER)]
Instance = Annotated[bytes, Meta(max_length=MAX_INSTANCE)]
HandleValue = Annotated[bytes, Meta(max_length=HANDLE_NBYTES)]
"""The bytes of a handle; empty if a transfer is meant."""
ExactHandle = Annotated[bytes, Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]
_encoder = msgspec.msgpack.Encoder()


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Hello(_Message, frozen=True, tag=0):
    """The properties of the sender's cache and model. The receiver answers with its own.

    Attributes:
        fields: values by name.
        instance: the sender's process.
        answer: True in an answer.
    """

    fields: dict[str, str]
    instance: Instance
    answer: bool


class Ask(_Message, frozen=True, tag=1):
    """An ask for the leases of a request. The answer comes when the request has finished.

    Attributes:
        number: number of the ask, for the answer.
        instance, handle, digest, transfer: from the reference.
        part, parts, data: a piece of `Goal.to_bytes`, the destination of pushes. Parts come in
            order.
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
        number: number of the ask.
        handle: handle of the request at the producer.
        pushed: end of the tokens that were pushed to the goal of the ask; 0: none.
        part, parts: index of this part, and number of parts.
        data: a piece of `encode_leases`.
    """

    number: Number
    handle: ExactHandle
    pushed: Number
    part: Number
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    data: bytes


class Refusal(_Message, frozen=True, tag=3):
    """The refusal of an ask.

    Attributes:
        number: number of the ask.
        reason: text for logs.
    """

    number: Number
    reason: Annotated[str, Meta(max_length=MAX_REASON)]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))


class Done(_Message, frozen=True, tag=4):
    """The sender does not need the blocks of a request (any more).

    Attributes:
        instance, digest, transfer: from the reference.
        handle: handle of the request at the producer; empty if only its transfer is known.
        readers: number of readers that must send this before the blocks are free.
    """

    instance: Instance
    handle: HandleValue
    digest: bytes
    readers: Annotated[int, Meta(ge=1, le=4096)]
    transfer: Transfer = ""


class Renew(_Message, frozen=True, tag=5):
    """The sender still waits for requests, whose leases must not expire yet.

    Handles cannot be guessed, so a peer renews only requests that it may read.

    Attributes:
        instance: the producer's process.
        handles: handles of the requests at the producer.
    """

    instance: Instance
    handles: Annotated[tuple[ExactHandle, ...], Meta(max_length=MAX_HANDLES)]


Message = Hello | Ask | Grant | Refusal | Done | Renew

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message as a notification."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read and check a notification."""
    try:
        return _decoder.decode(data)
    except Exception as error:  # of any kind: nested input raises RecursionError
        raise invalid(f"data={shown(data)} is not a message of kvplan.serving: {error}") from None


def pieces(data: bytes) -> list[bytes]:
    """Return data in pieces that fit into a message each; at least one piece."""
    cuts = range(0, len(data), MAX_PART)
    return [data] if len(data) <= MAX_PART else [data[at : at + MAX_PART] for at in cuts]


def grants(number: int, handle: bytes, pushed: int, leases: bytes) -> list[Grant]:
    """Return the messages of an answer with leases."""
    parts = pieces(leases)
    return [
        Grant(number, handle, pushed, part, len(parts), data) for part, data in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class Handle:
    """The identity of one offered request: random bytes.

    `Exchange.enter` makes one. If several workers offer parts of a request, the serving engine
    calls `Handle.new()` once and passes the handle to all of them.

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
        """Return the handle in a message; None if it has none."""
        return cls(value) if len(value) == HANDLE_NBYTES else None

    @classmethod
    def new(cls) -> Handle:
        """Return a new, unique handle."""
        return cls(secrets.token_bytes(HANDLE_NBYTES))


def token_digest(tokens: Sequence[int], *extra: str) -> bytes:
    """Return a digest of 16 bytes for the tokens of a cache.

    Args:
        tokens: ids of the tokens, from the first on.
        extra: further inputs of the cache, such as the name and the path of an adapter.

    Raises:
        TypeError: tokens that are not ints below 2**63, or an extra input that is not str.
    """
    try:
        ids = array("q", [*tokens])
    except (TypeError, OverflowError) as error:
        raise TypeError(f"tokens={shown(tokens)} must be ints below 2**63: {error}") from None
    digest = blake2b(ids.tobytes(), digest_size=16, person=b"kvplan.tokens.1")
    for at, value in enumerate(extra):
        text = check_type(f"extra[{at}]", value, str).encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def check_transfer(transfer: object) -> str:
    """Check and return the name of a transfer; empty: none."""
    if not isinstance(transfer, str) or len(transfer) > MAX_TRANSFER or not transfer.isprintable():
        raise invalid(
            f"transfer={shown(transfer)} must have at most {MAX_TRANSFER} printable characters"
        )
    return transfer


LayerRange = tuple[Annotated[int, Meta(ge=0, lt=2**20)], Annotated[int, Meta(ge=1, lt=2**20)]]
"""The first of the model's layers that a worker has, and one past the last."""

_Size = Annotated[int, Meta(ge=1, lt=2**16)]
Context = tuple[Annotated[int, Meta(ge=0, lt=2**16)], _Size, _Size]
"""`rank`, `ranks` and `size` of an `Interleaved`: the tokens of each request that a worker has."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The kvplan engine of a producer's worker, with a part of a request's cache.

    Attributes:
        cluster_id: cluster id of the engine.
        address: address at which it listens.
        layers: the layers of the worker's stage (pipeline parallelism); None: all.
        context: the tokens of each request that the worker has (context parallelism); None: all.
    """

    cluster_id: Annotated[int, Meta(ge=0, le=2**53 - 1)]  # exact in every JSON library
    address: Annotated[str, Meta(max_length=256)]
    layers: LayerRange | None = None
    context: Context | None = None


_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2}){1,32}$")]


@resolved
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
    """The location of a request's cache, which travels with the request to its consumer.

    Attributes:
        instance: the producer's process; it differs after a restart.
        handle: handle of the request at the producer; None if only its transfer is known.
        digest: digest of the tokens (`token_digest`); the producer refuses another one.
        num_tokens: number of computed tokens, from the first on.
        sources: the producer's workers, by stage, then by rank. Within a stage, workers with the
            same tokens are in the order of their heads.
        transfer: name on which producer and consumer agree for a request that has not finished;
            empty: the request has finished, and has a handle.
    """

    instance: bytes
    handle: Handle | None
    digest: bytes
    num_tokens: int
    sources: tuple[Source, ...]
    transfer: str = ""

    @property
    def name(self) -> str:
        """The name or handle of the request, for messages."""
        return self.transfer or str(self.handle)

    def to_dict(self) -> dict[str, Any]:
        """Return the reference as a JSON object."""
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
        """Read and check the result of `to_dict`.

        Raises:
            LLMException: LLM_PARAM_INVALID: not a reference, or one of another version.
        """
        try:
            wire = msgspec.convert(dict(given), _Wire)
        except Exception as error:  # of any kind: nested input raises RecursionError
            raise invalid(f"reference={shown(given)} is invalid: {error}") from None
        if wire.protocol != PROTOCOL:
            raise invalid(
                f"reference has protocol={wire.protocol} of kvplan.serving; it must be {PROTOCOL}"
            )
        if not wire.transfer and not (wire.handle and wire.digest and wire.num_tokens):
            raise invalid(
                f"reference={shown(given)} must have handle, digest and num_tokens of a finished "
                "request, or the transfer of one that will finish"
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
    """The properties in which both sides must agree, so that a consumer can use the cache.

    Args:
        fields: values by name, in the order of comparison.

    Raises:
        LLMException: LLM_PARAM_INVALID: the fields do not fit into a message.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        if (nbytes := sum(len(f"{k}{v}".encode()) + 8 for k, v in self.fields.items())) > (
            MAX_FIELDS
        ):
            raise invalid(f"fields has {nbytes} bytes; at most {MAX_FIELDS} fit into a message")

    def difference(self, theirs: Mapping[str, str]) -> str:
        """Return the first difference in words; empty if all fields are equal."""
        for name in (*self.fields, *(name for name in theirs if name not in self.fields)):
            ours, other = self.fields.get(name), theirs.get(name)
            if ours != other:
                return f"{name} is {shown(ours)} here and {shown(other)} there"
        return ""
