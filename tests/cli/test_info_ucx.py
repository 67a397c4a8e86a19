"""What `kvplan info` says of UCX: none, the one that the tests run with, broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan.transport.ucx.library import OVERRIDE, Found
from tests.cli.test_info import broken_library, found, info, transport, ways

NO_NPU = {"KVPLAN_ASCEND_LIBRARY": ""}


class TestTheOneOfTheTests:
    def test_what_it_is_and_finds_and_a_copy_over_tcp(self, ucx: Found) -> None:
        it = found(**NO_NPU, UCX_NET_DEVICES="lo")
        found_ucx = it["ucx"]
        assert (found_ucx["library"], found_ucx["source"]) == ucx
        assert [ucx.path] in [place["has"] for place in found_ucx["places"]]
        assert found_ucx["version"].startswith("1.")
        assert "tcp/lo" in found_ucx["finds"]
        assert "cma" in found_ucx["modules"]
        verbs = [why for why in found_ucx["missing_for_rdma"] if "without verbs" in why]
        assert bool(verbs) != ("ib" in found_ucx["modules"])
        assert it["stopped"] is None
        assert it["ucx"]["mode"] == "gathered" or not it["ucx"]["missing_for_rdma"]
        assert it["ucx"]["over"] == ["tcp/lo"]
        assert it["ucx"]["copy"] == {
            "way": "gathered over tcp/lo, 2 lanes",
            "works": True,
            "why_not": "",
        }
        assert it["ucx"]["environment"]["UCX_NET_DEVICES"] == "lo"
        assert transport(it, "ucx")["works"]
        assert ways(it, "ucx") == {("host", "host"): "direct"}

    def test_devices_that_are_not_there(self, ucx: Found) -> None:
        it = found(**NO_NPU, UCX_NET_DEVICES="nope")
        assert "ucp_init: No such device" in transport(it, "ucx")["why_not"]
        assert "copy" not in it["ucx"]
        assert "tcp/lo" in it["ucx"]["finds"], "what it would find otherwise"

    def test_a_copy_that_fails(self, ucx: Found) -> None:
        """A transport that does not come out of the process."""
        text = info(**NO_NPU, UCX_TLS="self")
        assert "over self/memory (kvplan.ucx_mode=auto)" in text
        assert "FAILED: process" in text
        assert "ucx         cannot be used: a copy was tried, and failed: process" in text

    def test_the_text_is_for_people(self, ucx: Found) -> None:
        text = info(**NO_NPU)
        for part in ("\nUCX 1.", ucx.path, "finds", "tcp/lo", "mode", "tried", "blocks came right"):
            assert part in text
        assert max(len(line) for line in text.splitlines() if ucx.path not in line) <= 110


class TestBroken:
    def test_none(self) -> None:
        it = found(**NO_NPU, **{OVERRIDE: ""})
        assert "pip install 'kvplan[ucx]'" in it["ucx"]["why_not"]
        assert it["ucx"]["places"] == [{"path": "empty", "origin": f"${OVERRIDE}", "has": []}]
        assert transport(it, "ucx")["why_not"] == it["ucx"]["why_not"]
        assert transport(it, "local")["works"]

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        (tmp_path / "libucp.so.0").write_text("of another machine")
        it = found(**NO_NPU, **{OVERRIDE: str(tmp_path)})
        assert "libucp.so.0: file too short" in transport(it, "ucx")["why_not"]
        assert it["ucx"]["source"] == f"${OVERRIDE}"
        assert "version" not in it["ucx"]

    @pytest.mark.parametrize(
        ("how", "reason"), [("aborts", "ended with SIGABRT"), ("hangs", "took longer than 2 s")]
    )
    def test_one_that_ends_what_looks(self, tmp_path: Path, how: str, reason: str) -> None:
        path = broken_library(tmp_path / "libucp.so.0")
        it = found("--timeout", "2", **NO_NPU, **{OVERRIDE: path, "BROKEN": how})
        assert it["stopped"]["step"] == f"loading UCX ({path})"
        assert it["stopped"]["reason"] == reason
        assert it["ucx"]["library"] == path
        assert transport(it, "local")["works"], "what was looked at before is kept"

    def test_one_that_is_too_old(self, tmp_path: Path) -> None:
        path = broken_library(tmp_path / "libucp.so.0")
        text = info(**NO_NPU, **{OVERRIDE: path, "BROKEN": "old"})
        assert f"{path} is UCX 1.12.1; it must be 1.13 or a later 1.x" in " ".join(text.split())
        assert "UCX: none: " in text
