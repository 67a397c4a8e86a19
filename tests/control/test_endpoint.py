import pytest

from kvplan.control.endpoint import Endpoint
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("text", "endpoint", "loopback"),
    [
        ("127.0.0.1:26000", Endpoint("127.0.0.1", 26000), True),
        ("127.9.9.9:1", Endpoint("127.9.9.9", 1), True),
        ("[::1]:26000", Endpoint("::1", 26000), True),
        ("[fe80::1%eth0]:65535", Endpoint("fe80::1%eth0", 65535), False),
        ("0.0.0.0:0", Endpoint("0.0.0.0", 0), False),
        ("node-7.cluster:80", Endpoint("node-7.cluster", 80), False),
        ("localhost:0", Endpoint("localhost", 0), True),
        ("ipc:///run/kvplan.sock", Endpoint(path="/run/kvplan.sock"), True),
    ],
)
def test_endpoints_are_parsed_and_printed(text: str, endpoint: Endpoint, loopback: bool) -> None:
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == text
    assert endpoint.is_loopback is loopback


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:65536",
        "host:-1",
        "host:1 ",
        "host:²",
        "host:000001",
        "::1:80",
        "[::1]",
        "[::1:80",
        "[host]:80",
        "ho st:80",
        "host/path:80",
        "tcp://host:80",
        "ipc://relative",
        "ipc://",
        "ipc:///" + "x" * 107,
        "ipc:///a\0b",
        "ipc:///a\udcff",
    ],
)
def test_text_that_is_not_an_endpoint_is_refused_and_shown(text: str) -> None:
    with refused("LLM_PARAM_INVALID", "endpoint="):
        Endpoint.parse(text)


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="endpoint=26000 must be str"):
        Endpoint.parse(26000)
