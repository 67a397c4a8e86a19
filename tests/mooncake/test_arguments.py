"""Arguments that no call can use: a status or a TypeError, never another exception or a crash."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvplan.mooncake.engine import TransferEngine, Write
from tests.ascend.fixtures import sim_folder, simulator
from tests.support.refusals import refused

__all__ = ["sim_folder", "simulator"]  # fixtures

ROOT = Path(__file__).parents[2]
SIZE = 4096


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield made
    made.close()


@pytest.fixture
def address(engine: TransferEngine) -> Iterator[int]:
    memory = np.zeros(SIZE, np.uint8)
    assert engine.register_memory(memory.ctypes.data, SIZE) == 0
    yield memory.ctypes.data
    assert not memory.any()


WRONG: dict[str, Callable[[TransferEngine, int], Any]] = {
    "data=5": lambda engine, at: engine.write_bytes_to_buffer(at, 5, 5),  # type: ignore[arg-type]
    "dest_address is a float": lambda engine, _: engine.write_bytes_to_buffer(1.5, b"", 0),  # type: ignore[arg-type]
    "source_address is a str": lambda engine, _: engine.read_bytes_from_buffer("", 0),  # type: ignore[arg-type]
    "buffer_addr is a float": lambda engine, _: engine.free_managed_buffer(1.5, 1),  # type: ignore[arg-type]
    "location": lambda engine, at: engine.register_memory(at + SIZE, 1, None),  # type: ignore[arg-type]
    "buffer_addresses must have": lambda engine, _: engine.batch_register_memory([-1], [1]),
    "batch_ids must have": lambda engine, _: engine.get_batch_transfer_status([1 << 64]),
    "notify": lambda engine, at: engine.transfer_sync(engine._own, at, at + 64, 8, Write, "text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_the_wrong_type_are_refused(
    engine: TransferEngine, address: int, name: str
) -> None:
    with pytest.raises(TypeError, match=f"^{name}"):
        WRONG[name](engine, address)


def test_numbers_of_numpy_are_numbers(engine: TransferEngine) -> None:
    """Programs compute addresses from the columns of block tables."""
    memory = np.arange(SIZE, dtype=np.uint8)
    at: Any = np.uint64(memory.ctypes.data)
    assert engine.register_memory(at, np.int64(SIZE)) == 0  # type: ignore[arg-type]
    assert engine.write_bytes_to_buffer(at, b"abcd", np.int32(4)) == 0  # type: ignore[arg-type]
    assert engine.read_bytes_from_buffer(at, np.uint8(4)) == b"abcd"  # type: ignore[arg-type]
    batch: Any = np.int64(engine.batch_transfer_async_read(engine._own, [at], [at + 64], [8]))
    deadline = time.monotonic() + 60
    while (status := engine.transfer_check_status(batch)) == 0:
        assert time.monotonic() < deadline
    assert status == 1
    assert memory[:8].tolist() == memory[64:72].tolist()
    assert engine.unregister_memory(at) == 0
    managed: Any = np.uint64(engine.allocate_managed_buffer(np.int32(SIZE)))  # type: ignore[arg-type]
    assert engine.free_managed_buffer(managed, np.int32(SIZE)) == 0  # type: ignore[arg-type]
    assert engine.datadist.caches() == []


@pytest.mark.parametrize("seconds", [5, 7, 300])
def test_a_batch_has_the_seconds_of_the_variable_from_its_call_on(
    engine: TransferEngine, address: int, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", str(seconds))
    began = time.monotonic()
    batch = engine.batch_transfer_async_read(engine._own, [address], [address + 64], [8])
    took_s = time.monotonic() - began
    assert engine._engine is not None
    request = engine._engine.requests.get(batch)
    assert seconds <= request.data - began <= seconds + took_s + 1e-6
    task = request.task = Mock(wraps=request.task)
    assert engine.get_batch_transfer_status([batch]) == 0
    (waits_ms,) = task.wait_done.call_args.args
    assert request.data - time.monotonic() <= waits_ms / 1000 <= seconds + took_s


def test_the_time_of_connecting_is_a_part_of_the_timeout(
    engine: TransferEngine, address: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    ran, cluster = Mock(), engine._cluster

    def slow(name: str) -> int:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        return cluster(name)

    monkeypatch.setattr(engine, "_cluster", slow)
    monkeypatch.setattr(engine.datadist, "run", ran)
    assert engine.transfer_sync_read(engine._own, address, address + 64, 8) == 0
    assert ran.call_args.kwargs["timeout_ms"] < 30_000 - 49


@pytest.mark.parametrize("wrong", [5, 0, False, []], ids=repr)
@pytest.mark.parametrize(
    "name", ["local_hostname", "metadata_server", "protocol", "device_name", "metadata_type"]
)
def test_an_engine_is_initialized_with_text(name: str, wrong: object) -> None:
    given: dict[str, Any] = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "metadata_type": "",
    }
    engine = TransferEngine()
    with pytest.raises(TypeError, match=f"^{name} is a {type(wrong).__name__}; it must be str"):
        engine.initialize_ext(**given | {name: wrong})
    assert engine.initialize_ext(**given | {"device_name": None}) == 0
    engine.close()


@pytest.mark.parametrize("length", [1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_buffer_that_is_too_large(engine: TransferEngine, length: int) -> None:
    assert engine.allocate_managed_buffer(length) == 0
    assert engine.datadist.caches() == []


def test_a_timeout_that_is_too_large(
    engine: TransferEngine, address: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "9" * 400)
    assert engine.transfer_sync_write(engine._own, address, address + 64, 8) == -1
    assert engine.batch_transfer_async_write(engine._own, [address], [address + 64], [8]) == 0


def test_an_engine_without_a_port_is_not_initialized(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A peer could not name the engine."""
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", f"ipc://{tmp_path}/socket")
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert list(tmp_path.iterdir()) == []  # the engine does not listen any more
    monkeypatch.delenv("KVPLAN_LISTEN_IP_INFO")
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    engine.close()


def on_device() -> str:
    """Use memory of a device as host memory, and return the outcomes."""
    logging.disable()
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0
    buffer = engine.datadist.device.native.allocate(SIZE)
    statuses = []
    for location in ("npu:0", "*"):  # "*": any place, which the engine finds out
        assert engine.register_memory(buffer.address, SIZE, location) == 0
        with refused("LLM_PARAM_INVALID", "is memory of a device"):
            engine.read_bytes_from_buffer(buffer.address, 4)
        statuses.append(engine.write_bytes_to_buffer(buffer.address, b"abcd", 4))
        assert engine.unregister_memory(buffer.address) == 0
    statuses.append(engine.register_memory(buffer.address, SIZE, "cpu"))
    host = np.zeros(SIZE, np.uint8)
    assert engine.register_memory(host.ctypes.data, SIZE) == 0
    assert engine.write_bytes_to_buffer(host.ctypes.data, b"abcd", 4) == 0
    engine.close()
    return f"refused, {statuses}"


@pytest.mark.usefixtures("simulator")
def test_memory_of_a_device_is_not_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLAN_ACCELERATOR", "ascend")
    code = "from tests.mooncake.test_arguments import on_device; print(on_device())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "refused, [-1, -1, -1]"
