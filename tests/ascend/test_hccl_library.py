"""HCCL's library: its location and required calls, in each variant of the toolkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvnative._backend import KVN_FAILED, KVN_OK
from tests.ascend.hccl_ends import A2, A3, Product, rank_table, two_ends
from tests.ascend.simulator import ELSEWHERE, HOME
from tests.ascend_sim.build import build
from tests.support import forked
from tests.support.hidden_calls import hide_calls
from tests.support.peer import ROOT

# A process loads a library only once, so each test has a process of its own.
PROGRAM = """
import json, sys
from kvnative._acl import AclLibrary
from kvnative._hccl_memory import HcclError, HcclLibrary
acl = AclLibrary.load(sys.argv[1])
path = sys.argv[2:]
is_hixl = bool(path) and "hixl" in path[0]
try:
    hccl = HcclLibrary.load(acl, *path, client_server=is_hixl)
    found = [hccl.path, hccl.generation, hccl.missing, HcclLibrary.load(acl) is hccl]
except HcclError as error:
    found = str(error)
print(json.dumps(found))
"""


def load(acl: str, *path: str, home: str = "/nonexistent", soc: str = A2.soc) -> Any:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KVSIM_SOC": soc, HOME: home}
    environment.pop(ELSEWHERE, None)
    imported = ("kvnative._acl", "kvnative._hccl_memory")
    done = forked.python(PROGRAM, acl, *path, imported=imported, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("variant", "file"),
    [("8.5", "libhcomm.so"), ("8.1", "libhccl.so"), ("hccl-only", "libhccl.so")],
)
def test_the_library_is_found_beside_the_acl_library(variant: str, file: str) -> None:
    lib64 = Path(build(variant)) / "lib64"
    acl = lib64 / ("libascendcl.so" if variant == "8.1" else "libacl_rt.so")
    path, generation, missing, same = load(str(acl))
    assert Path(path).resolve() == (lib64 / file).resolve()
    assert (generation, missing, same) == ("global", [], True)


def test_the_product_decides_how_memory_is_registered() -> None:
    home = str(build("8.5"))
    assert load(f"{home}/lib64/libacl_rt.so", soc="Ascend950PR_9599")[1] == "per_comm"


def test_the_error_of_a_missing_library_lists_the_attempts(tmp_path: Path) -> None:
    home = str(build("8.5"))
    found = load(f"{home}/lib64/libacl_rt.so", str(tmp_path / "libhcomm.so"))
    assert found.startswith(f"no HCCL library: {tmp_path}/libhcomm.so: ")
    found = load(f"{home}/lib64/libacl_rt.so", str(tmp_path))
    assert found == f"no HCCL library: {tmp_path} has neither libhcomm.so nor libhccl.so"


def test_the_error_of_an_old_library_names_the_missing_calls(tmp_path: Path) -> None:
    home = str(build("8.5"))
    found = load(f"{home}/lib64/libacl_rt.so", f"{home}/lib64/libacl_rt.so")
    assert found.endswith("libacl_rt.so: it lacks HcclCommInitClusterInfoMemConfig")


def test_hixl_is_used_from_9_1_on() -> None:
    """The structs of 9.0 differ, though its calls have the same names."""
    old, new = (f"{build(variant)}/lib64" for variant in ("9.0", "9.1"))
    found = load(f"{old}/libacl_rt.so", f"{old}/libcann_hixl.so")
    assert found.endswith("libcann_hixl.so: it lacks HixlCSClientBatchPutSync")
    found = load(f"{new}/libacl_rt.so", f"{new}/libcann_hixl.so")
    assert found[1:3] == ["client_server", []]


@pytest.mark.parametrize(
    ("variant", "product"), [("8.1", A2), ("hccl-only", A2), ("8.1", A3)], ids=str
)
def test_bytes_are_transferred_with_each_variant(
    tmp_path: Path, variant: str, product: Product
) -> None:
    with two_ends(tmp_path, product, variant) as ends:
        connection = ends.connect(1 << 16, staging={"slot_nbytes": 4096, "buffer_sets": 1})
        rows = connection.rows([100] * 300)
        assert connection.transfer("put", rows).status == KVN_OK
        local = ends[0].memory("pageable", 1 << 16)
        rows = connection.rows([100] * 300, local)
        options = {"staging": connection.name, "local": "host"}
        assert connection.transfer("get", rows, **options).status == KVN_OK
        assert ends[0].read(local)[:30000] == b"\xa5" * 30000
        ends[0].free(local)
        connection.close()
        assert [end.left() for end in ends.both] == [{}, {}]
        assert not ends.log.calls("violation")


def test_transfers_and_failures_work_without_calls_for_texts(tmp_path: Path) -> None:
    explaining = ("HcclGetCommAsyncError", "HcclGetErrorString")
    hide_calls(build() / "lib64", tmp_path / "home/lib64", *explaining)
    with two_ends(tmp_path, **{HOME: tmp_path / "home"}) as ends:
        assert sorted(ends[0].facts()["missing"]) == list(explaining)
        connection = ends.connect(1 << 16)
        rows = connection.rows([100] * 300)
        assert connection.transfer("put", rows).status == KVN_OK
        ends[0].fault("HcclBatchPut:1=4")
        report = connection.transfer("put", rows)
        assert report.status == KVN_FAILED
        assert "HcclBatchPut: 4 (INTERNAL): ES0004" in report.message  # the quoted text is ACL's
        connection.close()


FORK = """
import os, sys
from kvnative._acl import AclLibrary
from kvnative._backend import NativeError
from kvnative._hccl import Communicator
from kvnative._hccl_memory import HcclLibrary, Region
acl = AclLibrary.load(sys.argv[1])
hccl = HcclLibrary.load(acl)
device = acl.device(0)
buffer = device.allocate(4096)
region = Region(hccl, device, buffer.address, 4096, on_device=True, owner=buffer)
communicator = Communicator(hccl, device, sys.argv[2], 0, 1, "forked", max_batch=64)
communicator.bind(region)
child = os.fork()
if child == 0:
    try:
        communicator.prepare(1000)
    except NativeError as error:
        assert "forked" in str(error), error
        communicator.close()
        region.close()
        del communicator, region, buffer, device
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
communicator.close()
region.close()
"""


def test_a_forked_child_makes_no_calls() -> None:
    home = str(build("8.5"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KVSIM_SOC": A2.soc, HOME: home}
    acl, table = f"{home}/lib64/libacl_rt.so", rank_table("1.0")
    done = subprocess.run(
        [sys.executable, "-c", FORK, acl, table],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
