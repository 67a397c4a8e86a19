"""Forked children, and processes that end while everything is in use, in new interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

PRELUDE = """
import gc, os
from kvnative._acl import AclError, AclLibrary
from kvnative._backend import NativeError
from kvnative._backend import KVN_OK
from kvnative._executor import Executor
from tests.ascend.acl_cases import BATCH_ASYNC, between
from tests.ascend.simulator import controls, found
with found():
    library = AclLibrary.load()
device = library.device(2)
case = between(device, controls(), "host_to_device", [100] * 5)
executor = Executor(device.backend("host_to_device"))
buffer = device.allocate(10)

def refused_after_fork(*uses):
    for use in uses:
        try:
            use()
        except NativeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("no error")

def fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run(script: str, folder: Path) -> list[dict[str, Any]]:
    """Run a script that must succeed; return the leaks that the simulator logs at its end."""
    log = folder / "log"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(script)],
        env={**os.environ, "KVSIM_LOG": str(log)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["call"] == "leaks"]


def test_calls_in_a_forked_child_are_refused_and_harmless(tmp_path: Path) -> None:
    run(
        """
        pinned = case.sides[0].owners[0]
        def child():
            global buffer, case, executor, device, pinned
            refused_after_fork(
                lambda: device.allocate(1),
                lambda: device.locate(buffer.address),
                lambda: device.write(buffer.address, bytes(10)),
                lambda: device.backend("device_to_host"),
                lambda: library.device_count(),
                lambda: library.device(2),
                lambda: executor.run(case.descriptors),
            )
            pinned.close()
            del buffer, case, executor, pinned
            device.close()
            del device
            gc.collect()
        fork(child)
        device.write(buffer.address, bytes(10))
        assert executor.run(case.descriptors).status == KVN_OK
        case.assert_moved()
        """,
        tmp_path,
    )


def test_a_child_forked_during_a_transfer_changes_nothing(tmp_path: Path) -> None:
    run(
        """
        executor.run(case.descriptors)
        controls().add_fault(f"{BATCH_ASYNC}:1=hang", "aclrtMemcpyAsync:1=hang")
        task = executor.submit(case.descriptors)
        def child():
            global task
            refused_after_fork(lambda: task.wait(1), task.cancel)
            del task
            gc.collect()
        fork(child)
        assert task.cancel().message.startswith("cancelled: 0 of 500 bytes were moved")
        """,
        tmp_path,
    )


def test_a_process_ends_while_everything_is_in_use(tmp_path: Path) -> None:
    """Threads of kvplan and a stream that hangs must not delay the end of a process."""
    run(
        """
        executor.run(case.descriptors)
        controls().add_fault(f"{BATCH_ASYNC}:1=hang", "aclrtMemcpyAsync:1=hang")
        task = executor.submit(case.descriptors)
        """,
        tmp_path,
    )


def test_the_library_is_finalized_after_the_last_release(tmp_path: Path) -> None:
    leaks = run(
        """
        try:
            library.finalize()
        except NativeError as error:
            assert str(error) == "devices [2] are still in use", error
        del buffer, executor, case, device
        gc.collect()
        library.finalize()
        library.finalize()
        assert library.device_count() == 8  # begins again
        """,
        tmp_path,
    )
    counts = {key: value for key, value in leaks[0].items() if key in ("streams", "pinned")}
    assert counts == {"streams": 0, "pinned": 0}
    assert leaks[0]["device_bytes"] == leaks[0]["registered"] == 0


def test_a_library_that_the_program_initialized_is_not_finalized(tmp_path: Path) -> None:
    run(
        """
        import ctypes
        acl = ctypes.CDLL(library.path)
        assert acl.aclInit(None) == 100002  # ours was first; another's later one is refused
        del buffer, executor, case, device
        gc.collect()
        library.finalize()
        assert acl.aclInit(None) == 0
        again = library.device(1)  # 100002 is fine
        del again
        gc.collect()
        library.finalize()  # not ours to finalize
        assert acl.aclFinalize() == 0
        """,
        tmp_path,
    )
