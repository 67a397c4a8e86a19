"""Frames: written messages are read back, and all other frames are refused."""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.control.messages import (
    MAX_NBYTES,
    PROTOCOL_VERSION,
    Body,
    Chosen,
    Claim,
    Close,
    Confirm,
    Failed,
    Find,
    Found,
    Hello,
    Linked,
    Notified,
    Notify,
    Offer,
    PassedOver,
    Ping,
    Pong,
    Refusal,
    Release,
    Released,
    Renew,
    Renewed,
    ShardEntry,
    Sync,
    Synced,
    Table,
    TableEntry,
    Trial,
    Undecodable,
    Unlink,
    Unlinked,
    Unused,
    Welcome,
    WrongVersion,
    decode,
    encode,
    encode_refusal,
)
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import DataType, LlmRole, Placement

FINDINGS = Path(__file__).parent / "findings"
ENTRY = TableEntry(
    1,
    2,
    (8, 16),
    DataType.DT_BF16,
    Placement.DEVICE,
    0,
    -1,
    None,
    ShardEntry((16, 32, 64), None),
    True,
    2**64 - 1,
    (4096, 2**64 - 1),
    (Offer("local", b"m"),),
    False,
)
TOKEN = bytes(range(16))
BODIES: list[Body] = [
    Hello(2**64 - 1, 0, TOKEN, LlmRole.PROMPT, "", (Offer("local", b"metadata"),), 1000),
    Welcome(
        1,
        TOKEN,
        LlmRole.DECODER,
        TOKEN,
        (Offer("local", b""), Offer("ucx", b"", "no RDMA device")),
        (Trial("local", "", "no memory of devices"), Trial("tcp", "no route")),
    ),
    Chosen(TOKEN, ("local", "tcp"), (PassedOver("ucx", "no RDMA device", tried=False),)),
    Confirm(TOKEN),
    Linked(),
    Unlink(0),
    Unlinked(),
    Table(3, True, (ENTRY, ENTRY), (7, 8)),
    Sync(),
    Synced(0),
    Find(2**64 - 1, 5, 0),
    Claim(5, 2**64 - 1, 0),
    Found(0, 3, ENTRY),
    Release(1, (0, 80)),
    Release(1, None),
    Released(),
    Notify(bytes(4096)),
    Notified(),
    Renew(2**32 - 1, b"m"),
    Renewed("", 1),
    Unused(0),
    Failed("because", LLMStatusCode.LLM_FAILED),
    Ping(),
    Pong(),
    Close("done", orderly=True),
]


def test_every_kind_of_message_is_among_the_examples() -> None:
    assert {type(body) for body in BODIES} == set(typing.get_args(Body))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_messages_round_trip(body: Body) -> None:
    envelope = decode(encode(body, seq=2**64 - 1))
    assert (envelope.seq, envelope.reply_to, envelope.body) == (2**64 - 1, 0, body)
    assert decode(encode(body, reply_to=1)).reply_to == 1


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_neither_a_part_of_a_frame_nor_a_longer_one_is_a_frame(body: Body) -> None:
    frame = encode(body)
    for end in range(len(frame)):
        with pytest.raises(Undecodable):
            decode(frame[:end] if end != 1 else b"")
    with pytest.raises(Undecodable):
        decode(frame + b"\0")


def test_the_refusal_of_another_version_names_both() -> None:
    with pytest.raises(WrongVersion, match=rf"version 9 .* version {PROTOCOL_VERSION}"):
        decode(b"\x09" + encode(Ping())[1:])


def test_a_refusal_is_understood_and_its_text_is_made_harmless() -> None:
    with pytest.raises(Refusal, match=r"go away\?\[2J, café"):
        decode(encode_refusal("go away\x1b[2J, café"))
    with pytest.raises(Refusal):
        decode(b"\0\xff\xfe")


def test_a_frame_that_is_too_large_is_neither_written_nor_read() -> None:
    welcome = Welcome(1, TOKEN, LlmRole.MIX, TOKEN, (Offer("local", bytes(MAX_NBYTES)),), ())
    with pytest.raises(LLMException, match=r"Welcome has .* bytes; at most 1048576"):
        encode(welcome)
    with pytest.raises(Undecodable, match="1048577 bytes"):
        decode(bytes(MAX_NBYTES + 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster_id": -1},
        {"instance": bytes(15)},
        {"role": 0},
        {"comm": "x" * 257},
        {"offers": [{"transport": "t", "metadata": b""}] * 17},
        {"offers": [{"transport": "t", "metadata": b"", "more": 1}]},
        {"timeout_ms": 2**31},
        {"timeout_ms": 1.5},
        {"timeout_ms": "1000"},
        {"timeout_ms": None},
        {"surprise": 1},
        {"type": "Goodbye"},
        {"type": None},
    ],
    ids=repr,
)
def test_a_field_out_of_its_bounds_refuses_the_whole_frame(changed: dict[str, object]) -> None:
    fields = {**msgspec.to_builtins(BODIES[0], builtin_types=(bytes,)), **changed}
    frame = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode((0, 0, fields))
    with pytest.raises(Undecodable):
        decode(frame)


