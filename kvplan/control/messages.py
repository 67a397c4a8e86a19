"""The messages between engines: one typed, bounded message in one frame.

A frame is the protocol version in one byte, then a msgpack array (seq, reply_to, body). Decoding
checks all of a frame, and refuses it as a whole if any part is wrong.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvplan.status import LLMException, LLMStatusCode, invalid, message_of
from kvplan.types import DataType, LlmRole, Placement
from kvplan.validation import printable

PROTOCOL_VERSION: Final = 8
MAX_NBYTES: Final = 1 << 20
"""Bytes of the largest frame."""

REFUSAL_VERSION: Final = 0
"""The version of a frame that holds only text (UTF-8): why its sender closes the channel.

Every version of the protocol reads it, so each can refuse any other with a readable reason.
"""

MAX_TEXT: Final = 4096
MAX_NAME: Final = 256
MAX_TRANSPORTS: Final = 16
MAX_NOTIFICATION_NBYTES: Final = 4096

Natural = Annotated[int, Meta(ge=0)]  # MessagePack itself ends at 2**64 - 1
Uint31 = Annotated[int, Meta(ge=0, lt=2**31)]
Uint32 = Annotated[int, Meta(ge=0, lt=2**32)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Metadata = Annotated[bytes, Meta(max_length=MAX_NBYTES)]
CacheId = Annotated[int, Meta(ge=1)]
ClaimId = Annotated[int, Meta(ge=0)]
Generation = Uint32


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The base of all messages and their parts."""


class _Body(_Message, frozen=True, tag=True):
    """The base of messages. The tag identifies the type."""


class _WithReason(_Body, frozen=True):
    """The base of messages with a text for people, which is made safe for terminals."""

    reason: Text

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))


class Offer(_Message, frozen=True):
    """A transport, and the metadata that a peer needs to reach memory by it.

    Empty metadata: the sender does not have the transport, for the reason in `missing`.
    """

    transport: Name
    metadata: Metadata
    missing: Text = ""


Offers = Annotated[tuple[Offer, ...], Meta(max_length=MAX_TRANSPORTS)]


class Trial(_Message, frozen=True):
    """The result of trying a transport of the peer.

    `refusal` says why it does not work at all, `shortfall` which memory it does not reach.
    """

    transport: Name
    refusal: Text = ""
    shortfall: Text = ""


class Hello(_Body, frozen=True):
    """Request: link with me. `comm` names a communicator; it is empty for link_clusters.

    `proof` shows that the sender is an end of an earlier link (`auth.proof_of`); empty: no proof.
    """

    cluster_id: Natural
    to_cluster_id: Natural
    instance: Token
    role: LlmRole
    comm: Name
    offers: Offers
    timeout_ms: Uint31
    proof: Annotated[bytes, Meta(max_length=32)] = b""


class Welcome(_Body, frozen=True):
    """Reply to Hello: my transports, and the results of trying yours. Choose, and then confirm."""

    cluster_id: Natural
    instance: Token
    role: LlmRole
    challenge: Token
    offers: Offers
    trials: Annotated[tuple[Trial, ...], Meta(max_length=MAX_TRANSPORTS)]


class PassedOver(_Message, frozen=True):
    """A transport that a link does not use, or not for all memory, and why.

    Attributes:
        transport: Its name.
        why: The reason, which names the end that causes it.
        tried: True if both ends have it.
    """

    transport: Name
    why: Text
    tried: bool

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "transport", printable(self.transport))
        msgspec.structs.force_setattr(self, "why", printable(self.why))

    def __str__(self) -> str:
        return f"{self.transport}: {self.why}"


class Chosen(_Body, frozen=True):
    """Notice: reach me by these transports, the preferred first; I begin now."""

    challenge: Token
    transports: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_TRANSPORTS)]
    passed_over: Annotated[tuple[PassedOver, ...], Meta(max_length=MAX_TRANSPORTS)]

    def __post_init__(self) -> None:
        if len(set(self.transports)) < len(self.transports):
            raise ValueError(f"transports={self.transports} must not repeat a name")


