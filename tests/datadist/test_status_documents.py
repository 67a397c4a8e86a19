"""The documents that programs send to readers of their status: sizes, texts, other programs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep

import pytest

from kvplan import LlmDataDist, LlmRole
from kvplan.control.loop import ControlLoop
from kvplan.control.status_socket import Answer, StatusSocket, _read
from tests.datadist.test_status_socket import statuses_of
from tests.support.peer import DEADLINE_S


def answer_of(talk: Callable[[socket.socket], None], timeout_s: float) -> Answer | None:
    """Return what is read from a program that answers by `talk`."""
    name = f"kvplan-status-{os.geteuid()}-{os.getpid()}-9-impostor"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as program:
        listener.bind(f"\0{name}")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                talk(connection)

        serving = program.submit(serve)
        answer = _read(name, timeout_s)
        serving.result()
    return answer


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"[" * 100_000, "while deserializing"),
        (b'{"schema_version": NaN}', "malformed"),
        (b"\xff", "malformed"),
        (b"", "no answer"),
        (b"[]", "another version"),
        (b" ", "no answer within 0.1 s"),  # repeatedly, but never the end of the document
    ],
)
def test_a_program_with_another_answer_is_refused_in_time(sent: bytes, error: str) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(sent)
        while sent == b" ":
            connection.sendall(sent)
            sleep(0.01)  # far less than the timeout of one read

    answer = answer_of(talk, timeout_s=0.1 if sent == b" " else DEADLINE_S)
    assert answer is not None
    assert (answer.pid, answer.document) == (os.getpid(), None)
    assert error in answer.error.lower()


@pytest.mark.parametrize(("surplus", "error"), [(0, ""), (1, "more than 16 MiB")])
def test_a_document_has_up_to_16_mib(surplus: int, error: str) -> None:
    document = b'{"schema_version": 1}'.ljust((16 << 20) + surplus)
    answer = answer_of(lambda connection: connection.sendall(document), DEADLINE_S)
    assert answer == (os.getpid(), None if error else {"schema_version": 1}, error)


def test_the_arguments_of_a_program_need_not_be_utf_8() -> None:
    control = ControlLoop()

    async def start() -> None:
        argument = os.fsdecode(b"mod\xe8le")
        StatusSocket(control, "arguments", lambda: {"command": ["serve", argument]}).start()

    control.start()
    with ExitStack() as opened:
        opened.callback(control.stop)
        control.run(start())
        answer = _read(f"kvplan-status-{os.geteuid()}-{os.getpid()}-arguments", DEADLINE_S)
    assert answer is not None
    assert answer.document == {"schema_version": 1, "command": ["serve", "mod?le"]}


def test_the_arguments_of_a_program_may_be_of_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [Path("serve"), 8])
    with LlmDataDist(3, LlmRole.MIX) as engine:
        engine.initialize()
        (document,) = statuses_of(os.getpid(), 3)
    assert document["command"] == ["serve", "8"]
