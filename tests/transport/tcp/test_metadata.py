"""What peers say of themselves over TCP: every field is looked at before it is believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.tcp.metadata import Metadata, Range
from tests.support.refusals import refused

RANGE = Range(0x1000, 4096, 3, 7, True)
OTHER = replace(RANGE, address=0x9000, slot=4, writable=False)
WHOLE = Metadata("0" * 32, "node7", 42, 4, True, (RANGE, OTHER))
BARE = Metadata("f" * 32, "node8", 1, 1, False)


@pytest.mark.parametrize("metadata", [WHOLE, BARE], ids=["all of it", "no ranges"])
def test_it_is_read_as_it_was_written(metadata: Metadata) -> None:
    assert Metadata.from_bytes(metadata.to_bytes()) == metadata


BAD: dict[str, tuple[Any, str]] = {
    "instance": ("xyz", "32 hexadecimal digits"),
    "host": ("", "1 to 64 printable characters"),
    "pid": (0, r"pid is 0; .*\[1, 2147483647\]"),
    "connections": (17, r"connections is 17; .*\[1, 16\]"),
    "encrypt": (1, "encrypt is 1; it must be true or false"),
    "ranges": ({}, "must be a list"),
    "extra": (1, "just the fields connections, encrypt"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_field_that_cannot_be(field: str) -> None:
    value, message = BAD[field]
    document = json.loads(WHOLE.to_bytes())
    document[field] = value
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        Metadata.from_bytes(json.dumps(document).encode())


BAD_RANGES: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"nbytes": 0}, r"ranges\[0\].nbytes is 0"),
    "wraps around": ({"address": 2**64 - 1}, "ends past 2\\*\\*64"),
    "slot": ({"slot": 65536}, r"slot is 65536; .*\[0, 65535\]"),
    "generation": ({"generation": -1}, "generation is -1"),
    "writable": ({"writable": 1}, "writable is 1; it must be true or false"),
    "one field more": ({"region": 1}, "just the fields address, generation"),
}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_a_range_that_cannot_be(name: str) -> None:
    changes, message = BAD_RANGES[name]
    document = json.loads(WHOLE.to_bytes())
    document["ranges"][0] |= changes
    with pytest.raises(LLMException, match=message):
        Metadata.from_bytes(json.dumps(document).encode())


def test_another_schema_and_no_json() -> None:
    other = WHOLE.to_bytes().replace(b"kvplan.tcp", b"kvplan.xyz")
    with pytest.raises(LLMException, match=r"schema 'kvplan.xyz' .*reads 'kvplan.tcp' version 1"):
        Metadata.from_bytes(other)
    with pytest.raises(LLMException, match="no JSON"):
        Metadata.from_bytes(b"{")
