"""Forked children and interpreter exit: a clear error, never a hang, never a crash."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import multiprocessing, os, sys
import numpy as np
from kvnative._backend import *
from kvnative._executor import Executor
from kvnative._layered import *
from kvnative._task import *
from kvnative._process import process_backend
from tests.native.scatter import scatter
from tests.support.wrappers import *

pool = ThreadPool(2)
executor = Executor(host_backend(pool))
slow = Executor(limit_bandwidth(host_backend(pool), 1e6))
case = scatter([1 << 20] * 8)

def refused_after_fork(call):
    try:
        call()
    except NativeError as error:
        assert str(os.getppid()) in str(error) and str(os.getpid()) in str(error), error
        return True
    return False

def in_child(work):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
"""


def run(script: str) -> str:
    """Run a script in another interpreter, which must succeed soon."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_forked_child_is_refused_everything_of_its_parents() -> None:
    run("""
        task = slow.submit(case.descriptors)
        over = executor.submit(case.descriptors)
        over.wait()
        def child():
            assert refused_after_fork(lambda: executor.run(case.descriptors))
            assert refused_after_fork(lambda: executor.submit(case.descriptors))
            assert refused_after_fork(lambda: executor.__enter__())
            assert refused_after_fork(lambda: Executor(executor.backend))
            assert refused_after_fork(lambda: host_backend(pool))  # none of its threads is there
            assert refused_after_fork(lambda: process_backend(pool, os.getppid(), "get"))
            assert refused_after_fork(lambda: fail_at(executor.backend, 1))
            for call in (task.wait, task.cancel, lambda: task.done, lambda: task.report):
                assert refused_after_fork(call)
            assert over.report.status == KVN_OK
            executor.close()
            slow.close()
        in_child(child)
        assert task.cancel().status == KVN_CANCELLED
        assert executor.run(case.descriptors).status == KVN_OK
        """)


def test_a_forked_child_has_no_part_in_its_parents_layers() -> None:
    run("""
        task = executor.layered(case.descriptors, 3)
        over = executor.layered(case.descriptors, 8)
        over.open(0), over.wait()
        task.open(0)
        def child():
            global task, over
            assert refused_after_fork(lambda: executor.layered(case.descriptors, 3))
            for call in (lambda: task.open(1), task.wait, task.cancel, task.states,
                         lambda: task.sealed, lambda: task.done, lambda: task.report):
                assert refused_after_fork(call)
            assert over.report.status == KVN_OK and over.sealed and not over.open(0)
            executor.close()
            del task, over
        in_child(child)
        assert task.open(1) and task.open(2)
        assert task.wait().status == KVN_OK
        case.assert_moved()
        """)


def test_a_child_forked_while_threads_open_layers_ends_well() -> None:
    run("""
        import threading
        tasks = [executor.layered(case.descriptors, 1) for _ in range(20)]
        def open_all():
            for layer in range(8):
                for task in tasks:
                    task.open(layer)
        threads = [threading.Thread(target=open_all) for _ in range(3)]
        for thread in threads:
            thread.start()
        held = slow.layered(case.descriptors, 1)
        def child():
            global tasks, held
            assert refused_after_fork(held.wait)
            del tasks, held
        for _ in range(10):
            in_child(child)
        for thread in threads:
            thread.join()
        for task in tasks:
            assert task.wait().status == KVN_OK
        case.assert_moved()
        """)


def test_a_forked_child_makes_its_own() -> None:
    run("""
        def child():
            own = Executor(host_backend(ThreadPool(2)))
            mine = scatter([1 << 20] * 8, seed=1)
            assert own.run(mine.descriptors).status == KVN_OK
            mine.assert_moved()
        in_child(child)
        """)


def test_a_child_forked_during_transfers_ends_well() -> None:
    run("""
        held = slow.submit(case.descriptors)  # the others may be through before the fork
        for _ in range(20):
            tasks = [executor.submit(case.descriptors) for _ in range(10)]
            def child():
                global held, tasks, executor, slow, pool
                assert refused_after_fork(lambda: held.wait())
                del held, tasks, executor, slow, pool
            in_child(child)
            for task in tasks:
                assert task.wait().status == KVN_OK
        assert held.cancel().status == KVN_CANCELLED
        """)


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)"])
def test_a_forked_child_may_exit_either_way(end: str) -> None:
    run(f"""
        task = slow.submit(case.descriptors)
        child = os.fork()
        if child == 0:
            {end}
        assert os.waitpid(child, 0)[1] == 0
        assert task.cancel().status == KVN_CANCELLED
        """)


@pytest.mark.parametrize("handles", ["tasks", "()"])
def test_an_interpreter_may_exit_with_tasks_in_flight(handles: str) -> None:
    run(f"""
        cases = [scatter([4 << 20] * 8, seed=seed) for seed in range(4)]
        tasks = [executor.submit(each.descriptors, keep=each) for each in cases]
        tasks.append(slow.submit(case.descriptors, keep=case))
        tasks.append(slow.layered(case.descriptors, 3, keep=case))
        tasks[-1].open(1)
        kept = {handles}
        del cases, case, tasks
        """)


def test_an_interpreter_may_exit_while_a_daemon_thread_waits() -> None:
    run("""
        import threading
        task = slow.submit(case.descriptors)
        layered = slow.layered(case.descriptors, 3)
        waiting = threading.Barrier(3)
        def wait(call):
            waiting.wait()
            call()
        for call in (lambda: slow.run(case.descriptors), layered.wait):
            threading.Thread(target=wait, args=(call,), daemon=True).start()
        waiting.wait()
        """)


def test_a_forked_child_reports_each_error_of_the_system() -> None:
    run("""
        import errno
        from textwrap import dedent
        from tests.support.rights import denying
        def child():
            exec(dedent(denying("process_vm_readv", error=error)), {})
            reader = Executor(process_backend(ThreadPool(1), os.getpid(), "get"))
            report = reader.run(scatter([100]).descriptors)
            assert (report.status, report.code) == (status, error), report
        for error, status in {
            errno.EPERM: KVN_DENIED, errno.ENOSYS: KVN_UNSUPPORTED, errno.ESRCH: KVN_PEER_GONE,
            errno.EFAULT: KVN_UNMAPPED, errno.ENOMEM: KVN_NO_MEMORY, errno.EIO: KVN_FAILED,
        }.items():
            in_child(child)
    """)
