"""A small push whose lease ends in the middle: no byte is written after `end_leases` returns.

`RowLowering.move_now` checks the lease, announces the write, and checks again. The program below
ends the lease between those steps: before the announcement, which the owner then does not see, and
after it. A preloaded library calls back there, because no Python runs in between.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60

pytestmark = [
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer is preloaded"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="preloads a library"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

SHIM = """
#include <stdbool.h>
#include <stddef.h>

bool (*enter)(void *guard, void *announcement); /* the function of libkvn.so */
void (*before)(void), (*after)(void);

bool kvn_guard_try_enter(void *guard, void *announcement)
{
    if (before != NULL) {
        before();
    }
    const bool entered = enter(guard, announcement);
    if (after != NULL) {
        after();
    }
    return entered;
}
"""

PUSHER = """
import ctypes, json, os, sys
from kvnative import __file__ as kvnative
from kvnative._process import Peer
from kvnative._rows import RowLowering
from tests.native.writers import NBYTES, Here, column

shim = ctypes.CDLL(None)
native = ctypes.CDLL(os.path.join(os.path.dirname(kvnative), "lib", "libkvn.so"))
enter = ctypes.cast(native.kvn_guard_try_enter, ctypes.c_void_p)
ctypes.c_void_p.in_dll(shim, "enter").value = enter.value

here = Here()
lease = here.generations.take()
rows = RowLowering(*here.sides, *2 * [(64, 1, 64, 64, 0, False)], 64, (), None, NBYTES, NBYTES)
peer = Peer(os.getpid())
peer.attach(here.generations.fd, here.generations.inode, here.generations.num_slots)
words = here.registered + column(*lease).tobytes()
guard = here.writer().guarded(here.registered)
tickets = []

@ctypes.CFUNCTYPE(None)
def end():
    tickets.extend(here.table.end_leases(here.generations, [lease], 0))

if sys.argv[1] != "never":
    ctypes.c_void_p.in_dll(shim, sys.argv[1]).value = ctypes.cast(end, ctypes.c_void_p).value
moved = rows.move_now(peer, words, guard, {0: here}, 0, here, [1, 2], [5, 6], 1 << 16)
print(json.dumps([moved, len(tickets), int((here.dst == 7).sum())]))
assert here.table.drain(0) == []  # in any case the write is not announced any more
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "entering.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-xc", "-", "-o", str(made)]
    subprocess.run(command, check=True, input=SHIM, text=True)
    return made


@pytest.mark.parametrize(
    ("ends", "moved", "tickets", "written"),
    [("never", 128, 0, 128), ("before", 0, 0, 0), ("after", 0, 1, 0)],
)
def test_a_lease_that_ends_around_the_announcement(
    shim: Path, ends: str, moved: int, tickets: int, written: int
) -> None:
    """If the owner sees no ticket, it does not wait, so no byte may be written."""
    found = subprocess.run(
        [sys.executable, "-c", PUSHER, ends],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == [moved, tickets, written]
