"""`kvplan info` about UCX: without a library, with that of the tests, and with broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan.transport.ucx.library import OVERRIDE, Found
from tests.cli.test_info import broken_library, found, info, transport

NO_NPU = {"KVPLAN_ASCEND_LIBRARY": ""}


class TestUcxOfTheTests:
    def test_ucx_and_its_findings_are_described(self, ucx: Found) -> None:
        report = found(**NO_NPU, UCX_LOG_LEVEL="warn")
        found_ucx = report["ucx"]
        assert (found_ucx["library"], found_ucx["source"]) == ucx
        assert [ucx.path] in [place["has"] for place in found_ucx["places"]]
        assert found_ucx["version"].startswith("1.")
        assert "cma/memory" in found_ucx["finds"]
        assert "cma" in found_ucx["modules"]
        verbs = [why for why in found_ucx["missing_for_rdma"] if "without verbs" in why]
        assert bool(verbs) != ("ib" in found_ucx["modules"])
        assert report["stopped"] is None
        assert report["ucx"]["environment"]["UCX_LOG_LEVEL"] == "warn"

    def test_without_rdma_it_says_why(self, ucx: Found) -> None:
        report = found(**NO_NPU)
        if not report["ucx"]["missing_for_rdma"]:
            pytest.skip("RDMA is here")
        assert report["ucx"]["missing_for_rdma"][0] in transport(report, "ucx")["why_not"]
        assert "tried" not in transport(report, "ucx")

    def test_a_copy(self, ucx: Found) -> None:
        """The settings of the environment copy over shared memory instead of RDMA."""
        shared = '{"UCX_TLS": "shm"}'
        row = transport(found(**NO_NPU, KVPLAN_UCX_SETTINGS=shared), "ucx")
        assert (row["works"], row["reaches"], row["tried"]) == (True, ["host"], "cma/memory")

    def test_a_copy_that_fails(self, ucx: Found) -> None:
        """The transport of this test reads no bytes."""
        mapped = '{"UCX_TLS": "posix"}'
        row = transport(found(**NO_NPU, KVPLAN_UCX_SETTINGS=mapped), "ucx")
        assert not row["works"]
        assert row["why_not"]

    def test_the_text_is_for_people(self, ucx: Found) -> None:
        text = info("-v", **NO_NPU)
        for part in ("\nucx\n", ucx.path, "finds", "cma/memory"):
            assert part in text
        assert max(len(line) for line in text.splitlines() if ucx.path not in line) <= 110


class TestBroken:
    def test_missing_ucx_is_reported(self) -> None:
        report = found(**NO_NPU, **{OVERRIDE: ""})
        assert "no UCX library" in report["ucx"]["why_not"]
        assert report["ucx"]["places"] == [{"path": "empty", "origin": f"${OVERRIDE}", "has": []}]
        assert transport(report, "ucx")["why_not"] == report["ucx"]["why_not"]
        assert transport(report, "local")["works"]

    def test_a_file_that_is_not_a_library(self, tmp_path: Path) -> None:
        (tmp_path / "libucp.so.0").write_text("of another machine")
        report = found(**NO_NPU, **{OVERRIDE: str(tmp_path)})
        assert "libucp.so.0: file too short" in transport(report, "ucx")["why_not"]
        assert report["ucx"]["source"] == f"${OVERRIDE}"
        assert "version" not in report["ucx"]

    @pytest.mark.parametrize(
        ("fault", "timeout_s", "reason"),
        [
            ("aborts", "60", "ended with SIGABRT"),
            pytest.param("hangs", "8", "took longer than 8 s", marks=pytest.mark.slow),
        ],
    )
    def test_a_library_that_ends_the_process(
        self, tmp_path: Path, fault: str, timeout_s: str, reason: str
    ) -> None:
        path = broken_library(tmp_path / "libucp.so.0")
        report = found("--timeout", timeout_s, **NO_NPU, **{OVERRIDE: path, "BROKEN": fault})
        assert report["stopped"]["step"] == f"loading UCX ({path})"
        assert report["stopped"]["reason"] == reason
        assert report["ucx"]["library"] == path
        assert transport(report, "local")["works"], "what was looked at before is kept"

    def test_a_library_that_is_too_old(self, tmp_path: Path) -> None:
        path = broken_library(tmp_path / "libucp.so.0")
        text = info("-v", **NO_NPU, **{OVERRIDE: path, "BROKEN": "old"})
        assert f"{path} is UCX 1.12.1; it must be 1.13 or a later 1.x" in " ".join(text.split())
