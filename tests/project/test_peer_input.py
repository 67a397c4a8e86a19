"""Decoders of input from peers, clients and files: each reads its input or refuses it in words."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest

import kvplan
from kvplan import (
    BlockLease,
    CacheDesc,
    DataType,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Placement,
    Rows,
    Shard,
    Transfer,
)
from kvplan.addressed.connections import read_frame
from kvplan.cli import top
from kvplan.control import messages as control
from kvplan.control.status_socket import Answer
from kvplan.lease import _digest
from kvplan.links.peer_table import PeerCache
from kvplan.links.rendezvous import locate
from kvplan.llm_datadist.configs import _checked_cluster_info
from kvplan.nixl import metadata as nixl_metadata
from kvplan.nixl.values import nixlMismatchError
from kvplan.planning import schema
from kvplan.recording import format as recording
from kvplan.recording.records import TransferRecord
from kvplan.serving import Handle, Reference, Source
from kvplan.serving import messages as serving
from kvplan.serving.pusher import Goal
from kvplan.serving.tables import GroupLease, decode_leases, encode_leases
from kvplan.transport.hccl.addresses import read_local_comm_res
from kvplan.transport.hccl.metadata import Metadata as HcclMetadata
from kvplan.transport.local.metadata import Metadata as LocalMetadata
from kvplan.transport.tcp.metadata import Metadata as TcpMetadata
from kvplan.transport.ucx.metadata import Metadata as UcxMetadata
from tests.ascend.test_hccl_metadata import EXAMPLE as HCCL
from tests.support.peer import ROOT
from tests.transport.test_metadata import EXAMPLE as LOCAL
from tests.transport.ucx.test_metadata import WHOLE as UCX

DEPTHS = (900, 100_000)  # below the interpreter's limit, and far above it
DEEP: list[Any] = []
for _ in range(DEPTHS[1]):
    DEEP = [DEEP]
LEASE = BlockLease(1, bytes(16), 1, 2, (3, 4), True, "cmpl-1", ())


@dataclass(frozen=True)
class Decoder:
    """A decoder, and a value that it accepts.

    Attributes:
        read: Decodes bytes.
        sample: An accepted value, as plain values.
        text: True for JSON, False for MessagePack.
        wrap: Adds to an encoded value the bytes that the decoder expects around it.
        refusals: The exceptions for invalid input.
    """

    read: Callable[[bytes], object]
    sample: Any
    text: bool = False
    wrap: Callable[[bytes], bytes] = bytes
    refusals: tuple[type[Exception], ...] = (LLMException,)

    def encode(self, value: Any) -> bytes:
        codec = msgspec.json if self.text else msgspec.msgpack
        return self.wrap(codec.encode(value))

    def check_bytes(self, data: bytes, *, is_sample: bool = False) -> None:
        """Decode, and allow only refusals; a sample must not be refused either."""
        refusal: Exception | None = None
        try:
            self.read(data)
        except self.refusals as error:
            refusal = error
        assert not (is_sample and refusal)
        assert len(str(refusal)) < 6000
        assert not isinstance(refusal, RecursionError)
        if isinstance(refusal, LLMException):
            assert refusal.status_code is LLMStatusCode.LLM_PARAM_INVALID


def of_messages(encoded: bytes) -> Any:
    return msgspec.msgpack.decode(encoded)


def of_metadata(metadata: Any) -> Any:
    return of_messages(metadata.to_bytes())


def read_control(frame: bytes) -> None:
    match control.decode(frame).body:
        case control.Table(entries=entries):
            for entry in entries:
                PeerCache.of(1, entry)
        case control.Found(entry=entry):
            PeerCache.of(1, entry)


def read_plan(data: bytes) -> None:
    schema.read_plan(BytesIO(data), "a file")


def row_of(data: bytes) -> object:
    found = recording.row_in(data, 0)
    return None if found is None else found[0]


def read_recorded_plan(data: bytes) -> object:
    """Read the plan of a transfer from its two rows."""
    try:
        rows = msgspec.msgpack.decode(data, type=tuple[msgspec.Raw, msgspec.Raw])
    # wrong bytes around the rows, which only this helper has
    except (msgspec.MsgspecError, RecursionError):
        return None
    template, part = (
        row_of(next(iter(recording.framed([bytes(row)], compress=False)))) for row in rows
    )
    if not isinstance(template, recording.TemplateRow):
        return None
    if not isinstance(part, recording.TransferRow):
        return None
    at = LLMStatusCode.LLM_SUCCESS
    parts, templates = part.parts, {template.number: template}
    return TransferRecord(0, 1.0, 0.1, "pull", 1, 2, 1, "", (), at, "", 1, parts, templates).plan


def read_reference(data: bytes) -> Reference:
    try:
        content = msgspec.json.decode(data)
    except RecursionError:  # only this parser fails so: others go deeper
        content = {"sources": DEEP}
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = {}
    return Reference.from_dict(content)


def read_status(data: bytes) -> None:
    try:
        document = msgspec.json.decode(data)
    # the reader of the socket refuses these
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if isinstance(document, dict):
        top.checked(Answer(1, document, ""))


SERVING = [
    serving.Hello({"model": "m"}, b"instance", answer=True),
    serving.Ask(2**62, b"instance", bytes(16), bytes(16), "", 0, 1, b"a part"),
    serving.Grant(1, bytes(16), 0, 0, 2, bytes(100)),
    serving.Refusal(1, "reason"),
    serving.Done(b"instance", bytes(16), bytes(16), 4, "transfer"),
    serving.Renew(b"instance", (bytes(16), bytes(range(16)))),
]
DESC = CacheDesc(
    num_tensors=2,
    shape=(8, 4, 16, 32),
    data_type=DataType.DT_FLOAT,
    placement=Placement.HOST,
    kv_tensor_format="block head token dim",
    shard=Shard(range(2), range(4), 2, 4),
)
PLAN = kvplan.plan(Transfer(Rows(DESC, [1, 2]), Rows(DESC, [3, 4]), num_tokens=30), local="dst")
TABLES = [np.array(table, np.int64).tobytes() for table in ([1, 2], [3, 4])]
ENTRY = control.TableEntry(
    cache_id=1,
    num_tensors=2,
    shape=(8, 4, 16, 32),
    data_type=DataType.DT_FLOAT,
    placement=Placement.HOST,
    batch_dim_index=0,
    seq_len_dim_index=2,
    kv_tensor_format="block head token dim",
    shard=control.ShardEntry((0, 2, 2), (0, 4, 4)),
    paged=True,
    model_id_of_blocks_key=None,
    addresses=(4096, 8192),
    offers=(control.Offer("tcp", b"metadata"),),
    writable=True,
)
CONTROL = [
    control.Notify(b"data"),
    control.Failed("reason", 1),
    control.Table(1, True, (ENTRY,), (1, 2), (b"lease",), (3,)),
    control.Find(1, 2, 3),
    control.Found(1, 2, ENTRY),
    control.Welcome(1, bytes(16), LlmRole.MIX, bytes(16), (), (control.Trial("tcp"),)),
    control.Chosen(bytes(16), ("tcp",), (control.PassedOver("local", "no rights", tried=True),)),
    control.Hello(1, 2, bytes(16), LlmRole.MIX, "", (control.Offer("tcp", b"metadata"),), 1000),
]
DECODERS = {
    **{
        f"serving-{type(item).__name__}": Decoder(serving.decode, of_messages(serving.encode(item)))
        for item in SERVING
    },
    **{
        f"control-{type(item).__name__}": Decoder(
            read_control,
            of_messages(control.encode(item, seq=1)[1:]),
            wrap=lambda data: bytes((control.PROTOCOL_VERSION,)) + data,
            refusals=(control.Undecodable, LLMException),
        )
        for item in CONTROL
    },
    "leases": Decoder(decode_leases, of_messages(encode_leases([GroupLease(LEASE, 0)]))),
    "goal": Decoder(Goal.from_bytes, of_messages(Goal(LEASE, 0, 8).to_bytes())),
    "lease": Decoder(
        BlockLease.from_bytes,
        of_messages(LEASE.to_bytes()[8:]),
        wrap=lambda data: _digest(data) + data,
    ),
    "reference": Decoder(
        read_reference,
        Reference(
            b"i", Handle(bytes(16)), b"digest", 100, (Source(5, "10.0.0.1:26000"),)
        ).to_dict(),
        text=True,
    ),
    "local": Decoder(LocalMetadata.from_bytes, of_metadata(LOCAL)),
    "tcp": Decoder(
        TcpMetadata.from_bytes,
        of_metadata(TcpMetadata("0" * 32, "host", 12, 1, False, ())),
    ),
    "ucx": Decoder(UcxMetadata.from_bytes, of_metadata(UCX)),
    "hccl": Decoder(HcclMetadata.from_bytes, of_metadata(HCCL)),
    "nixl-metadata": Decoder(
        nixl_metadata.Metadata.from_bytes,
        of_messages(
            nixl_metadata.Metadata("a", 1, "127.0.0.1:1", False, [(0, 1, 2, 0)]).to_bytes()[
                len(nixl_metadata.MAGIC) :
            ]
        ),
        wrap=lambda data: nixl_metadata.MAGIC + data,
        refusals=(nixlMismatchError,),
    ),
    "message": Decoder(
        read_frame, ["name", "text"], wrap=lambda data: b"N" + bytes(8) + b"\x02\x00" + data
    ),
    "rank-table": Decoder(
        lambda data: locate(data.decode(errors="replace"), {0}),
        {
            "version": "1.0",
            "server_list": [{"server_id": "a", "device": [{"rank_id": "0", "device_id": "0"}]}],
        },
        text=True,
    ),
    "local-comm-res": Decoder(
        lambda data: read_local_comm_res(data.decode(errors="replace")),
        {"version": "1.0", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]},
        text=True,
    ),
    "status": Decoder(
        read_status,
        {
            "cluster_id": 1,
            "role": "MIX",
            "command": ["python"],
            "listen_address": None,
            "seconds": 1.5,
            "operations": {},
            "links": [],
            "caches": [],
            "leases": 0,
            "in_flight": [],
        },
        text=True,
    ),
    "cluster-info": Decoder(
        lambda data: _checked_cluster_info("cluster_info", data.decode(errors="replace")),
        {"listen_ip_info": [{"ip": "127.0.0.1", "port": 26000}]},
        text=True,
        # RuntimeError for addresses, as in the official package
        refusals=(LLMException, RuntimeError),
    ),
    "plan": Decoder(read_plan, PLAN.to_dict(), text=True),
    "recorded-plan": Decoder(
        read_recorded_plan,
        of_messages(
            msgspec.msgpack.encode(
                [
                    recording.TemplateRow(7, recording.template_of(PLAN.part), ("a", "b"), (1, 2)),
                    [
                        recording.TRANSFER,
                        *(1.0, 0.1, "pull_blocks", 0, "", "", 2, 1, (), 1),
                        [["", None, 7, *TABLES, recording.segments_of(PLAN.part)]],
                    ],
                ]
            )
        ),
        refusals=(LLMException, ValueError),
    ),
    "recording": Decoder(
        row_of,
        of_messages(recording.encode(recording.EventRow(1.0, 0.5, "link", 0, "", {"peer": 1}))),
        wrap=lambda data: next(iter(recording.framed([data], compress=False))),
        refusals=(ValueError,),
    ),
}


def variants(value: Any, other: Any) -> Iterator[Any]:
    """Yield the value with `other` in place of each part, and with `other` as an added part."""
    yield other
    if isinstance(value, list):
        for at, part in enumerate(value):
            for item in variants(part, other):
                yield [*value[:at], item, *value[at + 1 :]]
        yield [*value, other]
    elif isinstance(value, dict):
        for key, part in value.items():
            for item in variants(part, other):
                yield {**value, key: item}
        yield {**value, "surplus": other}


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return DECODERS[request.param]


def test_a_decoder_takes_its_sample(decoder: Decoder) -> None:
    decoder.check_bytes(decoder.encode(decoder.sample), is_sample=True)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["array", "map"])
def test_values_that_are_nested_are_refused(decoder: Decoder, kind: str, depth: int) -> None:
    opened = {
        ("array", False): b"\x91",
        ("map", False): b"\x81\xa1a",
        ("array", True): b"[",
        ("map", True): b'{"a":',
    }[kind, decoder.text]
    closed = {"array": b"]", "map": b"}"}[kind] * depth if decoder.text else b""
    nested = msgspec.Raw(opened * depth + (b"0" if decoder.text else b"\x00") + closed)
    for value in variants(decoder.sample, nested):
        decoder.check_bytes(decoder.encode(value))


@pytest.mark.parametrize(
    "other", [None, True, -1, 2**64 - 1, 1.5, "\x00\ud7ff", "x" * 5000, [], {}, [[]], {"a": 1}]
)
def test_values_of_other_types_are_read_or_refused(decoder: Decoder, other: Any) -> None:
    for value in variants(decoder.sample, other):
        decoder.check_bytes(decoder.encode(value))


def test_bytes_that_were_changed_are_read_or_refused(decoder: Decoder) -> None:
    whole = decoder.encode(decoder.sample)
    chance = random.Random(41)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        decoder.check_bytes(bytes(data[: chance.randint(0, len(data))]))
        decoder.check_bytes(bytes(data))


FIRST_USES = """
import sys

def look(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        while frame.f_globals["__name__"] == "msgspec._utils":
            frame = frame.f_back
        name = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
        (at_import if name.endswith((".<module>", ".resolved")) else at_use).add(name)

at_import, at_use = set(), set()
sys.setprofile(look)
from tests.project.test_peer_input import DECODERS
for decoder in DECODERS.values():
    decoder.check_bytes(decoder.encode(decoder.sample), is_sample=True)
sys.setprofile(None)
assert "kvplan.control.messages.<module>" in at_import, at_import
print(*sorted(at_use))
"""


def test_types_are_resolved_when_they_are_imported() -> None:
    """Msgspec resolves a type at its first use otherwise, and crashes if two threads do so."""
    run = subprocess.run(
        [sys.executable, "-c", FIRST_USES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == []
