"""Engines on a system with too few threads, descriptors or bytes of a file.

Child processes initialize an engine, each with a little more room than the one before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent, indent

import pytest

HARNESS = """
import encodings.idna  # needed later, by a user who may not read it
import json, os, resource, sys
from kvplan import Cache, CacheDesc, DataType, LlmDataDist, LlmRole, LLMException, Placement

def used():
    return max(int(name) for name in os.listdir("/proc/self/fd"))

def engine():
    found = LlmDataDist(1, LlmRole.MIX)
    found.initialize({"llm.listenIpInfo": "127.0.0.1:0"})
    return found

def outcome(spare):
    try:
        tried(spare)
    except LLMException as error:
        return error.status_code.name + " " + str(error)
    return "done"

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for spare in rooms:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = outcome(spare)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    print(json.dumps([os.waitpid(child, 0)[1], text]), flush=True)
"""


def outcomes(rooms: list[int], tried: str) -> list[str]:
    """Return the outcome of `tried(spare)` for each of `rooms`. No process aborts."""
    body = indent(dedent(tried), "    ")
    program = f"rooms = {rooms}\ndef tried(spare):\n{body}\n{HARNESS}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [status for status, _ in found] == [0] * len(rooms), done.stderr
    return [text for _, text in found]


@pytest.mark.skipif(os.getuid() != 0, reason="a user who runs nothing else is needed")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_an_engine_without_threads(is_first: bool) -> None:
    """A later engine finds the threads that copy, and that show that the process lives."""
    tried = f"""
        if not {is_first}:
            engine().finalize()
        user = 100_000 + os.getpid()
        os.setresuid(user, user, user)
        count = len(os.listdir("/proc/self/task"))
        resource.setrlimit(resource.RLIMIT_NPROC, (count + spare, count + spare))
        engine()
    """
    found = outcomes([*range(7), 20], tried)
    assert found[-1] == "done"
    assert found[0].startswith("LLM_OUT_OF_MEMORY")
    for text in found:
        assert text == "done" or ("LLM_OUT_OF_MEMORY" in text and "ulimit -u" in text)


def test_an_engine_without_descriptors() -> None:
    tried = """
        limit = used() + 1 + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        engine()
    """
    found = outcomes([*range(0, 30, 5), 60], tried)
    assert found[-1] == "done"
    assert found[0].startswith("LLM_OUT_OF_MEMORY")
    for text in found:
        assert text == "done" or ("LLM_OUT_OF_MEMORY" in text and "ulimit -n" in text)


def test_a_cache_that_is_larger_than_files_may_be() -> None:
    tried = """
        made = engine()
        resource.setrlimit(resource.RLIMIT_FSIZE, (spare, spare))
        made.allocate_cache(CacheDesc(1, (2, 1 << 20), DataType.DT_UINT8, Placement.HOST))
    """
    small, large = outcomes([1 << 20, 1 << 22], tried)
    assert large == "done"
    assert small.startswith("LLM_OUT_OF_MEMORY")
    assert f"RLIMIT_FSIZE is {1 << 20} (bytes of a file or memfd, ulimit -f)" in small
