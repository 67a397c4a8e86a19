"""The library of CUDA's driver: search, properties of devices, and older versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvnative._backend import NativeError
from kvnative._cuda import CudaError, CudaLibrary
from kvplan.device.cuda import CudaDevice, restrictions
from tests.cuda_sim.build import build
from tests.cuda_sim.simulator import LIBRARY, CudaControls, found
from tests.support.hidden_calls import hide_calls


def test_windows_is_recognized_by_the_name_of_its_kernel(cuda_simulator: CudaControls) -> None:
    device = CudaDevice(0)
    [restriction] = restrictions(device, "5.15.153.1-microsoft-standard-WSL2")
    assert restriction.startswith("WSL: ")
    assert restrictions(device, "6.8.0-45-generic") == []
    device.close()


def test_the_library_is_found_once_for_each_context(cuda_simulator: CudaControls) -> None:
    library = CudaLibrary.load()
    with found() as file:
        for path in (None, str(file), str(file.parent)):
            assert CudaLibrary.load(path or str(file)) is library
        own = CudaLibrary.load(str(file), "own")
    assert own is not library
    assert (library.context, own.context) == ("primary", "own")
    assert library.path == own.path == str(file)
    with pytest.raises(ValueError, match="context is 'mine'; it must be one of 'primary', 'own'"):
        CudaLibrary.load(context="mine")


def test_devices_have_their_properties(cuda_simulator: CudaControls) -> None:
    library = CudaLibrary.load()
    assert (library.version, library.missing) == ("13.0", ())
    assert library.device_count() == 8
    assert library.capability(2) == (9, 0)
    assert len({library.uuid(number) for number in range(8)}) == 8
    assert len(library.uuid(0)) == len("GPU-") + 36
    device = CudaDevice(3)
    described = device.describe()
    assert described["pci"] == library.pci_id(3)
    assert (described["capability"], described["context"]) == ("9.0", "primary")
    assert device.name == described["name"]
    device.close()
    with pytest.raises(CudaError, match=r"^cuDeviceGet: 101 \(CUDA_ERROR_INVALID_DEVICE\): "):
        library.uuid(8)


def test_a_file_that_is_not_the_library_is_refused(
    cuda_simulator: CudaControls, tmp_path: Path
) -> None:
    with pytest.raises(NativeError, match=r"no CUDA library: .*/nothing/libcuda\.so: cannot open"):
        CudaLibrary.load(str(tmp_path / "nothing" / "libcuda.so"))
    with pytest.raises(NativeError, match=r"libm\.so\.6 has no cuInit; kvplan needs"):
        CudaLibrary.load("libm.so.6")


def test_an_older_driver_lacks_batch_copies() -> None:
    script = """
from kvnative._cuda import CudaLibrary
from tests.cuda_sim.build import build
it = CudaLibrary.load(str(build("12.4")))
print(it.version, *it.missing)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["12.4", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]


def test_a_driver_without_optional_calls_has_the_same_devices(
    cuda_simulator: CudaControls, tmp_path: Path
) -> None:
    """CUDA 11.2 is such a driver. Each device still has its UUID, and its kernel copies."""
    optional = ("cuDeviceGetUuid_v2", "cuFuncLoad", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
    hide_calls(build().parent, tmp_path / "old", *optional)
    script = """
import numpy as np
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import allocate_host
from kvplan.device.cuda import CudaDevice, load_library
library = load_library()
print(*library.missing)
print(*map(library.uuid, range(library.device_count())))
device = CudaDevice(0).native
there, here = device.allocate(4096), allocate_host(device, 4096)
device.write(there.address, bytes(range(256)) * 16)
rows = np.arange(0, 4096, 64, dtype=np.uint64)
columns = here.address + rows, there.address + rows[::-1], np.full(len(rows), 32, np.uint64)
with Executor(device.backend("device_to_host")) as executor:
    report = executor.run(Descriptors.from_columns(*columns))
print(report.status, report.message, *memoryview(here)[:128:32])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, LIBRARY: str(tmp_path / "old" / build().name)},
        capture_output=True,
        text=True,
        check=True,
    )
    missing, uuids, copied = done.stdout.splitlines()
    library = CudaLibrary.load()
    assert missing.split() == sorted(optional)
    assert uuids.split() == [library.uuid(number) for number in range(library.device_count())]
    assert copied.split() == ["0", "192", "0", "128", "0"]


def test_the_driver_handles_visible_devices() -> None:
    script = f"""
import os
from tests.cuda_sim.build import build
os.environ["{LIBRARY}"] = str(build())
from kvplan.device.cuda import CudaDevice, load_library
library = load_library()
all = [library.uuid(number) for number in range(library.device_count())]
device = CudaDevice(1)
buffer = device.allocate(10)
assert device.native.locate(buffer.address) == ("device", 1)
print(*all)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "5,2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
