"""Opening UCX, which must not change the process: what is refused, and with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from kvnative._backend import KVN_UNSUPPORTED
from kvnative._ucx import UcxEnd, UcxError, UcxLibrary
from kvplan.transport.ucx.library import Found
from tests.transport.owner import ROOT

PRELUDE = """
import ctypes, os, sys
from kvnative._ucx import *

path = sys.argv[1]
"""


def run(script: str, *arguments: str) -> str:
    """What a script in an interpreter of its own prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + dedent(script), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_stays_as_it_was_but_for_the_threads_of_an_open_end(ucx: Found) -> None:
    """No handler of a signal, no patched libc, nothing in the environment, nothing printed."""
    script = """
        libc = ctypes.CDLL(None)

        def handler(number):
            action = ctypes.create_string_buffer(256)
            libc.sigaction(number, None, action)
            return action.raw[:8]

        def state():
            return {
                "signals": [handler(number) for number in range(1, 65)],
                "code": [ctypes.string_at(getattr(libc, name), 16) for name in
                         ("mmap", "munmap", "mremap", "madvise", "brk", "malloc", "shmat")],
                "environment": os.popen("env").read(),
            }

        def num_threads():
            return len(os.listdir("/proc/self/task"))

        before = state(), num_threads()
        library = UcxLibrary.load(path)
        assert (state(), num_threads()) == before
        end = UcxEnd(library, settings={"NET_DEVICES": "lo"})
        assert (state(), num_threads()) == (before[0], before[1] + 2)  # ours, UCX's to connect
        end.close()
        del end
        assert state() == before[0]
        """
    assert run(script, ucx.path) == ""


def test_an_interpreter_may_exit_with_an_end_open(ucx: Found) -> None:
    run('end = UcxEnd(UcxLibrary.load(path)); link = end.link(b"t" * 16)', ucx.path)


def test_a_forked_child_is_refused_and_only_forgets(ucx: Found) -> None:
    assert (
        run(
            """
            end = UcxEnd(UcxLibrary.load(path))
            link = end.link(b"t" * 16)
            child = os.fork()
            if not child:
                for call in (lambda: end.link(b"u" * 16), lambda: link.connect(1), link.close):
                    try:
                        call()
                    except Exception as error:
                        print(type(error).__name__, error, flush=True)
                end.close()
                del link, end
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            end.link(b"u" * 16)
            """,
            ucx.path,
        ).splitlines()
        == [
            "NativeError UCX does not work in a process forked from the one that opened it: start"
            " such processes with the method spawn"
        ]
        * 3
    )


def fake(folder: Path, code: str) -> str:
    """A library that pretends to be UCX's."""
    source = folder / "fake.c"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "fake.so", source], check=True)
    return str(folder / "fake.so")


VERSION = (
    "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) {{ *a = {}; *b = {}; *c = {}; }}"
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("int nothing;", "{path} is no libucp of UCX"),
        (VERSION.format(1, 12, 1), "{path} is UCX 1.12.1; it must be 1.13 or a later 1.x"),
        (VERSION.format(2, 0, 0), "{path} is UCX 2.0.0; it must be 1.13 or a later 1.x"),
        (VERSION.format(1, 13, 0), "{path} (UCX 1.13.0) lacks ucp_config_read"),
    ],
)
def test_what_is_no_ucx_that_we_can_use_is_refused(code: str, words: str, tmp_path: Path) -> None:
    path = fake(tmp_path, code)
    script = """
        for i in range(2):
            try:
                UcxLibrary.load(path)
            except UcxError as error:
                print(error.status, error)
        """
    assert run(script, path) == f"{KVN_UNSUPPORTED} {words.format(path=path)}\n" * 2


def test_a_missing_file_is_named() -> None:
    script = """
        try:
            UcxLibrary.load(path)
        except UcxError as error:
            print(error.status, error)
        """
    told = run(script, "/nowhere/libucp.so.0")
    assert told.startswith(f"{KVN_UNSUPPORTED} /nowhere/libucp.so.0: cannot open")


def test_a_library_is_opened_once_and_the_one_that_is_open_is_used(ucx: Found) -> None:
    library = UcxLibrary.load(ucx.path)
    assert UcxLibrary.load(ucx.path) is library
    assert Path(UcxLibrary.load("libucp.so.0").path).samefile(library.path)
    assert library.version >= (1, 13, 0)
    with pytest.raises(TypeError, match=r"comes from UcxLibrary\.load"):
        UcxLibrary()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"UCX_NET_DEVICES": "none7"}, "^ucp_init: No such device.*none7"),
        ({"ZCOPY_THRESH": "many"}, "Invalid value for ZCOPY_THRESH: 'many'"),
        ({"UCX_": "1"}, "a setting is 'UCX_'='1'; it must be a name of UCX's"),
    ],
)
def test_settings_that_ucx_does_not_take(settings: dict[str, str], words: str, ucx: Found) -> None:
    with pytest.raises((UcxError, ValueError), match=words):
        UcxEnd(UcxLibrary.load(ucx.path), settings=settings)


def test_an_unknown_mode_is_refused(ucx: Found) -> None:
    with pytest.raises(ValueError, match="mode is 'both'; it must be one of gathered, one_sided"):
        UcxEnd(UcxLibrary.load(ucx.path), mode="both")


def test_what_an_end_may_use_is_told(ucx: Found) -> None:
    end = UcxEnd(UcxLibrary.load(ucx.path), settings={"NET_DEVICES": "lo"})
    assert end.transports == "tcp/lo"
    end.close()
