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


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_what_is_not_supported_is_refused() -> None:
    """Sleep mode by the answer that vLLM 0.33 asks for, and by the connector itself before it."""
    code = """
from types import SimpleNamespace as Of
from tests.vllm.pretended import install
vllm = install()
from kvplan.vllm.connector import KvplanConnector, _check_supported
print(KvplanConnector.supports_sleep_mode(None))
group = Of(kv_cache_spec=vllm["FullAttentionSpec"]())
sizes = ("pipeline", "decode_context", "prefill_context")
for sleeps, groups, *parallel in (
    (False, 1, 1, 1, 1), (True, 1, 1, 1, 1),
    (False, 1, 2, 1, 1), (False, 2, 2, 1, 1), (False, 1, 1, 2, 1), (False, 1, 1, 1, 2),
):
    sized = Of(**{f"{name}_parallel_size": size for name, size in zip(sizes, parallel)})
    config = Of(model_config=Of(enable_sleep_mode=sleeps), parallel_config=sized)
    try:
        _check_supported(config, Of(kv_cache_groups=[group] * groups))
    except NotImplementedError as error:
        print(error)
    else:
        print("supported")
"""
    assert python(code).stdout.splitlines() == [
        "False",
        "supported",
        "KvplanConnector: enable_sleep_mode=True; sleep mode replaces the memory of the "
        "registered cache: start vLLM without it",
        "supported",
        "KvplanConnector: pipeline_parallel_size=2 must be 1 for a cache of 2 groups",
        "KvplanConnector: decode_context_parallel_size=2 must be 1",
        "KvplanConnector: prefill_context_parallel_size=2 must be 1",
    ]
