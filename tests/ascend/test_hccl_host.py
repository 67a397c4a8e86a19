"""Host memory over RDMA: HCCL maps it, which the driver permits only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.simulator import ELSEWHERE, is_staging
from tests.ascend_sim.build import build_large_pages

ROOT = Path(__file__).parents[2]
LOCAL = ("allocated", "registered", "pinned by the program")
REMOTE = ("a pool", "the program's own")


def report_of(variant: str, folder: Path, **settings: str) -> dict[str, Any]:
    log = folder / "log"
    environment = {**os.environ, **settings, "KVSIM_DIR": str(folder), "KVSIM_LOG": str(log)}
    environment.pop(ELSEWHERE, None)
    process = subprocess.run(
        (sys.executable, "-m", "tests.ascend.hccl_host_process", variant),
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    report: dict[str, Any] = json.loads(process.stdout)
    report["calls"] = [json.loads(line) for line in log.read_text().splitlines()]
    return report


LARGE = {"KVSIM_PAGE_BYTES": str(1 << 16), "LD_PRELOAD": str(build_large_pages())}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            LARGE,
            marks=pytest.mark.skipif(
                "LD_PRELOAD" in os.environ, reason="a sanitizer is preloaded, and has mmap itself"
            ),
        ),
    ],
    ids=["4 KiB", "64 KiB"],
)
@pytest.mark.parametrize("variant", ["8.1", "8.5"])
def test_all_host_memory_is_reached(tmp_path: Path, variant: str, settings: dict[str, str]) -> None:
    """The driver maps whole pages of any size."""
    report = report_of(variant, tmp_path, **settings)
    assert report["said"] == {f"{here} <-> {there}": "right" for here in LOCAL for there in REMOTE}
    assert report["left"] == {}
    calls = report["calls"]
    assert not [call for call in calls if call["call"] == "violation"]
    # Before 8.5, memory that the program has pinned cannot be pinned again, so it is staged.
    assert any(map(is_staging, calls))
