"""Another process, which runs what a test sends to it; as a program, this is that process.

A room's peer is a module with `names(*arguments)`: the names that what is sent can use. Between two
commands no Python runs in the peer: it sits in a read. Whatever it writes to stdout or stderr is in
the exception if it dies, else it is written to stderr when the peer is closed.
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

DEADLINE_S = 120.0  # only a hanging test reaches it
PATIENCE_MS = 10_000  # of links and operations that have no timeout of their own

EXECUTE_ANOTHER_PROGRAM = """
    import os, sys
    program = (
        "from multiprocessing.connection import Connection; tests = Connection(0);"
        "tests.send((True, 'another')); tests.poll(None)"
    )
    os.execv(sys.executable, [sys.executable, "-c", program])
"""
"""What a peer can run: its process goes on with a program that answers "another"."""


class RemoteError(Exception):
    """An exception in the peer, whose text is the traceback there."""

    def __init__(self, kind: str, message: str, code: int, status: int, text: str) -> None:
        super().__init__(text)
        self.kind, self.message, self.code, self.status = kind, message, code, status


class PeerDiedError(Exception):
    """The process has ended, or was ended since it did not answer."""


class Peer:
    """A process that has the names of `module`, and runs snippets of Python.

    Args:
        arguments: of the module's `names`.
        prefix: a command that starts the process (unshare, say).
        environment: of the process, if not that of this one.
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
        """As the process itself knows it: with a prefix, `process` may be another."""
        asked = "import os; result = os.getpid()"
        return int(self.run(asked)) if self._prefix else self.process.pid

    def run(self, *code: str, **values: object) -> Any:
        """Execute the snippets there, with `values` as names; returns their `result`."""
        self.send(*code, **values)
        return self.answer()

    def send(self, *code: str, **values: object) -> None:
        """As `run`, without waiting: `answer` must follow."""
        try:
            self._connection.send(("\n".join(map(dedent, code)), values))
        except ConnectionError:
            raise self._died() from None

    def answer(self, timeout_s: float = DEADLINE_S) -> Any:
        """The `result` of what was sent.

        Raises:
            RemoteError: it raised that.
            PeerDiedError: there is no answer, and will be none.
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
        """SIGSTOP; on return it has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def retire(self, *code: str) -> bool:
        """Run what ends the work of a test there, and forget all names that it has made.

        Returns:
            Whether another test may use the process: it has no thread more than at first. Else it
            is closed.
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
        """End it at once; on return it is dead, and a zombie until `close`."""
        self.dead = True
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def finish(self) -> None:
        """Let it end by itself, as it does when nothing can be sent any more, and close it."""
        self._connection.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.close()

    def close(self) -> None:
        """End it, if it has not ended; nothing of it is left."""
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
        """End it in a way that writes where it is."""
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
    """Execute snippet after snippet, until nobody can send another."""
    first, threads = dict(names), threading.active_count()

    def forget_all() -> bool:
        """Delete what was made here; returns whether nothing of it runs."""
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
    """What a `RemoteError` is made of."""
    code, status = (getattr(error, name, 0) for name in ("code", "status"))
    text = "".join(traceback.format_exception(error))
    return type(error).__name__, str(error), code, status, text


def be_patient(*surfaces: type) -> None:
    """Raise the default timeouts of links and operations to PATIENCE_MS; heartbeats have more.

    The defaults are for serving: a loaded machine takes longer than a second for a link now and
    then. A test that waits for a timeout, or finalizes what never ends, gives one of its own.

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
    """The process of a peer, whose stdin is the connection to the tests."""
    faulthandler.enable()
    names = importlib.import_module(module).names(*arguments) if module else {}
    for surface in (("kvplan.engine.datadist", "LlmDataDist"), ("kvplan.hixl.hixl", "Hixl")):
        if imported := sys.modules.get(surface[0]):
            be_patient(getattr(imported, surface[1]))
    gc.freeze()  # what was imported is no garbage of a test
    serve(Connection(0), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
