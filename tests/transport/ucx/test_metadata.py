"""What peers tell of themselves over UCX: every field is looked at before it is believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.ucx.metadata import Metadata, Range, RegionRef

RANGE = Range(0x1000, 4096, 3, 7, True)
WHOLE = Metadata(
    "0" * 32,
    "node7",
    42,
    "one_sided",
    "1.22.0",
    "rc_mlx5/mlx5_0:1",
    2,
    (b"\0address", b"another"),
    (RANGE, replace(RANGE, address=0x9000, slot=4, writable=False, region=5)),
    (RegionRef(5, 0x8000, 65536, b"key"),),
    RegionRef(0, 0x100, 8192, b"board"),
)
BARE = Metadata("f" * 32, "node8", 1, "gathered")


@pytest.mark.parametrize("metadata", [WHOLE, BARE], ids=["all of it", "not loaded yet"])
def test_it_is_read_as_it_was_written(metadata: Metadata) -> None:
    assert Metadata.from_bytes(metadata.to_bytes()) == metadata


BAD: dict[str, tuple[Any, str]] = {
    "instance": ("xyz", "32 hexadecimal digits"),
    "host": ("", "1 to 64 printable characters"),
    "pid": (0, r"pid is 0; .*\[1, 2147483647\]"),
    "mode": ("rdma", "one of gathered, one_sided"),
    "ucx": ("newest", "a version such as"),
    "over": ("tcp\neth0", "printable"),
    "lanes": (17, r"lanes is 17; .*\[1, 16\]"),
    "addresses": (["==="] * 2, r"addresses\[0\] is .*base64"),
    "ranges": ({}, "must be a list"),
    "regions": ([{"number": 5}], "regions.0. is .*address, key, nbytes, number"),
    "board": (7, "board is 7"),
    "extra": (1, "just the fields addresses, board"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_field_that_cannot_be(field: str) -> None:
    value, message = BAD[field]
    document = json.loads(WHOLE.to_bytes())
    document[field] = value
    with pytest.raises(LLMException, match=message) as refused:
        Metadata.from_bytes(json.dumps(document).encode())
    assert refused.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_an_address_for_some_lanes() -> None:
    document = json.loads(WHOLE.to_bytes())
    del document["addresses"][1]
    with pytest.raises(LLMException, match=r"addresses is a list of 1; .*each of 2 lanes"):
        Metadata.from_bytes(json.dumps(document).encode())


def test_an_address_of_nothing() -> None:
    document = json.loads(WHOLE.to_bytes())
    document["addresses"][1] = ""
    with pytest.raises(LLMException, match=r"addresses\[1\] is empty"):
        Metadata.from_bytes(json.dumps(document).encode())


BAD_RANGES: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"nbytes": 0}, r"ranges\[0\].nbytes is 0"),
    "wraps around": ({"address": 2**64 - 1}, "ends past 2\\*\\*64"),
    "slot": ({"slot": 65536}, r"slot is 65536; .*\[0, 65535\]"),
    "generation": ({"generation": -1}, "generation is -1"),
    "writable": ({"writable": 1}, "writable is 1; it must be true or false"),
    "no such region": ({"region": 6}, "there is no region of that number"),
    "out of its region": ({"region": 5}, "is not inside its region"),
}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_a_range_that_cannot_be(name: str) -> None:
    changes, message = BAD_RANGES[name]
    document = json.loads(WHOLE.to_bytes())
    document["ranges"][0] |= changes
    with pytest.raises(LLMException, match=message):
        Metadata.from_bytes(json.dumps(document).encode())


def test_another_schema_and_no_json() -> None:
    other = WHOLE.to_bytes().replace(b"kvplan.ucx", b"kvplan.xyz")
    with pytest.raises(LLMException, match=r"schema 'kvplan.xyz' .*reads 'kvplan.ucx' version 2"):
        Metadata.from_bytes(other)
    with pytest.raises(LLMException, match="no JSON"):
        Metadata.from_bytes(b"{")
