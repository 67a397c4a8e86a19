"""The class that vLLM loads: as vLLM asks for it, and not needed where vLLM is not."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed here: make vllm runs this with it"
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_the_package_is_imported_without_vllm() -> None:
    code = "import sys, kvplan.vllm as it; print('vllm' in sys.modules, it.__all__)"
    assert python(code).stdout.strip() == "False ['KvplanConnector']"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_the_connector_says_that_vllm_is_missing() -> None:
    assert "No module named" in python("from kvplan.vllm import KvplanConnector").stderr


@NEEDS_VLLM
def test_vllm_finds_the_connector_and_its_abstract_methods_are_there() -> None:
    code = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="KvplanConnector", kv_connector_module_path="kvplan.vllm", kv_role="kv_both"
)
found = KVConnectorFactory.get_connector_class(config)
hma = KVConnectorFactory.supports_hma_config(config)
print(found.__name__, sorted(found.__abstractmethods__), hma)
"""
    assert python(code).stdout.splitlines()[-1] == "KvplanConnector [] True"
