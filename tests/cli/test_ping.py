"""`kvplan ping` to an engine in another process, which is unchanged afterwards."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMException, Options
from kvplan.cli import main
from kvplan.control.auth import ClusterKey
from tests.cli.peer import Peer
from tests.cli.running import command, refused
from tests.support.zygote import ROOT

SLOTS = """
    desc = CacheDesc(4, (3, 1024, 64), DataType.DT_BF16, Placement.HOST)
    cache = engine.allocate_cache(desc, [CacheKey(7, 11)])
"""
BLOCKS = """
    desc = CacheDesc(5, (64, 16, 576), DataType.DT_BF16, Placement.HOST)
    paged = engine.allocate_blocks_cache(desc, BlocksCacheKey(7, 3))
    for tensor in engine.arrays(paged):
        tensor[:] = 9
"""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer()) as opened:
        yield opened


def ping(address: str, *arguments: str, code: int = 0, **environment: str) -> dict[str, Any]:
    done = command("ping", address, "--json", "-n", "2", *arguments, **environment)
    assert (done.returncode, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_cluster_need_not_be_known(peer: Peer) -> None:
    found = ping(peer.address)
    assert (found["cluster_id"], found["role"]) == (7, "PROMPT")
    assert found["transport"] == "local"
    assert [entry["transport"] for entry in found["passed"]] == ["hccl"]
    assert "no Ascend device" in found["passed"][0]["why_not"]
    assert found["link_ms"] > 0 < found["round_trip"]["median_ms"]
    assert found["caches"] == []
    text = command("ping", peer.address).stdout
    assert "the peer has no cache: only the link was measured" in text


def test_a_paged_cache_is_read_and_left_as_it_was(peer: Peer) -> None:
    peer.run(SLOTS + BLOCKS)
    before = peer.run("result = engine.fingerprint(paged)")
    # The key of the slot comes first, with the id of its cache.
    first, second = ping(peer.address)["caches"]
    assert (first["paged"], second["paged"], second["model_id"]) == (False, True, 3)
    assert [item["size"] for item in first["pulls"]] == ["small", "large"]
    # A layer of two tensors, of one slot of 1024 x 64 elements of 2 bytes; then both layers.
    assert [item["nbytes"] for item in first["pulls"]] == [2 * 131072, 4 * 131072]
    assert peer.run("result = engine.fingerprint(paged)") == before
    # No key was consumed, and the link is gone.
    assert peer.run("result = len(engine.links())") == 0
    peer.run("engine.remove_cache_key(CacheKey(7, 11))")


def test_a_pool_for_the_engines_of_this_environment_is_not_made(peer: Peer) -> None:
    peer.run(BLOCKS)
    pool = '{"memory_size": 65536}'
    (found,) = ping(peer.address, KVPLAN_HOST_MEM_POOL_CONFIG=pool, KVPLAN_MEM_POOL_CONFIG=pool)[
        "caches"
    ]
    assert (found["failed"], len(found["pulls"])) == (False, 2), found


def test_tensors_that_do_not_form_pairs_are_read_one_by_one(peer: Peer) -> None:
    peer.run(BLOCKS)
    (cache,) = ping(peer.address, "--transport", "tcp")["caches"]
    # Blocks of 16 x 576 elements of 2 bytes; one tensor, and all 5 x 64.
    assert [item["nbytes"] for item in cache["pulls"]] == [18432, 5 * 64 * 18432]
    text = command("ping", peer.address).stdout
    assert "5 tensors of 64 blocks x 18 KiB, DT_BF16, HOST, model_id 3" in text
    assert "GB/s" in text


def test_a_cache_without_a_key_cannot_be_read(peer: Peer) -> None:
    peer.run(BLOCKS.replace(", BlocksCacheKey(7, 3)", ""))
    (cache,) = ping(peer.address)["caches"]
    assert "only owners of a lease can read it" in cache["why_not"]
    assert "only the link was measured" in command("ping", peer.address).stdout


def test_a_cache_that_is_too_large_is_skipped(peer: Peer) -> None:
    huge = "engine.allocate_cache(CacheDesc(64, (2, (8 << 20) + 1), DataType.DT_BF16), [])\n"
    peer.run(huge, SLOTS)
    first, second = ping(peer.address)["caches"]
    assert (first["why_not"], first["failed"], first["pulls"]) == ("one slot is 1.0 GiB", False, [])
    assert len(second["pulls"]) == 2


GONE = """
    import ctypes
    calls = ctypes.CDLL(None)
    calls.mmap.restype = ctypes.c_void_p
    calls.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    calls.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = calls.mmap(1 << 45, 1 << 20, 3, 0x22, -1, 0)  # no other thread fills the hole there
    desc = CacheDesc(1, (64, 16384), DataType.DT_UINT8)
    engine.register_blocks_cache(desc, [address], BlocksCacheKey(7, 3))
    calls.munmap(address, 1 << 20)
