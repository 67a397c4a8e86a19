"""Which transports there are is a table; "auto" takes what works here."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.choice import TRANSPORTS, TransportOptions, make_transports


def names_made(choice: str) -> list[str]:
    made = make_transports(choice).made
    for transport in made:
        transport.close()
    return [it.name for it in made]


@pytest.mark.parametrize(
    ("choice", "names"), [("auto", ["local", "ucx"]), ("local", ["local"]), ("ucx", ["ucx"])]
)
@pytest.mark.usefixtures("ucx")
def test_what_works_here_is_made(choice: str, names: list[str]) -> None:
    assert names_made(choice) == names


@pytest.mark.parametrize("choice", ["auto", "local"])
def test_where_there_is_no_ucx_the_others_are_made(choice: str) -> None:
    assert names_made(choice) == ["local"]


def test_a_row_has_the_name_of_what_it_makes() -> None:
    transport = TRANSPORTS["local"](TransportOptions())
    assert transport.name == "local"
    transport.close()


def test_what_needs_a_device_does_not_work_without() -> None:
    with pytest.raises(LLMException, match="hccl: there is no accelerator") as refused:
        make_transports("hccl")
    assert refused.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize("choice", ["", "rdma", "Local", "local,auto"])
def test_an_unknown_name(choice: str) -> None:
    with pytest.raises(LLMException, match="must be one of auto, hccl, local, ucx") as refused:
        make_transports(choice)
    assert refused.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert repr(choice) in str(refused.value)


@pytest.mark.parametrize("choice", [None, 1, ["local"]])
def test_a_name_is_a_str(choice: Any) -> None:
    with pytest.raises(TypeError, match="transport="):
        make_transports(choice)


@pytest.mark.parametrize("choice", ["auto", "local"])
def test_where_none_works_the_reason_is_told(choice: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(LLMException, match=r"local: .*Too many open files") as refused:
            make_transports(choice)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize(
    ("choice", "why"),
    [("auto", "no UCX library"), ("local", "kvplan.transport=local leaves it out")],
)
def test_why_a_transport_is_missing_is_kept_for_peers_that_have_it(choice: str, why: str) -> None:
    made, missing = make_transports(choice)
    assert missing.keys() == {"hccl", "ucx"}
    assert why in missing["ucx"]
    for transport in made:
        transport.close()
