"""A stranger sends garbage to an engine's ports, and the engine still serves its peers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import PATIENT
from tools.namespaces import Namespace

SPEAK = """
import json, random, socket, sys
address, ports, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
texts = [b"", b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(4096), b"\\xff" * 4096]
texts += [chance.randbytes(chance.randrange(1, 5000)) for _ in range(20)]
held = []
for port in ports:
    for text in texts:
        try:
            held.append(socket.create_connection((address, port), timeout=5))
            held[-1].sendall(text)
        except OSError:  # it has hung up
            pass
print(len(held))
"""


@pytest.mark.parametrize("seed", range(2))
def test_garbage_from_strangers_disturbs_no_peer(
    three: list[Namespace], make_engine: MakeEngine, seed: int
) -> None:
    owner, user = (make_engine(host, number, **PATIENT) for number, host in enumerate(three[:2], 1))
    owner.hold(seed=1)
    user.hold(seed=None)
    user.link(owner)
    for engine in (owner, user):
        ports = network.listening(engine.host, engine.pid)
        assert ports == [int(engine.address.rpartition(":")[2])]
        three[2].run(
            *(sys.executable, "-c", SPEAK, engine.host.address, json.dumps(ports), str(seed)),
            stdout=subprocess.DEVNULL,
        )
        user.clear()
        outcome = user.move("pull", owner)
        assert outcome.status == "LLM_SUCCESS", outcome
        user.check(seed=1)
