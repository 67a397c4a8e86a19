"""The metadata that peers publish over TCP: every field is checked before use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.tcp.metadata import Metadata, Range
from tests.support.refusals import refused

RANGE = Range(0x1000, 4096, 3, 7, True)
OTHER = replace(RANGE, address=0x9000, slot=4, writable=False)
WHOLE = Metadata("0" * 32, "node7", 42, 4, True, (RANGE, OTHER))
BARE = Metadata("f" * 32, "node8", 1, 1, False)


@pytest.mark.parametrize("metadata", [WHOLE, BARE], ids=["all of it", "no ranges"])
def test_metadata_round_trips(metadata: Metadata) -> None:
    assert Metadata.from_bytes(metadata.to_bytes()) == metadata


BAD: dict[str, tuple[Any, str]] = {
    "instance": ("xyz", r"instance is 'xyz'; expected `str` matching"),
    "host": ("", r"host is .*length >= 1"),
    "pid": (0, "pid is 0; expected `int` >= 1"),
    "connections": (17, "connections is 17; expected `int` <= 16"),
    "encrypt": (1, "encrypt is 1; expected `bool`"),
    "ranges": ({}, "ranges is {}; expected `array`"),
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
    "one field more": ({"region": 1}, "unknown field `region`"),
}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_an_impossible_range_is_refused(name: str) -> None:
    changes, message = BAD_RANGES[name]
    document = msgspec.msgpack.decode(WHOLE.to_bytes())
    document["ranges"][0] |= changes
    with pytest.raises(LLMException, match=message):
        Metadata.from_bytes(msgspec.msgpack.encode(document))


def test_another_schema_or_encoding_is_refused() -> None:
    other = WHOLE.to_bytes().replace(b"kvplan.tcp", b"kvplan.xyz")
    with pytest.raises(LLMException, match=r"schema is 'kvplan.xyz 2'.*reads 'kvplan.tcp 2'"):
        Metadata.from_bytes(other)
    with pytest.raises(LLMException, match="cannot be decoded"):
        Metadata.from_bytes(b"\x81")
