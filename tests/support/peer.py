"""Another process, which runs snippets of a test. This file is also the program of that process.

A room's peer has a module with `names(*arguments)`, which returns the names that snippets can use.
Between two snippets no Python runs in the peer: it waits in a read. If the peer dies, the exception
has its output; otherwise the output is written to stderr when the peer is closed.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from textwrap import dedent
from types import FunctionType
from typing import Any

from tests.support import zygote
from tests.support.zygote import ROOT

DEADLINE_S = 120.0  # reached only by a hanging test
PATIENCE_MS = 10_000  # timeout of links and operations without one of their own

EXECUTE_ANOTHER_PROGRAM = """
    import os, sys
    program = (
        "from multiprocessing.connection import Connection; tests = Connection(0);"
        "tests.send((True, 'another')); tests.poll(None)"
    )
    os.execv(sys.executable, [sys.executable, "-c", program])
"""
"""A snippet that replaces the peer's program by one that answers "another"."""


class RemoteError(Exception):
    """An exception in the peer. The text is the traceback there."""

    def __init__(self, kind: str, message: str, code: int, status: int, text: str) -> None:
        super().__init__(text)
        self.kind, self.message, self.code, self.status = kind, message, code, status


class PeerDiedError(Exception):
    """The process has ended, or was killed because it did not answer."""


