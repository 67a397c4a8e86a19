"""`kvplan info`, as a shell runs it: without an accelerator, with simulated and broken ones."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

import kvplan
from kvplan import Cache, LlmDataDist, LlmRole
from kvplan.cli.info import host, look
from kvplan.cli.info.look import COSTS
from kvplan.device.ascend import A2, A3, A950
from kvplan.transport.tcp.transport import connections_of
from tests.ascend_sim.build import build
from tests.cli.running import command
from tests.cuda_sim.build import build as build_cuda

ROOT = Path(__file__).parents[2]
PLACES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME", "KVPLAN_ASCEND_LIBRARY")
GIB = 1 << 30


def info(*arguments: str, **environment: str) -> str:
    """Return the output with these variables, and no other variable that names a library."""
    clean = {name: text for name, text in os.environ.items() if name not in PLACES}
    # The default time limit is short for a loaded machine. A later --timeout counts.
    limit = ("--timeout", "600")
    done = command("info", *limit, *arguments, environment=clean | environment)
    # The findings before a library ended the process may be incomplete.
    stopped = "NOT CHECKED" in done.stdout or '"stopped": {' in done.stdout
    assert done.stderr == ""
    assert done.returncode == 0 or (done.returncode == 1 and stopped)
    return done.stdout


def found(*arguments: str, **environment: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(info("--json", *arguments, **environment))
    return read


def simulated(variant: str = "8.5", *arguments: str, **settings: str) -> dict[str, Any]:
    return found(*arguments, ASCEND_HOME_PATH=str(build(variant)), KVSIM_DEVICES="2", **settings)


def broken_library(path: Path) -> str:
    """Return a library that does what the variable BROKEN asks for when it is loaded."""
    source = Path(__file__).with_name("broken_library.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


def transport(row: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [each for each in row["transports"] if each["name"] == name]
    assert isinstance(one, dict)
    return one


def test_reserved_huge_pages_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most machines of the tests have none."""
    pages = {"HugePages_Total": "10", "HugePages_Free": "7", "HugePages_Rsvd": "3"}
    lines = (f"{name}: {value}\n" for name, value in {**pages, "Hugepagesize": "2048 kB"}.items())
    texts = {"/proc/meminfo": "".join(lines)}
    monkeypatch.setattr(host, "_text_of", lambda path: texts.get(path, ""))
    assert host._pages()["hugetlb"] == {"nbytes": 2 << 20, "total": 10, "free": 4}


def test_native_modules_that_were_not_built_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvnative", None)
    (error,) = (reported := host._native_modules()).values()
    assert [*reported] == ["kvnative"]
    assert error.startswith("import of kvnative halted")


class Crossing(LlmDataDist):
    """An engine whose copies reach the other tensor."""

    def arrays(self, cache: Cache) -> list[NDArray[Any]]:
        found = super().arrays(cache)
        return found if cache.cache_id == 1 else found[::-1]


def test_a_copy_to_another_tensor_is_wrong() -> None:
    with Crossing(1, LlmRole.MIX) as engine:
        engine.initialize({"llm.ListenIpInfo": ""})
        assert look._wrong_within(engine, 0) == "blocks [0, 2, 5, 7] came back wrong"


