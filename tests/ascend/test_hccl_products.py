"""The HCCL transport on each product, and with each library of the products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.simulator import ELSEWHERE

ROOT = Path(__file__).parents[2]
A2, A3, A950 = "Ascend910B3", "Ascend910_9391", "Ascend950PR"


def on(soc: str, variant: str, folder: Path, **settings: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        **settings,
        "KVSIM_SOC": soc,
        "KVSIM_DIR": str(folder),
        "KVSIM_LOG": str(folder / "log"),
    }
    environment.pop(ELSEWHERE, None)
    process = subprocess.run(
        (sys.executable, "-m", "tests.ascend.hccl_pair_process", variant),
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    report: dict[str, Any] = json.loads(process.stdout)
    return report


def test_an_a3_outside_of_a_super_pod_is_linked(tmp_path: Path) -> None:
    """The device's numbers are negative, which no rank table may contain."""
    report = on(A3, "8.5", tmp_path, KVSIM_SUPER_POD_ID="-1")
    assert (report["product"], report["version"]) == ("A3", "1.0")
    assert report["pulled"]
    assert report["pushed"]


@pytest.mark.parametrize(
    ("soc", "variant", "product", "version"),
    [
        (A2, "8.5", "A2", "1.0"),
        (A2, "8.1", "A2", "1.0"),
        (A2, "hccl-only", "A2", "1.0"),
        (A2, "batch-unsupported", "A2", "1.0"),
        (A3, "8.5", "A3", "1.2"),
    ],
)
def test_these_products_register_memory_once(
    soc: str, variant: str, product: str, version: str, tmp_path: Path
) -> None:
    report = on(soc, variant, tmp_path)
    assert report == {
        "product": product,
        "version": version,
        "variant": variant,
        "reaches": ["device", "host"],
        "pulled": True,
        "pushed": True,
        "pulled to the host": True,
        "generation": 1,
        "host memory": "registered",
        "deregistered": report["deregistered"],
        "left": {},
    }
    assert report["deregistered"] != "LLM_SUCCESS"


def test_the_950_registers_memory_with_each_connection(tmp_path: Path) -> None:
    report = on(A950, "8.5", tmp_path)
    assert report["product"] == "950"
    assert report["reaches"] == ["device"]
    assert report["pulled"] is report["pushed"] is report["pulled to the host"] is True
    assert report["generation"] == 1
    assert "on this product (950) HCCL reaches only device memory" in report["host memory"]
    assert report["deregistered"] != "LLM_SUCCESS"
    assert report["left"] == {}