class Peer:
    """A process that runs snippets of Python with the names of `module`.

    Args:
        arguments: arguments of the module's `names`.
        prefix: a command that starts the process, such as unshare.
        environment: variables of the process; None: those of this one.
    """

    module = ""
    flags: Sequence[str] = ()

    def __init__(
        self,
        *arguments: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.dead, self._prefix = False, prefix
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = Pipe()
        own = dict(os.environ if environment is None else environment) | {"PYTHONPATH": str(ROOT)}
        try:
            self.process = self._started(arguments, own, theirs.fileno())
        except BaseException:
            self._connection.close()
            self._output.close()
            raise
        finally:
            theirs.close()

    def _started(
        self, arguments: Sequence[str], environment: dict[str, str], connection: int
    ) -> subprocess.Popen[bytes] | zygote.Forked:
        output, words = self._output.fileno(), (self.module, *arguments)
        if zygote.IS_USABLE and not self._prefix:
            imported = [self.module] if self.module else []
            descriptors = connection, output, output
            return zygote.fork(
                "tests.support.peer", words, imported, self.flags, environment, descriptors
            )
        return subprocess.Popen(
            [*self._prefix, sys.executable, *self.flags, "-m", "tests.support.peer", *words],
            stdin=connection,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environment,
        )

    @cached_property
    def pid(self) -> int:
        """The pid of the process that runs snippets; with a prefix, `process` may be another."""
        asked = "import os; result = os.getpid()"
        return int(self.run(asked)) if self._prefix else self.process.pid

    def run(self, *code: str, **values: object) -> Any:
        """Execute the snippets there, with `values` as names, and return their `result`."""
        self.send(*code, **values)
        return self.answer()

    def send(self, *code: str, **values: object) -> None:
        """Execute the snippets without waiting; call `answer` later."""
        try:
            self._connection.send(("\n".join(map(dedent, code)), values))
        except ConnectionError:
            raise self._died() from None

    def answer(self, timeout_s: float = DEADLINE_S) -> Any:
        """Return the `result` of the sent snippets.

        Raises:
            RemoteError: a snippet raised an exception.
            PeerDiedError: the peer will not answer.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise self._hangs(timeout_s)
            good, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None
        if not good:
            raise RemoteError(*value)
        return value

    def stop(self) -> None:
        """Stop the process by SIGSTOP, and wait until it has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def retire(self, *code: str) -> bool:
        """Run snippets that end the work of a test there, and forget all names of the test.

        Returns:
            True if another test may use the process, which then has no more threads than at first;
            False: it is closed.
        """
        is_reusable = False
        try:
            if not self.dead and self.process.poll() is None:
                self.resume()
                self.run(*code)
                is_reusable = bool(self.run("result = forget_all()"))
        finally:
            if not is_reusable:
                self.close()
        return is_reusable

    def kill(self) -> None:
        """Kill the process and wait for its death. It is a zombie until `close`."""
        self.dead = True
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def finish(self) -> None:
        """Close the connection, wait until the process ends by itself, and close the rest."""
        self._connection.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process if it has not ended, and release everything. Idempotent."""
        self.dead = True
        self.process.kill()
        self.process.wait()
        self._connection.close()
        if not self._output.closed:
            sys.stderr.write(self._written())
            self._output.close()

    def _died(self) -> PeerDiedError:
        self.dead = True
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        status = found.si_status if found else "unknown"
        how = "exited with" if found and found.si_code == os.CLD_EXITED else "was ended by signal"
        return PeerDiedError(f"process {self.process.pid} {how} {status}\n{self._written()}")

    def _hangs(self, timeout_s: float) -> PeerDiedError:
        """Abort the process, which writes its stack, and return the error."""
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(self.process.pid, number)
        return PeerDiedError(f"no answer within {timeout_s} s: {self._died()}")

    def _written(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")


class Remote:
    """An object of a peer: call its methods here, or `send` a call and take its `result` later."""

    def __init__(self, peer: Peer, name: str) -> None:
        self.peer, self._name = peer, name

    def send(self, method: str, *arguments: Any, **keywords: Any) -> None:
        self.peer.send(
            f"result = {self._name}.{method}(*arguments, **keywords)",
            arguments=arguments,
            keywords=keywords,
        )

    def result(self) -> Any:
        return self.peer.answer()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.send(method, *arguments, **keywords)
            return self.result()

        return call


def serve(tests: Connection, names: dict[str, Any]) -> None:
    """Execute one snippet after the other until the connection ends."""
    first, threads = dict(names), threading.active_count()

    def forget_all() -> bool:
        """Delete names that snippets have made; return True if they left no thread."""
        kept = {"result", "__builtins__"}
        for key in names.keys() - first.keys() - kept:
            del names[key]
        names.update(first)
        gc.collect()
        return threading.active_count() == threads

    first["forget_all"] = names["forget_all"] = forget_all
    while True:
        try:
            code, values = tests.recv()
        except EOFError:
            return
        names |= {"result": None, **values}
        try:
            exec(code, names)
            tests.send((True, names["result"]))
        except Exception as error:
            tests.send((False, described(error)))


def described(error: Exception) -> tuple[str, str, int, int, str]:
    """Return the arguments of the `RemoteError` for an exception."""
    code, status = (getattr(error, name, 0) for name in ("code", "status"))
    text = "".join(traceback.format_exception(error))
    return type(error).__name__, str(error), code, status, text


def be_patient(*surfaces: type) -> None:
    """Raise the default timeouts of links and operations to PATIENCE_MS, and that of heartbeats.

    The defaults are for serving; a loaded machine sometimes takes longer than a second for a link.
    A test that waits for a timeout, or finalizes what never ends, gives its own timeout.

    Args:
        surfaces: classes whose methods have a default timeout of a second.
    """
    from kvplan.engine.options import Options

    defaults = Options.__init__.__kwdefaults__ or {}
    defaults.update(sync_kv_cache_wait_time=PATIENCE_MS, heartbeat_timeout_ms=3 * PATIENCE_MS)
    for surface in surfaces:
        for member in vars(surface).values():
            method = inspect.unwrap(member) if callable(member) else member
            if isinstance(method, FunctionType) and method.__defaults__:
                patient = (PATIENCE_MS if item == 1000 else item for item in method.__defaults__)
                method.__defaults__ = tuple(patient)


def main(module: str, *arguments: str) -> None:
    """Be the process of a peer, with the connection to the tests as stdin."""
    faulthandler.enable()
    names = importlib.import_module(module).names(*arguments) if module else {}
    for surface in (("kvplan.engine.datadist", "LlmDataDist"), ("kvplan.hixl.hixl", "Hixl")):
        if imported := sys.modules.get(surface[0]):
            be_patient(getattr(imported, surface[1]))
    gc.freeze()  # imported objects are not garbage of a test
    serve(Connection(0), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