class Confirm(_Body, frozen=True):
    """Request: I have reached you. `challenge` is that of your Welcome."""

    challenge: Token


class Linked(_Body, frozen=True):
    """Reply to Confirm: I have reached you too."""


class Unlink(_Body, frozen=True):
    """Request: end the link once your transfers have ended, within `timeout_ms`."""

    timeout_ms: Uint31


class Unlinked(_Body, frozen=True):
    """Reply to Unlink: the link is torn down on this side."""


class ShardEntry(_Message, frozen=True):
    """The part of the model's cache that a cache holds: [start, stop) and the total.

    `numbers` lists layers that are not consecutive. Tokens are [start, stop), or the rank, ranks
    and size of `Interleaved`.
    """

    layers: tuple[Uint32, Uint32, Uint32] | None
    heads: tuple[Uint32, Uint32, Uint32] | None
    numbers: Annotated[tuple[Uint32, ...], Meta(max_length=65536)] = ()
    tokens: Annotated[tuple[Uint32, ...], Meta(min_length=2, max_length=3)] | None = None


class TableEntry(_Message, frozen=True):
    """A cache that a peer may reach, by the transports of the link that reach its memory."""

    cache_id: CacheId
    num_tensors: Annotated[int, Meta(ge=1, lt=2**32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=32)]
    data_type: DataType
    placement: Placement
    batch_dim_index: Annotated[int, Meta(ge=0, lt=32)]
    seq_len_dim_index: Annotated[int, Meta(ge=-1, lt=32)]
    kv_tensor_format: Name | None
    shard: ShardEntry | None
    paged: bool
    model_id_of_blocks_key: Natural | None
    addresses: Annotated[tuple[Natural, ...], Meta(max_length=65536)]
    offers: Offers
    writable: bool
    row_stride: Annotated[int, Meta(ge=1)] | None = None
    name: Name = ""  # given to the memory by the owner's program


class Table(_Body, frozen=True):
    """Notice: caches that were added and removed; `first` replaces all that the receiver had.

    `moved` has leases whose blocks the sender has moved (`BlockLease.to_bytes`), `ended` the ids of
    such leases that do not exist any more.
    """

    version: Natural
    first: bool
    entries: Annotated[tuple[TableEntry, ...], Meta(max_length=4096)]
    removed: Annotated[tuple[CacheId, ...], Meta(max_length=65536)]
    moved: Annotated[tuple[Metadata, ...], Meta(max_length=4096)] = ()
    ended: Annotated[tuple[Natural, ...], Meta(max_length=65536)] = ()


class Sync(_Body, frozen=True):
    """Request: send me the updates of your table that I do not have yet."""


class Synced(_Body, frozen=True):
    """Reply to Sync: every Table up to this version was sent before this message."""

    version: Natural


class Find(_Body, frozen=True):
    """Request: which slot has this key? The key's cluster is the receiver."""

    req_id: Natural
    prefix_id: Natural
    model_id: Natural


class Claim(_Body, frozen=True):
    """Request: reserve the slot with this key for me, until Release or the end of the link."""

    req_id: Natural
    prefix_id: Natural
    model_id: Natural


class Found(_Body, frozen=True):
    """Reply to Find (claim_id 0) and Claim: the slot, and its cache."""

    claim_id: ClaimId
    batch_index: Uint32
    entry: TableEntry


class Release(_Body, frozen=True):
    """Request: the claim ends; tensors [start, stop) have arrived (None: the pull failed)."""

    claim_id: ClaimId
    tensors: tuple[Uint32, Uint32] | None


class Released(_Body, frozen=True):
    """Reply to Release."""


class Notify(_Body, frozen=True):
    """Request: a notification of my program. Yours reads notifications in the order of sending.

    `direct` is the secret of a listener inside the host: connect to it for later notifications.
    """

    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_NOTIFICATION_NBYTES)]
    direct: Token | None = None


class Notified(_Body, frozen=True):
    """Reply to Notify: my program can read it, and there is room for `window` more."""

    window: Uint32 = 0


class Renew(_Body, frozen=True):
    """Notice: I have opened this generation of the link's connection; open it too, at once.

    Both ends send this, and then make the connection. `metadata` is that of the transport.
    """

    generation: Generation
    metadata: Metadata