class TestWithoutAccelerator:
    def test_the_host_is_described(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, limits[1]))
        try:
            report = found(KVPLAN_ASCEND_LIBRARY="")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert report["kvplan"] == kvplan.__version__
        assert report["python"]["executable"] == sys.executable
        assert report["native_modules"]["_executor"] == ""
        assert set(report["native_modules"].values()) == {""}
        links = report["limits"]["links_by_open_files"]
        assert report["limits"]["open_files"] == {"soft": 600, "hard": limits[1]}
        tcp = 5 + 2 * connections_of(report["platform"]["cores"])
        assert links == {"local": 100, "ucx": 120, "tcp": 600 // tcp}
        assert report["stopped"] is None

    def test_without_a_library_the_report_says_why_and_what_works(self) -> None:
        report = found(KVPLAN_ASCEND_LIBRARY="")
        assert "KVPLAN_ASCEND_LIBRARY is empty" in report["accelerator"]["why_not"]
        assert "no Ascend device" in transport(report, "hccl")["why_not"]
        for name in ("local", "tcp"):
            assert transport(report, name)["reaches"] == ["host"]
        assert re.match(r"127\.0\.0\.1:\d+ -> 127\.0\.0\.1:\d+", transport(report, "tcp")["tried"])
        assert [(copy["remote"], copy["works"]) for copy in report["copies"]] == [("host", True)]

    def test_every_searched_place_is_named(self, tmp_path: Path) -> None:
        report = found(
            ASCEND_HOME_PATH=str(tmp_path), ASCEND_HOME="/no/where", LD_LIBRARY_PATH="/also"
        )
        places = {place["path"]: place for place in report["accelerator"]["places"]}
        assert places[str(tmp_path)] == {
            "path": str(tmp_path),
            "origin": "$ASCEND_HOME_PATH",
            "has": [],
        }
        assert places["/no/where"]["origin"] == "$ASCEND_HOME"
        assert "/usr/local/Ascend/ascend-toolkit/latest" in places
        assert "/also" in places

    def test_options_for_other_engines_are_not_used(self) -> None:
        """A port mapping may belong to another engine. A pool is as large as the others need."""
        names = "KVPLAN_MEM_POOL_CONFIG", "KVPLAN_HOST_MEM_POOL_CONFIG"
        given = {
            "KVPLAN_ADVERTISE": "127.0.0.1:1",
            **dict.fromkeys(names, '{"memory_size": 65536}'),
        }
        row = found(**given)
        assert transport(row, "tcp")["works"], row
        assert all(copy["works"] for copy in row["copies"]), row

    def test_the_key_of_links_on_this_host_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "kvplan/user.key"
        asked = {"KVPLAN_ASCEND_LIBRARY": "", "XDG_STATE_HOME": str(tmp_path)}
        expected = {"path": str(path), "is_made": False, "why_not_home": "", "why_not": ""}
        assert found(**asked)["user_key"] == expected
        assert not path.exists()
        path.parent.mkdir(0o700)
        path.write_text("mine")
        path.chmod(0o644)
        text = " ".join(info("-v", **asked).split())
        assert f"user_key path {path} is_made yes" in text
        assert "its mode is 0644, so others may use it; chmod 600 is needed" in text

    def test_the_text_is_for_people(self) -> None:
        """A new interpreter prints the text, as it does for a shell."""
        command = [sys.executable, "-W", "error", "-m", "kvplan", "info", "-v", "--timeout", "600"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        text = done.stdout
        for part in (
            "accelerator none:",
            "name hccl works no why_not no Ascend device",
            "name tcp works yes reaches host tried 127.0.0.1:",
            "shared_memory_free_bytes",
        ):
            assert part in " ".join(text.split())  # lines are wrapped
        assert max(map(len, text.splitlines())) <= 110


class TestBrokenLibraries:
    def test_a_file_that_is_not_a_library(self, tmp_path: Path) -> None:
        (tmp_path / "lib64").mkdir()
        (tmp_path / "lib64/libacl_rt.so").write_text("of another machine")
        report = found(ASCEND_HOME_PATH=str(tmp_path))
        assert "libacl_rt.so: file too short" in report["accelerator"]["why_not"]
        assert report["accelerator"]["places"][0]["has"] == [str(tmp_path / "lib64/libacl_rt.so")]
        assert transport(report, "local")["works"]

    def test_a_library_without_the_calls(self, tmp_path: Path) -> None:
        core = build() / "lib64/libkvsim_core.so"
        (tmp_path / "libacl_rt.so").symlink_to(core)
        report = found(KVPLAN_ASCEND_LIBRARY=str(tmp_path / "libacl_rt.so"))
        assert "has no acl" in report["accelerator"]["why_not"]
        assert "8.1 or later" in report["accelerator"]["why_not"]

    def test_a_library_that_ends_the_process(self, tmp_path: Path) -> None:
        broken = {
            "KVPLAN_ASCEND_LIBRARY": broken_library(tmp_path / "libacl_rt.so"),
            "BROKEN": "aborts",
        }
        report = found(**broken)
        assert report["stopped"]["step"] == "opening the ACL library"
        assert report["stopped"]["reason"] == "ended with SIGABRT"
        assert report["accelerator"]["places"][0]["has"] == ["libacl_rt.so"]
        text = info("-v", **broken)
        assert "stopped step opening the ACL library reason ended with SIGABRT" in " ".join(
            text.split()
        )

    def test_a_library_that_never_returns(self, tmp_path: Path) -> None:
        broken = {
            "KVPLAN_ASCEND_LIBRARY": broken_library(tmp_path / "libacl_rt.so"),
            "BROKEN": "hangs",
        }
        report = found("--timeout", "2", **broken)
        assert report["stopped"]["reason"] == "took longer than 2 s"

    def test_a_device_that_cannot_be_opened(self) -> None:
        report = simulated(KVSIM_FAULTS="aclrtSetDevice:2=507899")
        first, second = report["accelerator"]["devices"]
        assert "why_not" not in first
        assert "aclrtSetDevice: 507899 (internal error of the driver)" in second["why_not"]
        assert transport(report, "hccl")["works"]

    def test_initialization_that_fails(self) -> None:
        report = simulated(KVSIM_FAULTS="aclInit:1=507000")
        assert "aclInit: 507000" in report["accelerator"]["why_not"]
        assert report["accelerator"]["version"] == "8.5.0"
        assert transport(report, "local")["works"]

    def test_a_copy_that_fails(self) -> None:
        report = simulated(KVSIM_FAULTS="aclrtMemcpyBatchAsync:1=sync:507013")
        tried = {(copy["local"], copy["remote"]): copy for copy in report["copies"]}
        failed = tried.pop(("host", "device"))
        assert not failed["works"]
        assert "507013 (DMA error)" in failed["why_not"]
        assert all(copy["works"] for copy in tried.values())


class TestSimulatedGpus:
    def test_as_json(self) -> None:
        library = str(build_cuda())
        report = found(KVPLAN_CUDA_LIBRARY=library, KVPLAN_ASCEND_LIBRARY="", KVSIM_DEVICES="2")
        cuda = report["cuda"]
        assert (cuda["library"], cuda["version"], cuda["missing"]) == (library, "13.0", [])
        assert [device["id"] for device in cuda["devices"]] == [0, 1]
        for device in cuda["devices"]:
            assert (device["name"], device["capability"]) == ("Simulated GPU", "9.0")
            assert device["free_bytes"] <= device["total_bytes"]
        assert all(copy["works"] for copy in report["copies"])
        assert len(report["copies"]) == 3
        assert "no Ascend device" in transport(report, "hccl")["why_not"]

    def test_a_gpu_that_cannot_be_opened(self) -> None:
        text = info(
            KVPLAN_CUDA_LIBRARY=str(build_cuda()),
            KVPLAN_ASCEND_LIBRARY="",
            KVSIM_DEVICES="2",
            KVSIM_FAULTS="cuDevicePrimaryCtxRetain:2=46",
        )
        said = "Simulated GPU, 1 of 2 devices can be opened, driver of CUDA 13.0"
        assert said in " ".join(text.split())

    def test_restrictions_of_a_gpu_are_reported(self) -> None:
        gpu = {"KVPLAN_CUDA_LIBRARY": str(build_cuda()), "KVPLAN_ASCEND_LIBRARY": ""}
        shared = found(**gpu, KVSIM_DEVICES="1", KVSIM_CUDA_MPS="1", KVSIM_CUDA_HOST_REGISTER="0")
        [device] = shared["cuda"]["devices"]
        assert [text.partition(":")[0] for text in device["restrictions"]] == [
            "MPS",
            "confidential computing",
        ]
        assert all(copy["works"] for copy in shared["copies"])
        text = " ".join(info(**gpu, KVSIM_DEVICES="2", KVSIM_CUDA_MPS="1").split())
        assert text.count("GPU 0 is restricted by MPS: ") == 1
        assert "GPU 1 is restricted by MPS: " in text
        plain = found(**gpu, KVSIM_DEVICES="1", KVSIM_CUDA_MPS="2")  # a driver without the query
        assert plain["cuda"]["devices"][0]["restrictions"] == []

    def test_a_driver_without_a_device(self) -> None:
        text = info(
            KVPLAN_CUDA_LIBRARY=str(build_cuda()),
            KVPLAN_ASCEND_LIBRARY="",
            KVSIM_FAULTS="cuInit:1=100",
        )
        assert "none: cuInit: 100 (CUDA_ERROR_NO_DEVICE)" in " ".join(text.split())


class TestSimulatedDevices:
    def test_cann_8_5_is_described(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        (tmp_path / "version.info").write_text("Version=25.5.0\n")
        report = simulated(
            KVSIM_LOG=str(log),
            KVSIM_HBM_BYTES=str(32 * GIB),
            KVPLAN_ASCEND_DRIVER=str(tmp_path),
        )
        accelerator = report["accelerator"]
        assert accelerator["library"] == str(build() / "lib64/libacl_rt.so")
        assert (accelerator["version"], accelerator["missing"]) == ("8.5.0", [])
        assert accelerator["hccl"]["library"] == str(build() / "lib64/libhcomm.so")
        assert accelerator["hccl"]["generation"] == "global"
        assert [device["id"] for device in accelerator["devices"]] == [0, 1]
        for device in accelerator["devices"]:
            assert (device["product"], device["max_batch"]) == ("A2", 256)
            assert device["free_bytes"] <= device["total_bytes"] == 32 * GIB
            assert device["driver"] == "25.5.0"
        assert transport(report, "hccl")["reaches"] == ["device", "host"]
        assert transport(report, "local")["reaches"] == ["host"]
        assert [(copy["works"], copy["one_by_one"]) for copy in report["copies"]] == [
            (True, "")
        ] * 3
        assert unreleased(log) == set()

    def test_cann_8_1_is_described(self) -> None:
        report = simulated("8.1")
        accelerator = report["accelerator"]
        assert accelerator["library"].endswith("/libascendcl.so")
        assert accelerator["version"].startswith("8.1")
        assert not accelerator["has_batch"]
        lacks = {symbol["name"]: symbol["cost"] for symbol in accelerator["missing"]}
        assert "one descriptor at a time" in lacks["aclrtMemcpyBatchAsync"]
        assert "LocalCommRes" in lacks["aclrtGetPhyDevIdByLogicDevId"]
        (copy,) = [
            each for each in report["copies"] if (each["local"], each["remote"]) == TO_DEVICE
        ]
        assert copy["works"]
        assert "aclrtMemcpyBatch" in copy["one_by_one"]
        assert transport(report, "hccl")["works"]

    def test_a_device_that_refuses_batches_is_described(self) -> None:
        report = simulated("batch-unsupported")
        (copy,) = [
            each for each in report["copies"] if (each["local"], each["remote"]) == TO_DEVICE
        ]
        assert copy["works"]
        assert "207000 (feature not supported)" in copy["one_by_one"]

    def test_the_second_version_of_batches_suffices(self) -> None:
        """The report lacks nothing, because either version is the same capability."""
        report = simulated("batch-v2")
        accelerator = report["accelerator"]
        assert (accelerator["has_batch"], accelerator["missing"]) == (True, [])
        assert [copy["one_by_one"] for copy in report["copies"]] == [""] * 3

    def test_libhccl_without_other_libraries_is_described(self) -> None:
        report = simulated("hccl-only")
        assert report["accelerator"]["hccl"]["library"].endswith("/libhccl.so")
        assert transport(report, "hccl")["works"]

    def test_without_hccl(self, tmp_path: Path) -> None:
        (tmp_path / "lib64").mkdir()
        for name in ("libacl_rt.so", "libkvsim_core.so"):
            (tmp_path / "lib64" / name).write_bytes((build() / "lib64" / name).read_bytes())
        report = found(ASCEND_HOME_PATH=str(tmp_path))
        assert "libhcomm.so" in report["accelerator"]["hccl"]["why_not"]
        assert report["accelerator"]["hccl"]["places"][0]["origin"] == "beside the ACL library"
        assert "libhcomm.so" in transport(report, "hccl")["why_not"]
        assert all(copy["works"] for copy in report["copies"])

    def test_950(self) -> None:
        report = simulated(KVSIM_SOC="Ascend950")
        assert report["accelerator"]["devices"][0]["max_batch"] == 64
        assert report["accelerator"]["hccl"]["generation"] == "per_comm"
        assert transport(report, "hccl")["reaches"] == ["device"]

    def test_cann_9_1_is_described(self) -> None:
        """CANN 9.1 has HIXL's client/server mode, which earlier versions lack."""
        hixl = simulated("9.1")["accelerator"]["hixl"]
        assert hixl["library"] == str(build("9.1") / "lib64/libcann_hixl.so")
        assert (hixl["generation"], hixl["missing"]) == ("client_server", [])
        assert "libcann_hixl.so" in simulated("8.5")["accelerator"]["hixl"]["why_not"]

    def test_another_device(self) -> None:
        report = simulated("8.5", "--device-id", "5")
        assert "device_id=5 is out of range [0, 2)" in report["accelerator"]["why_not"]
        assert len(report["accelerator"]["devices"]) == 2
        assert "no Ascend device" in transport(report, "hccl")["why_not"]

    def test_the_address_of_a_device(self, tmp_path: Path) -> None:
        conf = tmp_path / "hccn.conf"
        conf.write_text("address_0=10.1.2.3\n")
        report = simulated(KVPLAN_HCCN_CONF=str(conf))
        first, second = (each["address"] for each in report["accelerator"]["devices"])
        assert (first["device_ip"], second["device_ip"]) == ("10.1.2.3", None)

    def test_the_text_has_all_findings(self) -> None:
        text = info("-v", ASCEND_HOME_PATH=str(build()), KVSIM_DEVICES="1")
        for part in ("libacl_rt.so", "CANN 8.5.0", "libhcomm.so", "total_bytes"):
            assert part in text
        assert "stopped" not in text


TO_DEVICE = ("host", "device")


def unreleased(log: Path) -> set[str]:
    """Return the resources that the looking process did not release."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    leaks = [line for line in lines if line["call"] == "leaks"]
    assert leaks
    kinds = ("streams", "events", "device_bytes", "pinned", "regions", "comms")
    return {kind for line in leaks for kind in kinds if line.get(kind)}


def test_the_cost_of_every_missing_call_is_reported() -> None:
    header = (ROOT / "include/kvnative/acl.h").read_text()
    optional = header.split("#define KVN_ACL_OPTIONAL(X, NEWER)")[1].split("typedef")[0]
    assert set(COSTS) == set(re.findall(r" X\(aclError, (\w+),", optional))


@pytest.mark.parametrize("product", [A2, A3, A950], ids=lambda case: case.name)
def test_documents_say_the_same_of_products(product: Any) -> None:
    (row,) = [
        line
        for line in (ROOT / "docs/how-to/ascend.md").read_text().splitlines()
        if re.match(rf"\| {product.name}\b.*descriptors", line)
    ]
    assert f"{product.max_batch} descriptors" in row
    assert ("host" in product.registers) == ("pinned host memory" in row)
