"""Spans of OpenTelemetry, by option: one for each transfer, whatever its outcome."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvplan import (
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from tests.support.refusals import refused

DESC = CacheDesc(2, (64, 16), DataType.DT_FLOAT)
EXPORTED = InMemorySpanExporter()


class Failing(SpanProcessor):
    """A span processor of a program that raises on demand."""

    when = ""

    def on_start(self, span, parent_context=None):
        assert self.when != "start"

    def on_end(self, span):
        assert self.when != "end"


FAILING = Failing()


@pytest.fixture(scope="module", autouse=True)
def _provider():
    """The tracer provider of the program, which can be set once per process."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    provider.add_span_processor(FAILING)
    trace.set_tracer_provider(provider)


@pytest.fixture
def spans():
    EXPORTED.clear()
    return EXPORTED.get_finished_spans


@pytest.fixture
def traced(peer):
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.opentelemetry": "1"})
        engine.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
        yield engine


def test_a_transfer_is_a_child_span_of_the_callers_span(traced, peer, spans):
    cache_id = peer.run(
        "it = datadist.allocate_blocks_cache(desc); result = it.cache_id", desc=DESC
    )
    there, here = CacheIndex(1, cache_id), traced.allocate_blocks_cache(DESC)
    with trace.get_tracer("program").start_as_current_span("request") as request:
        traced.pull_blocks(there, here, [1, 5], [2, 3], tag="request 7")
        task = traced.submit(Transfer(Rows(here, [1]), Rows(there, [2])))
        traced.plan(Transfer(Rows(there, [1]), Rows(here, [2])))  # moves nothing
    task.wait()
    traced.copy_blocks(here, {1: [2]})
    traced.notify(1, b"hello")
    parent, *others = sorted(spans(), key=lambda span: span.start_time)
    assert parent.name == "request"
    pull, push, copy = others
    for item in (pull, push):
        assert item.parent.span_id == request.get_span_context().span_id
        assert item.context.trace_id == parent.context.trace_id
    assert copy.parent is None
    assert pull.name == "kvplan.pull_blocks"
    assert dict(pull.attributes) == {
        "kvplan.operation": "pull_blocks",
        "kvplan.cluster": 2,
        "kvplan.tag": "request 7",
        "kvplan.peer": 1,
        "kvplan.cache": here.cache_id,
        "kvplan.bytes": 2 * 2 * DESC.stride,
        "kvplan.descriptors": 4,
        "kvplan.status": "LLM_SUCCESS",
    }
    assert pull.start_time < pull.end_time < push.end_time
    assert "kvplan.peer" not in copy.attributes


def test_a_failure_is_an_error_with_its_message(traced, spans):
    here = traced.allocate_blocks_cache(DESC)
    with refused("LLM_PARAM_INVALID"):
        traced.copy_blocks(here, {64: [2]})
    (span,) = spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "64 is out of range" in span.status.description
    assert span.attributes["kvplan.status"] == "LLM_PARAM_INVALID"


@pytest.mark.parametrize(("when", "message"), [("start", "begin"), ("end", "end")])
def test_a_failure_of_tracing_does_not_fail_the_transfer(traced, spans, caplog, when, message):
    here = traced.allocate_blocks_cache(DESC)
    FAILING.when = when
    try:
        traced.copy_blocks(here, {1: [2]})
    finally:
        FAILING.when = ""
    assert f"could not {message} a span" in caplog.text
    assert traced.metrics()["operations"]["copy_blocks"]["statuses"] == {"LLM_SUCCESS": 1}


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from kvplan import LlmDataDist, LLMException, LlmRole
with LlmDataDist(1, LlmRole.MIX) as engine:
    engine.initialize()  # imports none of it
    engine.finalize()
    try:
        engine.initialize({"kvplan.opentelemetry": "1"})
    except LLMException as error:
        print(error)
"""


def test_without_the_package_the_error_names_the_extra():
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "opentelemetry-api (pip install 'kvplan[otel]')" in done.stdout
    assert "(LLM_FEATURE_NOT_ENABLED)" in done.stdout