class Renewed(_WithReason, frozen=True):
    """Notice: I have made this generation; with a reason: I have not, and never will."""

    generation: Generation


class Unused(_Body, frozen=True):
    """Notice: no transfer of mine uses this generation any more."""

    generation: Generation


class Failed(_WithReason, frozen=True):
    """Reply to any request: it was refused or failed."""

    status: Annotated[int, Meta(ge=min(LLMStatusCode).value, lt=2**32)]

    @classmethod
    def of(cls, error: LLMException) -> Failed:
        """Make the reply for `error`. A long message is cut."""
        return cls(message_of(error)[:MAX_TEXT], int(error.status_code))

    def exception(self) -> LLMException:
        """Convert the peer's failure to an error here. An unknown status becomes LLM_FAILED."""
        try:
            status = LLMStatusCode(self.status)
        except ValueError:
            status = LLMStatusCode.LLM_FAILED
        # A failure must not be reported as success.
        if status is LLMStatusCode.LLM_SUCCESS:
            status = LLMStatusCode.LLM_FAILED
        return LLMException(self.reason, status_code=status)


class Ping(_Body, frozen=True):
    """Notice: are you there? Channels answer it themselves."""


class Pong(_Body, frozen=True):
    """Notice: I am."""


class Close(_WithReason, frozen=True):
    """Notice: this channel ends here; `orderly` if its sender ends the link on purpose."""

    orderly: bool


Body: TypeAlias = (
    Hello
    | Welcome
    | Chosen
    | Confirm
    | Linked
    | Unlink
    | Unlinked
    | Table
    | Sync
    | Synced
    | Find
    | Claim
    | Found
    | Release
    | Released
    | Notify
    | Notified
    | Renew
    | Renewed
    | Unused
    | Failed
    | Ping
    | Pong
    | Close
)


class Envelope(_Message, frozen=True, array_like=True):
    """A body with its sequence numbers.

    A request has its own `seq` and `reply_to` 0, its reply the reverse. A notice has neither.
    """

    seq: Natural
    reply_to: Natural
    body: Body


class Undecodable(ValueError):  # noqa: N818 - a property of a frame
    """A frame that is not a message of this protocol."""


class WrongVersion(Undecodable):
    """A frame of another version of the protocol."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the peer speaks version {version} of the control protocol; "
            f"this side speaks version {PROTOCOL_VERSION}"
        )


class Refusal(Undecodable):
    """A frame with the reason why the peer ends the channel."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(body: Body, *, seq: int = 0, reply_to: int = 0) -> bytes:
    """Write a message as one frame."""
    frame = bytearray((PROTOCOL_VERSION,))
    _encoder.encode_into(Envelope(seq, reply_to, body), frame, 1)
    if len(frame) > MAX_NBYTES:
        raise invalid(
            f"control message {type(body).__name__} has {len(frame)} bytes; "
            f"at most {MAX_NBYTES} are allowed"
        )
    return bytes(frame)


def encode_refusal(reason: str) -> bytes:
    """Write a frame that ends the channel with a reason, in every version."""
    return bytes((REFUSAL_VERSION,)) + reason[:MAX_TEXT].encode()


def decode(frame: bytes | memoryview) -> Envelope:
    """Check and read one frame."""
    if not 1 < len(frame) <= MAX_NBYTES:
        raise Undecodable(f"a frame of {len(frame)} bytes; allowed are [2, {MAX_NBYTES}]")
    if frame[0] == REFUSAL_VERSION:
        text = bytes(frame[1 : 1 + MAX_TEXT]).decode(errors="replace")
        raise Refusal(printable(text))
    if frame[0] != PROTOCOL_VERSION:
        raise WrongVersion(frame[0])
    try:
        envelope = _decoder.decode(memoryview(frame)[1:])
    except Exception as error:  # of any type: nested input, for example, raises RecursionError
        raise Undecodable(str(error)[:MAX_TEXT]) from None
    if envelope.seq and envelope.reply_to:
        raise Undecodable("a message cannot be a request and a reply")
    return envelope
