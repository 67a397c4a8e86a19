"""A table lists the transports; "auto" takes those that work on this machine."""

from __future__ import annotations

import resource
import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.choice import TRANSPORTS, TransportOptions, make_transports
from kvplan.transport.ucx.library import Found, why_no_rdma
from tests.support.refusals import refused


def names_made(choice: str, settings: str = "") -> list[str]:
    made = make_transports(choice, TransportOptions(ucx_settings=settings)).made
    for transport in made:
        transport.close()
    return [item.name for item in made]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["local", "ucx", "tcp"]),
        ("local", ["local"]),
        ("ucx", ["ucx"]),
        ("tcp", ["tcp"]),
    ],
)
@pytest.mark.usefixtures("ucx")
def test_auto_makes_the_transports_that_work_here(choice: str, names: list[str]) -> None:
    assert names_made(choice, '{"UCX_TLS": "shm"}') == names


@pytest.mark.usefixtures("ucx")
def test_without_rdma_ucx_is_not_even_loaded(ucx: Found) -> None:
    if not why_no_rdma(ucx.path):
        pytest.skip("RDMA is here")
    script = """
        from kvplan.transport.choice import make_transports
        made = [transport.name for transport in make_transports().made]
        print(made, "libucp" in open("/proc/self/maps").read())
        """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['local', 'tcp'] False\n"
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, r"no RDMA device|built without verbs"):
        make_transports("ucx")


def test_without_ucx_the_other_transports_are_made() -> None:
    assert names_made("auto") == ["local", "tcp"]


def test_each_row_makes_the_transport_of_its_name() -> None:
    transport = TRANSPORTS["local"](TransportOptions())
    assert transport.name == "local"
    transport.close()


def test_hccl_needs_a_device() -> None:
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "hccl: no Ascend device was found"):
        make_transports("hccl")


@pytest.mark.parametrize("choice", ["", "rdma", "Local", "local,auto"])
def test_an_unknown_name_is_refused(choice: str) -> None:
    with refused(
        LLMStatusCode.LLM_PARAM_INVALID, "must be one of auto, hccl, local, ucx, tcp"
    ) as caught:
        make_transports(choice)
    assert repr(choice) in str(caught.value)


@pytest.mark.parametrize("choice", [None, 1, ["local"]])
def test_a_name_is_a_str(choice: Any) -> None:
    with pytest.raises(TypeError, match="transport="):
        make_transports(choice)


def test_without_a_working_transport_the_error_has_the_reason() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(LLMException, match=r"local: .*Too many open files") as caught:
            make_transports("local")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize(
    ("choice", "why"),
    [("auto", "no UCX library"), ("local", "kvplan.transport=local leaves it out")],
)
def test_the_reason_for_a_missing_transport_is_kept_for_peers_that_have_it(
    choice: str, why: str
) -> None:
    made, missing = make_transports(choice)
    assert missing.keys() == {"hccl", "ucx", "tcp"} - {item.name for item in made}
    assert why in missing["ucx"]
    for transport in made:
        transport.close()
