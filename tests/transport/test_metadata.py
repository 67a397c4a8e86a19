"""Metadata is external input: it is decoded in full or refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvplan import LLMStatusCode
from kvplan.device.sharing import AllocationRef
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.identity import Identity
from kvplan.transport.local.metadata import (
    ArenaRef,
    GenerationTableRef,
    Metadata,
    Range,
    WritersRef,
)
from kvplan.transport.metadata import MAX_NBYTES
from tests.support.refusals import refused

uint64 = st.integers(0, 2**64 - 1)
fd = st.integers(0, 2**31 - 1)
identities = st.builds(
    Identity,
    boot_id=st.text(min_size=36, max_size=36),
    pid=st.integers(1, 2**22),
    start_time=uint64,
    pid_namespace=uint64,
    time_namespace=uint64,
    user_namespace=uint64,
)
ranges = st.builds(
    Range,
    address=st.integers(1, 2**63),
    nbytes=st.integers(1, 2**62),
    slot=st.integers(0, 99),
    generation=st.integers(0, 2**63 - 1),
    writable=st.booleans(),
    arena=st.none(),
    allocation=st.none(),
)
parts = st.builds(
    lambda value, fd, inode, after: replace(
        value, arena=ArenaRef(value.address, value.nbytes + after, fd, inode)
    ),
    ranges,
    fd=fd,
    inode=uint64,
    after=st.integers(0, 2**62 - 1),
)
digits = st.text("0123456789abcdef", min_size=128, max_size=128)
uuids = digits.map(lambda value: value[:32])
exports = st.tuples(fd, st.just("")) | st.tuples(st.just(-1), digits | st.just(""))
on_devices = st.builds(
    lambda value, device, number, export, after, is_pool: replace(
        value,
        allocation=AllocationRef(
            device, value.address, value.nbytes + after, number, *export, is_pool
        ),
    ),
    ranges,
    device=uuids,
    number=uint64,
    export=exports,
    after=st.integers(0, 2**62 - 1),
    is_pool=st.booleans(),
)
tables = st.builds(
    GenerationTableRef,
    fd=fd,
    inode=uint64,
    num_slots=st.integers(100, 2**24),
    address=st.integers(1, 2**64 - 1),
)
writers = st.builds(
    WritersRef,
    fd=fd,
    inode=uint64,
    num_entries=st.integers(1, 2**16),
    address=st.integers(1, 2**64 - 1),
)
some_ranges = st.lists(ranges | parts | on_devices, max_size=5).map(tuple)
metadata = st.builds(Metadata, identities, tables, writers, some_ranges, st.just("") | uuids)

EXPORTED = AllocationRef("0" * 32, 4000, 200, number=1, fd=14, handle="", is_pool=True)
WITH_HANDLE = AllocationRef("1" * 32, 5000, 200, number=2, fd=-1, handle="a" * 128, is_pool=False)
EXAMPLE = Metadata(
    Identity("0" * 36, 12, 3, pid_namespace=4, time_namespace=14, user_namespace=5),
    GenerationTableRef(fd=6, inode=7, num_slots=8, address=4096),
    WritersRef(fd=11, inode=12, num_entries=13, address=8192),
    (
        Range(
            4096,
            100,
            slot=0,
            generation=1,
            writable=True,
            arena=ArenaRef(4000, 200, 9, 10),
            allocation=None,
        ),
        Range(4096, 100, slot=1, generation=2, writable=True, arena=None, allocation=EXPORTED),
        Range(5120, 64, slot=2, generation=3, writable=True, arena=None, allocation=WITH_HANDLE),
    ),
)


def refusal(blob: bytes) -> str:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as caught:
        Metadata.from_bytes(blob)
    return str(caught.value)


@given(metadata)
def test_metadata_round_trips(given: Metadata) -> None:
    assert Metadata.from_bytes(given.to_bytes()) == given


def test_a_transport_publishes_its_identity(transport: LocalTransport) -> None:
    arena = transport.allocate(5000)
    part = transport.register(memoryview(arena)[1000:3000])
    registration = transport.register(bytearray(10), writable=False)
    found = Metadata.from_bytes(transport.metadata())
    assert found.identity == Identity.of_self()
    assert found.ranges == (part.range, registration.range)
    assert part.range.arena == ArenaRef(arena.address, 5000, arena.fd, arena.inode)
    assert (part.address, part.nbytes) == (arena.address + 1000, 2000)
    assert [range_.writable for range_ in found.ranges] == [True, False]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(blob: bytes) -> None:
    assert refusal(blob)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(plain_values)
def test_other_messagepack_is_refused(value: Any) -> None:
    assert "peer metadata" in refusal(msgspec.msgpack.encode(value))


FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "identity": lambda value: value,
    "generations": lambda value: value,
    "writers": lambda value: value,
    "ranges": lambda value: value,
    **{
        f"identity.{name}": lambda document: document["identity"]
        for name in (
            "boot_id",
            "pid",
            "start_time",
            "pid_namespace",
            "time_namespace",
            "user_namespace",
        )
    },
    **{
        f"generations.{name}": lambda document: document["generations"]
        for name in GenerationTableRef.__struct_fields__
    },
    **{
        f"writers.{name}": lambda document: document["writers"]
        for name in WritersRef.__struct_fields__
    },
    **{
        f"ranges[0].{name}": lambda document: document["ranges"][0]
        for name in ("address", "nbytes", "slot", "generation", "writable", "arena", "allocation")
    },
    **{
        f"ranges[{i}].allocation.{name}": lambda document, i=i: document["ranges"][i]["allocation"]
        for name in AllocationRef.__struct_fields__
        for i in (1, 2)
    },
    **{
        f"ranges[0].arena.{name}": lambda document: document["ranges"][0]["arena"]
        for name in ArenaRef.__struct_fields__
    },
}


@pytest.mark.parametrize("nbytes", [2, 4096, 2**62])
def test_a_range_may_end_where_all_addresses_do(nbytes: int) -> None:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    document["ranges"][0] |= {"address": 2**64 - nbytes, "nbytes": nbytes, "arena": None}
    found = Metadata.from_bytes(msgspec.msgpack.encode(document)).ranges[0]
    assert (found.address, found.nbytes) == (2**64 - nbytes, nbytes)
    document["ranges"][0]["nbytes"] += 1
    assert "ranges[0]: address" in (message := refusal(msgspec.msgpack.encode(document)))
    assert "ends past 2**64" in message


WRONG = [-1, 1.0, "1", [], {}, [[]], float("nan")]


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_checked(path: str) -> None:
    parent, _, name = path.rpartition(".")
    for wrong in WRONG:
        if (path, wrong) in (
            ("ranges", []),
            *((f"ranges[{i}].allocation.fd", -1) for i in (1, 2)),
        ):
            continue
        document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
        FIELDS[path](document)[name] = wrong
        message = refusal(msgspec.msgpack.encode(document))
        assert name in message or "handle is" in message  # an allocation without a descriptor
    for change in (lambda value: value.pop(name), lambda value: value.update(unknown=1)):
        document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
        change(FIELDS[path](document))
        message = refusal(msgspec.msgpack.encode(document))
        assert f"{parent or 'document'} is" in message or "missing required" in message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slot", 8, "ranges[0].slot=8 is out of range [0, 8)"),
        ("nbytes", 2**63, f"nbytes is {2**63}; expected `int` <= {2**63 - 1}"),
        ("address", 2**64 - 50, "ends past 2**64"),
        ("address", 3999, "not inside its arena"),
        ("nbytes", 105, "not inside its arena"),
        ("writable", 1, "writable is 1; expected `bool`"),
        ("generation", True, "generation is True; expected `int`"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    field: str, value: Any, message: str
) -> None:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    document["ranges"][0][field] = value
    assert message in refusal(msgspec.msgpack.encode(document))


def of_allocation(ref: AllocationRef) -> dict[str, Any]:
    return msgspec.structs.asdict(ref)


@pytest.mark.parametrize(
    ("place", "field", "value", "message"),
    [
        (1, "address", 3999, "not inside its allocation"),
        (1, "nbytes", 105, "not inside its allocation"),
        (0, "allocation", of_allocation(EXPORTED), "arena and allocation are both given"),
    ],
)
def test_ranges_that_contradict_their_allocation_are_refused(
    place: int, field: str, value: object, message: str
) -> None:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    document["ranges"][place][field] = value
    assert message in refusal(msgspec.msgpack.encode(document))


@pytest.mark.parametrize(
    ("place", "field", "value", "message"),
    [
        (1, "handle", "a" * 128, "empty, as there is a descriptor"),
        (2, "handle", "A" * 128, "expected `str` matching"),
        (2, "fd", 3, "empty, as there is a descriptor"),
        (2, "address", 2**64 - 100, "ends past 2**64"),
        (1, "device", "0" * 31, "expected `str` matching"),
    ],
)
def test_allocations_that_contradict_themselves_are_refused(
    place: int, field: str, value: object, message: str
) -> None:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    document["ranges"][place]["allocation"][field] = value
    assert message in refusal(msgspec.msgpack.encode(document))


def test_the_device_is_a_uuid() -> None:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    document["device"] = "0" * 31
    message = refusal(msgspec.msgpack.encode(document))
    assert "device is '0000" in message
    assert "expected `str` matching" in message


@pytest.mark.parametrize(
    "blob",
    [
        b"\x91" * 200_000,
        b"\x91" * 900 + b"\xc0",
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x82\xa6schema\xaekvplan.local 7\xa6schema\x01",
        b"\x81\xa6schema\xa2\xff\xfe",
        b"",
        bytes(MAX_NBYTES + 1),
        b"\x82\xa6schema\xaekvplan.local 7\xd9\xff" + b"\x1b" * 255 + b"\xc0",
    ],
    ids=["open", "deep", "nested", "long", "twice", "encoding", "empty", "large", "terminal"],
)
def test_hostile_documents_are_refused(blob: bytes) -> None:
    message = refusal(blob)
    assert len(message) < 500
    assert message.isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "kvplan.other 7"},
        {"schema": None},
        {"schema": "kvplan.local 10", "fields": "that this version does not know"},
        {"schema": "kvplan.local 6"},
    ],
)
def test_another_schema_is_refused(change: dict[str, Any]) -> None:
    document = {**msgspec.msgpack.decode(EXAMPLE.to_bytes()), **change}
    assert "this kvplan reads 'kvplan.local 9'" in refusal(msgspec.msgpack.encode(document))


def test_only_bytes_are_accepted() -> None:
    with pytest.raises(TypeError, match="must be bytes, not str"):
        Metadata.from_bytes("{}")  # type: ignore[arg-type]


def test_a_forked_child_is_another_process() -> None:
    script = (
        "import os; from kvplan.transport.local.identity import Identity\n"
        "parent = Identity.of_self()\n"
        "if pid := os.fork(): assert os.waitpid(pid, 0)[1] == 0\n"
        "else: os._exit(Identity.of_self().pid != os.getpid() or Identity.of_self() == parent)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
