"""The metadata that peers publish over UCX: every field is checked before use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.ucx.metadata import Metadata, Range, RegionRef
from tests.support.refusals import refused

RANGE = Range(0x9000, 4096, 3, 7, True, 5)
WHOLE = Metadata(
    "0" * 32,
    "node7",
    42,
    "1.22.0",
    "rc_mlx5/mlx5_0:1",
    b"\0address",
    (RANGE, replace(RANGE, address=0xA000, slot=4, writable=False)),
    (RegionRef(0x8000, 65536, 5, b"key"),),
    RegionRef(0x100, 8192, 0, b"generations"),
    RegionRef(0x8000, 2048, 0, b"tickets"),
)


def test_metadata_round_trips() -> None:
    assert Metadata.from_bytes(WHOLE.to_bytes()) == WHOLE


BAD: dict[str, tuple[Any, str]] = {
    "instance": ("xyz", r"instance is 'xyz'; expected `str` matching"),
    "host": ("", r"host is .*length >= 1"),
    "pid": (0, "pid is 0; expected `int` >= 1"),
    "version": ("newest", "version is 'newest'; expected `str` matching"),
    "over": ("tcp\neth0", "printable"),
    "address": (b"", "address is b''; expected `bytes` of length >= 1"),
    "ranges": ({}, "ranges is {}; expected `array`"),
    "regions": ([{"number": 5}], "regions.0. is .*missing required field `address`"),
    "generations": (7, "generations is 7"),
    "extra": (1, "unknown field `extra`"),
}


@pytest.mark.parametrize("field", BAD)
def test_an_impossible_field_is_refused(field: str) -> None:
    value, message = BAD[field]
    document = msgspec.msgpack.decode(WHOLE.to_bytes())
    document[field] = value
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        Metadata.from_bytes(msgspec.msgpack.encode(document))


BAD_RANGES: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"nbytes": 0}, r"ranges\[0\].nbytes is 0"),
    "wraps around": ({"address": 2**64 - 1}, r"ranges\[0\]: .*ends past 2\*\*64"),
    "slot": ({"slot": 65536}, r"slot=65536 is out of range \[0, 65536\)"),
    "generation": ({"generation": -1}, "generation is -1"),
    "writable": ({"writable": 1}, "writable is 1; expected `bool`"),
    "no such region": ({"region": 6}, "region is 6; it must be the number of one of"),
    "out of its region": ({"address": 4096}, "is not inside its region"),
    "one byte before": ({"address": 0x8000 - 1}, "is not inside its region"),
    "one byte behind": ({"address": 0x18000 - 63, "nbytes": 64}, "is not inside its region"),
    "larger": ({"address": 0x8000, "nbytes": 65537}, "is not inside its region"),
}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_an_impossible_range_is_refused(name: str) -> None:
    changes, message = BAD_RANGES[name]
    document = msgspec.msgpack.decode(WHOLE.to_bytes())
    document["ranges"][0] |= changes
    with pytest.raises(LLMException, match=message):
        Metadata.from_bytes(msgspec.msgpack.encode(document))


def test_a_range_may_be_its_whole_region() -> None:
    document = msgspec.msgpack.decode(WHOLE.to_bytes())
    document["ranges"][0] |= {"address": 0x8000, "nbytes": 65536}
    document["ranges"][1] |= {"address": 0x18000 - 64, "nbytes": 64}
    first, second = Metadata.from_bytes(msgspec.msgpack.encode(document)).ranges
    assert (first.nbytes, second.address) == (65536, 0x18000 - 64)


def test_another_schema_or_encoding_is_refused() -> None:
    other = WHOLE.to_bytes().replace(b"kvplan.ucx", b"kvplan.xyz")
    with pytest.raises(LLMException, match=r"schema is 'kvplan.xyz 4'.*reads 'kvplan.ucx 4'"):
        Metadata.from_bytes(other)
    with pytest.raises(LLMException, match="cannot be decoded"):
        Metadata.from_bytes(b"\x81")
