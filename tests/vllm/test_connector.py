"""The class that vLLM loads: its methods, and its import without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.pretended import INTERFACE, NEEDS_VLLM, PYTHON, VERSIONS

ROOT = Path(__file__).parents[2]
WITHOUT_VLLM = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
METHODS = """
from inspect import signature
def methods(cls):
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if callable(function) and not name.startswith("_"):
            parameters = list(signature(function).parameters.values())[1:]
            shown = (str(it.replace(annotation=it.empty, default=it.empty)) for it in parameters)
            yield f"{name}({', '.join(shown)})"
"""


def python(
    code: str, program: str | Path = sys.executable, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(environment or {})}
    return subprocess.run([program, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)


def test_the_package_is_imported_without_vllm() -> None:
    code = "import sys, kvplan.vllm as it; print('vllm' in sys.modules, it.__all__)"
    assert python(code).stdout.strip() == "False ['KvplanConnector']"


@WITHOUT_VLLM
def test_the_connector_reports_that_vllm_is_missing() -> None:
    assert "No module named" in python("from kvplan.vllm import KvplanConnector").stderr


@WITHOUT_VLLM
def test_the_methods_of_the_connector_are_those_that_vllm_calls() -> None:
    code = f"""
from tests.vllm.pretended import install
install()
from kvplan.vllm import KvplanConnector
{METHODS}
print(*methods(KvplanConnector), sep="\\n")
"""
    assert sorted(python(code).stdout.split("\n")) == INTERFACE.splitlines()


@pytest.mark.slow  # imports torch
@NEEDS_VLLM
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_finds_the_connector_and_calls_its_methods(version: Mapping[str, str]) -> None:
    code = f"""
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="KvplanConnector", kv_connector_module_path="kvplan.vllm", kv_role="kv_both"
)
found = KVConnectorFactory.get_connector_class(config)
hma = KVConnectorFactory.supports_hma_config(config)
print(found.__name__, sorted(found.__abstractmethods__), hma)
{METHODS}
print(*(it for base in found.__bases__ for it in methods(base)), sep="\\n")
"""
    lines = python(code, PYTHON, version).stdout.splitlines()
    at = lines.index("KvplanConnector [] True")
    missing = set(INTERFACE.split("\n")) - {"", *lines[at + 1 :]}
    assert missing == (set() if version else {"supports_sleep_mode(kv_transfer_config)"})


@WITHOUT_VLLM
def test_unsupported_features_are_refused() -> None:
    """Sleep mode is refused by the answer that vLLM 0.33 asks for, before it by the connector."""
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
    (False, 1, 2, 1, 1), (False, 2, 2, 1, 1), (False, 1, 1, 2, 2), (False, 2, 1, 2, 1),
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
        "supported",
        "KvplanConnector: decode_context_parallel_size=2 must be 1 for a cache of 2 groups "
        "(FullAttentionSpec, FullAttentionSpec); more is possible only with one group of full "
        "attention or MLA",
    ]
