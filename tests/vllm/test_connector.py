"""The class that vLLM loads: its methods, and its import without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import product
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
    return subprocess.run(
        [program, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env, timeout=120
    )


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


@WITHOUT_VLLM
def test_connectors_move_a_request_and_report_it() -> None:
    """Two requests fail before vLLM asks for their blocks; it gets those of both, once."""
    code = """
from tests.vllm.connected import Engine, request
one, other = Engine(produces=True), Engine(produces=False)
for at, block in enumerate((6, 1, 3)):
    for layer, array in enumerate(one.arrays):
        array[block] = 10 * layer + at
params = one.finish("p1", [6, 1, 3])
answer, results = other.fetch("d1", params, [2, 4, 0])
print(answer, results.finished_recving, one.results("finished_sending").finished_sending)
print([array[[2, 4, 0], 0, 0, 0].tolist() for array in other.arrays])
print(other.worker.get_block_ids_with_load_errors())
other.scheduler.request_finished(request("d1", {}), [])
print(other.step().cancelled)
for name, blocks in (("d2", [2, 4, 0]), ("d3", [5, 7, 1])):
    print(other.fetch(name, params, blocks)[1].finished_recving)
print(*(other.worker.get_block_ids_with_load_errors() for _ in range(2)))
figures = other.worker.get_kv_connector_stats().reduce()
print(figures["Fetched tokens"], figures["Failed requests"])
print(other.worker.get_kv_connector_stats(), other.scheduler.get_kv_connector_stats())
for engine in (one, other):
    for connector in (engine.worker, engine.scheduler):
        connector.shutdown()
"""
    assert python(code).stdout.splitlines() == [
        "(70, True) {'d1'} {'p1'}",
        "[[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]",
        "set()",
        "[]",
        "{'d2'}",
        "{'d3'}",
        "{0, 1, 2, 4, 5, 7} set()",
        "70 2",
        "None None",
    ]


@WITHOUT_VLLM
def test_the_scheduler_knows_the_blocks_of_all_ranks_and_groups() -> None:
    code = """
from types import SimpleNamespace as Of
from tests.vllm.connected import connector, parallel, spec
from kvplan.vllm.connector import _layer_group
config = Of(parallel_config=parallel(decode_context_parallel_size=4))
for kind, fields in (
    ("FullAttentionSpec", {}), ("SlidingWindowSpec", {"sliding_window": 96}),
    ("MLAAttentionSpec", {"block_size": 16}),
):
    print(_layer_group(Of(layer_names=["b", "a"], kv_cache_spec=spec(kind, **fields)), config))
scheduler = connector("scheduler", produces=True)
scheduler._kv_cache_config.kv_cache_groups *= 2
print(scheduler.get_loaded_kv_cache_group_ids(None))
"""
    shown = "LayerGroup(layers=('b', 'a'), block_tokens={}, packing='', window={}, states=None)"
    expected = [shown.format(*of) for of in ((128, 0), (128, 96), (64, 0))]
    assert python(code).stdout.splitlines() == [*expected, "(0, 1)"]


@WITHOUT_VLLM
def test_each_worker_has_a_number_of_its_own() -> None:
    """The numbers are those of the workers' ports, over all replicas, stages, copies and ranks."""
    code = """
from itertools import product
from tests.vllm.connected import RANKS, connector, parallel
sizes = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
RANKS.tensors = 2
for replica, RANKS.stage, RANKS.copy, RANKS.tensor in product(range(2), repeat=4):
    given = parallel(data_parallel_index=replica, **sizes)
    model = connector("worker", produces=True, sizes=given)._worker._model
    place = model.place
    print(model.worker, model.offers, place.rank, place.stage, place.copy, place.layers)
print(model.num_heads, connector("worker", produces=True, use_mla=True)._worker._model.num_heads)
"""
    lines = python(code).stdout.splitlines()
    assert lines.pop() == "2 1"
    assert lines == [
        f"{number} {not copy} {rank} {stage} {copy} {(stage, stage + 1)}"
        for number, (_, stage, copy, rank) in enumerate(product(range(2), repeat=4))
    ]


@WITHOUT_VLLM
def test_metrics_are_of_the_engine_that_sent_them() -> None:
    code = """
from tests.vllm.connected import KvplanConnector, Metric
from kvplan.vllm.step import Figures
from kvplan.status import LLMException
from kvplan.serving import PullResult
figures = Figures()
for tokens, nbytes, pushed in ((70, 4096, 64), (30, 1024, 0)):
    figures.ended(PullResult("d", None, [], 0, tokens, nbytes, 2000.0, 500.0, pushed))
figures.ended(PullResult("d", LLMException("gone"), [], 0))
for name, number in (("offered", 3), ("freed", 2), ("expired", 1)):
    figures.count(name, number)
metrics = KvplanConnector.build_prom_metrics(None, {}, ["engine"], {0: ["a"], 1: ["b"]})
metrics.observe(figures.data, 1)
for name, metric in sorted(Metric.made.items()):
    print(name, metric.labelnames, metric.values)
"""
    both = "['engine'] {{('a',): 0, ('b',): {}}}"
    assert python(code).stdout.splitlines() == [
        "bytes_fetched " + both.format(5120),
        "requests_expired " + both.format(1),
        "requests_failed ['engine', 'reason'] {('b', 'failed'): 1}",
        "requests_fetched " + both.format(2),
        "requests_freed " + both.format(2),
        "requests_offered " + both.format(3),
        "tokens_fetched " + both.format(100),
        "tokens_pushed " + both.format(64),
        "transfer_seconds " + both.format(1.0),
        "wait_seconds " + both.format(4.0),
    ]
