"""The command line of the proxy, and the order of its servers."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("aiohttp")  # the extra `test` has it; vLLM brings it to users


from kvplan.vllm.proxy import Servers, arguments, main


def test_without_aiohttp_the_proxy_names_the_installation() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; import kvplan.vllm.proxy"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: kvplan.vllm.proxy needs aiohttp" in run.stderr


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8100", "ftp://a", "http://a/v1", "http://a:65536", "http://a:0", "http://[a"],
)
def test_an_invalid_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--prefill", url, "--decode", "http://a:1"])
    assert "must be like http://127.0.0.1:8100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        *((("--port", text), "in [0, 65535]") for text in ("-1", "65536")),
        *((("--prefill-timeout", text), "> 0 and finite") for text in ("0", "-1", "nan", "inf")),
    ],
)
def test_a_number_out_of_range_is_refused(
    option: tuple[str, str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(["--prefill", "http://a:65535", "--decode", "http://a:1", *option])
    assert f"must be {allowed}" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = ["--prefill", "http://a:1", "--decode", "http://a:2", "--port", str(port)]
        monkeypatch.setattr(sys, "argv", ["proxy", *given])
        assert main() == 1
    assert f"cannot serve at 127.0.0.1:{port}: " in caplog.text


def test_a_server_that_failed_is_asked_last_for_a_while() -> None:
    now = 0.0
    servers = Servers(["a", "b"], lambda: now)
    servers.failed("a")
    assert [list(servers.turn()) for _ in range(2)] == [["b", "a"]] * 2
    now = 60.0
    assert [list(servers.turn()) for _ in range(2)] == [["a", "b"], ["b", "a"]]
