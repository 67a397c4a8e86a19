"""A process that maps memory of a peer, and has few free descriptors."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from tests.transport.owner import Owner

ARENA = """
    arena = transport.allocate(1 << 16)
    held = transport.register(arena)
    content = np.frombuffer(memoryview(arena), np.uint8)
    content[:] = 1
    result = arena.address
"""
ARRAY = """
    content = np.ones(1 << 16, np.uint8)
    held = transport.register(content)
    result = content.ctypes.data
"""
PULL = """
    from contextlib import closing
    import kvplan
    from kvplan import CacheDesc, DataType, Rows, Transfer
    DESC = CacheDesc(1, (1, 1 << 16), DataType.DT_UINT8)
    here = np.zeros((1, 1 << 16), np.uint8)
    plan = kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [0])), local=local)
    memory = link.memory([there], 1 << 16, writable=local == "src", metadata=metadata)
    kvplan.execute(plan, *((memory, [here]) if local == "dst" else ([here], memory)))
    del memory
    result = int(here.sum())
"""
FEW = """
    from kvplan import LLMException
    from tests.support.few_descriptors import spare_descriptors
    from tests.support.held import Held
    before, result = Held.now(), []
    for spare in range(2):
        with spare_descriptors(spare):
            try:
                link.memory([there], 1 << 16, writable=local == "src", metadata=metadata)
            except LLMException as error:
                result.append(str(error))
        before.check_nothing_new()
"""


@pytest.mark.parametrize(("what", "local"), [(ARENA, "dst"), (ARENA, "src"), (ARRAY, "src")])
def test_the_error_names_the_limit_and_more_descriptors_help(what: str, local: str) -> None:
    """The memory was registered after the link was made, and the link stays usable."""
    with closing(Owner()) as owner, closing(Owner()) as receiver:
        owner.run(ARENA)
        receiver.run("link = transport.connect(metadata)", metadata=owner.metadata())
        there = owner.run(what)
        names = {"there": there, "metadata": owner.metadata(), "local": local}
        refusals = receiver.run(FEW, **names)
        assert len(refusals) == 2
        for refusal in refusals:
            assert re.search(
                r"^peer \d+ (has .*, which cannot be mapped|cannot be written to): .*"
                r"Too many open files: RLIMIT_NOFILE is \d+ \(ulimit -n\) \(LLM_OUT_OF_MEMORY\)$",
                refusal,
            ), refusal
        assert receiver.run(PULL, **names) == (1 << 16) * (local == "dst")
        assert owner.run("result = int(content.sum())") == (1 << 16) * (local == "dst")
        receiver.run("link.close()")