"""


@pytest.mark.parametrize("others", [0, 20])
def test_an_unreadable_cache_sets_the_exit_code(peer: Peer, others: int) -> None:
    """The same holds if the cache comes after more caches than are listed."""
    unread = "engine.allocate_blocks_cache(CacheDesc(1, (2, 64), DataType.DT_UINT8))\n"
    peer.run(unread * others, GONE)
    *_, last = ping(peer.address, code=2)["caches"]
    assert last["failed"]
    assert "LLM_KV_CACHE_NOT_EXIST" in last["why_not"]


def test_a_single_block_is_read_if_blocks_are_large(peer: Peer) -> None:
    desc = "CacheDesc(1, (2, 65 << 20), DataType.DT_INT8)"
    peer.run(f"engine.allocate_blocks_cache({desc}, BlocksCacheKey(7, 3))")
    (cache,) = ping(peer.address)["caches"]
    assert [item["nbytes"] for item in cache["pulls"]] == [65 << 20, 65 << 20], cache["why_not"]


def test_parts_of_a_block_that_lie_apart_are_counted(peer: Peer) -> None:
    peer.run(
        """
        desc = CacheDesc(
            3, (2, 8, 16, 4, 32), DataType.DT_BF16, kv_tensor_format="kv block token head dim"
        )
        engine.allocate_blocks_cache(desc, BlocksCacheKey(7, 0))
        """
    )
    (cache,) = ping(peer.address)["caches"]
    # Keys and values of 16 x 4 x 32 elements of 2 bytes each, of one layer; 3 layers, 8 blocks.
    assert [item["nbytes"] for item in cache["pulls"]] == [2 * 4096, 3 * 8 * 2 * 4096]
    assert "3 tensors of 8 blocks x 8 KiB" in command("ping", peer.address).stdout


def test_reasons_against_better_transports_are_printed() -> None:
    with closing(Peer(**{"kvplan.transport": "tcp"})) as peer:
        found = ping(peer.address)
        assert found["transport"] == "tcp"
        why = {entry["transport"]: entry["why_not"] for entry in found["passed"]}
        assert list(why) == ["hccl", "local", "ucx"]
        assert why["local"] == "cluster 7 does not have it: kvplan.transport=tcp leaves it out"


def test_with_the_key_of_the_cluster_and_without(tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    for path in (key, other):
        ClusterKey.generate().save(path)
    with closing(Peer(**{"kvplan.cluster_key_file": str(key)})) as peer:
        assert ping(peer.address, "--key", str(key))["cluster_id"] == 7
        for arguments in ((), ("--key", str(other))):
            said = refused("ping", peer.address, *arguments)
            assert peer.address in said
            assert "key" in said
            assert "LLM_LINK_FAILED" in said


def test_another_cluster_at_the_address_is_reported(peer: Peer) -> None:
    assert "cluster 7 is here, not cluster 9" in refused("ping", peer.address, "--cluster-id", "9")
    assert ping(peer.address, "--cluster-id", "7")["cluster_id"] == 7


def test_an_address_without_a_listener() -> None:
    with socket.socket() as unused_port:
        unused_port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused_port.getsockname()[1]}"
        assert refused("ping", address) == (
            f"{address}: connect: Connection refused (LLM_LINK_FAILED)"
        )
    assert "port" in refused("ping", "127.0.0.1")


def test_another_program_at_the_address_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = refused("ping", address, "--timeout", "0.3")
        assert said.startswith(address)
        assert re.search(r"no answer within (300|[12]?\d?\d) ms", said)  # the rest of 300 ms


def test_the_timeout_is_for_linking_and_for_each_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []

    def probe(*arguments: object) -> None:
        given.append(arguments)
        raise LLMException("stop here")

    monkeypatch.setattr("kvplan.cli.engines.Probe", probe)
    assert main(["ping", "127.0.0.1:1", "--timeout", "2.5"]) == 2
    ((_, options, link_ms, _),) = given
    assert isinstance(options, Options)
    assert (options.sync_kv_cache_wait_time, link_ms) == (2500, 2500)


def test_ctrl_c_ends_the_link(peer: Peer) -> None:
    peer.run(BLOCKS)
    with subprocess.Popen(
        [sys.executable, "-m", "kvplan", "ping", peer.address, "-n", "10000"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        peer.run("import time\nwhile not engine.links(): time.sleep(0.001)")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")
    # The peer was notified, or has seen the process end during a handshake.
    peer.run(
        """
        live = ("LINKING", "LINKED", "UNLINKING")
        while any(it.state.name in live for it in engine.links()):
            time.sleep(0.001)
        """
    )
