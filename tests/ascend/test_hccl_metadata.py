"""Metadata of the HCCL transport: earlier versions are read, all else is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import LLMStatusCode
from kvplan.transport.hccl.addresses import DeviceAddress
from kvplan.transport.hccl.metadata import GenerationTableRef, Metadata, Range, RegionRef
from tests.support.refusals import refused

EXAMPLE = Metadata(
    "0123456789abcdef" * 2,
    "A2",
    DeviceAddress("1.0", "host", "3", "10.0.0.3"),
    GenerationTableRef(4096, 16),
    7,
    (
        Range(1000, 100, 3, 5, True, True, (RegionRef(900, 400, 7),)),
        Range(2000, 100, 4, 6, False, False, (RegionRef(2000, 50, 1), RegionRef(2050, 90, 2))),
    ),
)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    address, nbytes = draw(st.integers(2, 2**62)), draw(st.integers(3, 2**61))
    cuts = sorted(
        {address + item for item in draw(st.lists(st.integers(1, nbytes - 1), max_size=3))}
    )
    edges = [address - draw(st.integers(0, 1)), *cuts, address + nbytes + draw(st.integers(0, 9))]
    regions = tuple(
        RegionRef(first, last - first, draw(st.integers(0, 99))) for first, last in pairwise(edges)
    )
    slot, generation = draw(st.integers(0, 15)), draw(st.integers(0, 2**63 - 1))
    writable, on_device = draw(st.booleans()), draw(st.booleans())
    return Range(address, nbytes, slot, generation, writable, on_device, regions)


@given(st.lists(ranges(), max_size=4))
def test_metadata_round_trips(given: list[Range]) -> None:
    before = Metadata(EXAMPLE.instance, "A3", EXAMPLE.device, EXAMPLE.generations, 99, tuple(given))
    assert Metadata.from_bytes(before.to_bytes()) == before


def change(edit: Callable[[Any], object]) -> bytes:
    document = msgspec.msgpack.decode(EXAMPLE.to_bytes())
    edit(document)
    return msgspec.msgpack.encode(document)


def put(*path: Any) -> Callable[[Any], object]:
    """Return an edit that puts the value, the last of `path`, at the place of the other names."""

    def edit(document: Any) -> None:
        *steps, last, value = path
        for step in steps:
            document = document[step]
        document[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (put("schema", "kvplan.local 3"), "schema is 'kvplan.local 3'; this kvplan reads"),
        (put("schema", "kvplan.hccl 5"), "this kvplan reads 'kvplan.hccl 4'"),
        (put("instance", "0" * 31), "instance is"),
        (put("product", ""), "product is ''"),
        (put("device", "device_id", 3), "device.device_id is 3"),
        (put("device", "super_pod_id", "0"), "device: super_pod_id: version 1.0 has no such field"),
        (put("device", "version", "1.2"), "device: super_device_id: version 1.2 needs it"),
        (put("generations", "num_slots", 0), "generations.num_slots is 0"),
        (put("newest", -1), "newest is -1"),
        (put("newest", 6), "ranges[0].regions[0].number is 7; the newest region is 6"),
        (put("ranges", {}), "ranges is {}"),
        (put("ranges", 0, "slot", 16), "ranges[0].slot=16 is out of range [0, 16)"),
        (put("ranges", 0, "nbytes", 0), "ranges[0].nbytes is 0"),
        (put("ranges", 0, "address", 2**64 - 9), "ranges[0]: address"),
        (put("ranges", 0, "writable", 1), "ranges[0].writable is 1"),
        (put("ranges", 0, "on_device", None), "ranges[0].on_device is None"),
        (put("ranges", 0, "regions", []), "ranges[0]: regions end at 1000"),
        (put("ranges", 0, "regions", 0, "address", 1001), "does not hold byte 1000"),
        (put("ranges", 1, "regions", 1, "nbytes", 49), "ranges[1]: regions end at 2099"),
        (put("ranges", 1, "regions", 0, "nbytes", 49), "does not hold byte 2049"),
        (put("more", 1), "unknown field `more`"),
    ],
)
def test_impossible_metadata_is_refused_and_named(
    edit: Callable[[Any], object], reason: str
) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as caught:
        Metadata.from_bytes(change(edit))
    assert reason in str(caught.value)


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(),
        lambda value: st.lists(value) | st.dictionaries(st.text(), value),
    )
)
def test_arbitrary_documents_are_refused_as_invalid(document: Any) -> None:
    blob = msgspec.msgpack.encode(document)
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        Metadata.from_bytes(blob)


def test_a_value_that_is_not_bytes_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="must be bytes"):
        Metadata.from_bytes("{}")  # type: ignore[arg-type]