@pytest.mark.parametrize(
    "shard",
    [
        {"layers": [0, 2**32, 4], "heads": None},
        {"layers": [-1, 2, 4], "heads": None},
        {"layers": [0, 2], "heads": None},
        {"layers": [0, 2, 4, 8], "heads": None},
        {"layers": [0, 2.5, 4], "heads": None},
        {"layers": None, "heads": "all"},
        {"layers": None},
        {"layers": None, "heads": None, "dims": None},
        {"layers": None, "heads": None, "tokens": [1]},
        {"layers": None, "heads": None, "tokens": [0, 2, 16, 1]},
        {"layers": None, "heads": None, "tokens": [0, 2, 2**32]},
        [None, None],
        0,
    ],
    ids=repr,
)
def test_a_shard_out_of_its_bounds_refuses_the_whole_frame(shard: object) -> None:
    (table,) = (body for body in BODIES if isinstance(body, Table))
    fields = msgspec.to_builtins(table, builtin_types=(bytes,))
    fields["entries"][0]["shard"] = shard
    frame = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode((0, 0, fields))
    with pytest.raises(Undecodable, match="shard"):
        decode(frame)


@pytest.mark.parametrize(
    "data",
    [b"", bytes(4097), "text", None, [1]],
    ids=["empty", "4097 bytes", "text", "none", "list"],
)
def test_a_notification_out_of_its_bounds_is_refused(data: object) -> None:
    body = {"type": "Notify", "data": data}
    frame = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode((1, 0, body))
    with pytest.raises(Undecodable, match="data"):
        decode(frame)


def test_a_transport_is_not_chosen_twice() -> None:
    """Otherwise the first of two equal links would never be closed."""
    frame = encode(Chosen(TOKEN, ("local", "lacol"), ())).replace(b"lacol", b"local")
    with pytest.raises(Undecodable, match="must not repeat a name"):
        decode(frame)


def test_a_request_cannot_be_a_reply() -> None:
    with pytest.raises(Undecodable, match="request and a reply"):
        decode(encode(Ping(), seq=1, reply_to=1))


def test_failures_keep_their_status_and_are_never_a_success() -> None:
    def received(failure: Failed) -> LLMException:
        body = decode(encode(failure)).body  # a number, not a member of an enumeration
        assert isinstance(body, Failed)
        return body.exception()

    for status in LLMStatusCode:
        error = received(Failed.of(LLMException("too late", status_code=status)))
        expected = status if status != 0 else LLMStatusCode.LLM_FAILED
        assert error.status_code is expected
        assert str(error) == str(LLMException("too late", status_code=expected))
    textless = received(Failed.of(LLMException(status_code=LLMStatusCode.LLM_TIMEOUT)))
    assert (textless.args, textless.status_code) == (("",), LLMStatusCode.LLM_TIMEOUT)
    for unknown in (1, 12345):
        assert received(Failed("", unknown)).status_code is LLMStatusCode.LLM_FAILED
    assert isinstance(decode(encode(Failed.of(LLMException("x" * 100_000)))).body, Failed)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Failed", "status": 0},
        {"type": "Close", "orderly": False},
        {"type": "Renewed", "generation": 1},
    ],
    ids=lambda body: body["type"],
)
def test_a_reason_cannot_control_a_terminal_or_a_log(body: dict[str, object]) -> None:
    said = body | {"reason": "no\x1b[2J room\nevent=linked"}
    decoded = decode(bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode((0, 0, said))).body
    assert isinstance(decoded, Failed | Close | Renewed)
    assert decoded.reason == "no?[2J room event=linked"


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 2), st.integers(0, 255)), max_size=8
)


def mutated(frame: bytes, mutations: list[tuple[int, int, int]]) -> bytes:
    changed = bytearray(frame)
    for at, kind, byte in mutations:
        start = at % (len(changed) + 1)
        changed[start : start + (kind > 0)] = (byte,) * (kind < 2)
    return bytes(changed)


@given(st.binary(max_size=300))
def test_random_bytes_are_undecodable_or_a_message(noise: bytes) -> None:
    for frame in (noise, bytes((PROTOCOL_VERSION,)) + noise):
        decode_or_refuse(frame)


@given(st.sampled_from(BODIES), st.integers(0, 2**64 - 1), MUTATIONS)
def test_mutated_messages_are_undecodable_or_a_message(
    body: Body, seq: int, mutations: list[tuple[int, int, int]]
) -> None:
    decode_or_refuse(mutated(encode(body, seq=seq), mutations))


def decode_or_refuse(frame: bytes) -> None:
    """Decode a frame. An accepted message must be encodable again, within bounds."""
    try:
        envelope = decode(frame)
    except Undecodable:
        return
    assert decode(encode(envelope.body, seq=envelope.seq, reply_to=envelope.reply_to)) == envelope


@pytest.mark.parametrize("path", sorted(FINDINGS.glob("frame-*")), ids=lambda path: path.name)
def test_findings_stay_fixed(path: Path) -> None:
    decode_or_refuse(path.read_bytes())
