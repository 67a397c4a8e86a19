"""The harness of all tests that need another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from textwrap import dedent
from typing import Any

import pytest

from tests.support import zygote
from tests.support.held import Held
from tests.support.peer import (
    EXECUTE_ANOTHER_PROGRAM,
    ROOT,
    Peer,
    PeerDiedError,
    Remote,
    RemoteError,
)

AT_IMPORT = os.environ.get("KVPLAN_TEST_IP", "none")


def names() -> dict[str, Any]:
    """Return the value that a variable had when the peer imported this module."""
    return {"at_import": AT_IMPORT}


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_a_snippet_has_values_and_a_result(peer: Peer) -> None:
    peer.run("import math", "def area(radius): return math.pi * radius**2")
    assert peer.run("result = area(radius), name", radius=0, name=b"any") == (0, b"any")
    assert peer.run("name") is None
    peer.send("result = name * 2")
    assert peer.answer() == b"anyany"
    assert peer.run("import os; result = os.getpid()") == peer.pid


def test_a_peer_may_be_started_by_another_command() -> None:
    peer = Peer(prefix=["sh", "-c", '"$@"; exit', "sh"])
    assert peer.pid != peer.process.pid
    peer.finish()


def test_methods_of_an_object_of_the_peer_are_called(peer: Peer) -> None:
    peer.run("numbers = [3, 1]")
    numbers = Remote(peer, "numbers")
    numbers.append(2)
    numbers.send("sort", reverse=True)
    assert numbers.result() is None
    assert numbers.pop() == 1
    with pytest.raises(RemoteError) as failure:
        numbers.index(7)
    assert (failure.value.kind, failure.value.message) == ("ValueError", "7 is not in list")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("raise OSError(2, 'no file')", "FileNotFoundError", "[Errno 2] no file"),
        ("1 +", "SyntaxError", "invalid syntax (<string>, line 1)"),
        ("result = lambda: None", "PicklingError", "<lambda>"),
    ],
)
def test_an_exception_is_raised_here_and_the_peer_continues(
    peer: Peer, code: str, kind: str, message: str
) -> None:
    with pytest.raises(RemoteError, match="Traceback") as failure:
        peer.run(code)
    assert failure.value.kind == kind
    assert message in failure.value.message
    assert peer.run("result = 1") == 1


def test_attributes_of_an_exception_survive(peer: Peer) -> None:
    with pytest.raises(RemoteError) as failure:
        peer.run("error = ValueError()", "error.code, error.status = 5, 7", "raise error")
    assert (failure.value.code, failure.value.status) == (5, 7)


def test_an_exit_in_a_snippet_is_an_error(peer: Peer) -> None:
    with pytest.raises(PeerDiedError, match="exited with 3\nlast words"):
        peer.run("import os; os.write(2, b'last words'); os._exit(3)")
    assert peer.dead
    with pytest.raises(PeerDiedError):
        peer.run("pass")


def test_a_killed_peer_is_an_error(peer: Peer) -> None:
    peer.stop()
    peer.send("pass")
    peer.kill()
    assert peer.dead
    with pytest.raises(PeerDiedError, match=f"was ended by signal {signal.SIGKILL:d}"):
        peer.answer()


def test_a_peer_that_cannot_start_is_an_error() -> None:
    class Absent(Peer):
        module = "tests.support.absent"

    peer = Absent()
    with pytest.raises(PeerDiedError, match=r"No module named 'tests\.support\.absent'"):
        peer.answer()
    peer.close()


def test_a_peer_that_never_answers_is_ended_and_says_where_it_was(peer: Peer) -> None:
    peer.run("def wait_for_ever():\n    import signal; signal.pause()")
    peer.send("wait_for_ever()")
    with pytest.raises(PeerDiedError, match=r"no answer within 0.1 s(.|\n)* in wait_for_ever"):
        peer.answer(0.1)
    assert peer.dead


def test_a_stopped_peer_is_ended_too(peer: Peer) -> None:
    peer.run("pass")  # waits until it has started
    peer.stop()
    peer.send("pass")
    with pytest.raises(PeerDiedError, match=r"no answer within 0 s"):
        peer.answer(0)


def test_a_peer_can_execute_another_program(peer: Peer) -> None:
    assert peer.run(EXECUTE_ANOTHER_PROGRAM) == "another"


@pytest.mark.parametrize("end", [Peer.close, Peer.finish])
def test_an_ended_peer_leaves_nothing(
    end: Callable[[Peer], None], capfd: pytest.CaptureFixture[str]
) -> None:
    before = Held.now()
    peer = Peer()
    peer.run("print('a line', flush=True)")
    end(peer)
    before.check_nothing_new()
    assert capfd.readouterr().err == "a line\n"
    with pytest.raises(ProcessLookupError):
        os.kill(peer.process.pid, 0)


class Reader(Peer):
    """A peer whose module reads a variable while it is imported."""

    module = "tests.support.test_peer"

    def found(self) -> list[str]:
        code = "import os", "result = [at_import, os.environ.get('LATE', 'none')]"
        return list(self.run(*code))


def test_a_peer_has_the_variables_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPLAN_TEST_IP", raising=False)
    plain = dict(os.environ)
    for variables, found in (
        ({}, ["none", "none"]),
        ({"LATE": "1"}, ["none", "1"]),
        ({"LATE": "2", "KVPLAN_TEST_IP": "127.0.0.2"}, ["127.0.0.2", "2"]),
        ({}, ["none", "none"]),
    ):
        with closing(Reader(environment=plain | variables)) as peer:
            assert peer.found() == found
    monkeypatch.setenv("LATE", "3")
    with closing(Reader()) as peer:
        assert peer.found() == ["none", "3"]


def test_there_may_be_more_environments_than_zygotes() -> None:
    for number in [*range(zygote.MAX_ZYGOTES + 1)] * 2:
        environment = os.environ | {"KVPLAN_TEST_ANY": str(number)}
        with closing(Peer(environment=environment)) as peer:
            code = "import os; result = os.environ['KVPLAN_TEST_ANY']"
            assert peer.run(code) == str(number)


def test_peers_have_different_addresses() -> None:
    code = "import numpy; array = numpy.ones(1 << 20); result = array.ctypes.data"
    with closing(Peer()) as one, closing(Peer()) as other:
        assert one.run(code) != other.run(code)


def test_several_threads_have_peers() -> None:
    def pids() -> tuple[int, int]:
        with closing(Peer()) as peer:
            return peer.run("import os; result = os.getpid(), os.getppid()")

    with ThreadPoolExecutor(4) as pool:
        found = [task.result() for task in [pool.submit(pids) for _ in range(8)]]
    assert len({pid for pid, _ in found}) == 8
    assert {parent for _, parent in found} == {os.getpid()}


def test_nothing_outlives_the_tests() -> None:
    program = """
        import os, signal
        from tests.support.peer import Peer
        print(Peer().run("result = 'ran'"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    # Its output ends when the last process that has the descriptor ends.
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"ran\n")
