"""The variants: their libraries, symbols and version."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ascend_sim.acl_library import ROOT, in_process
from tests.ascend_sim.build import VARIANTS, build

YOUNGER = [  # first contained in 8.5
    "aclrtHostRegisterV2",
    "aclrtGetDeviceInfo",
    "aclrtGetPhyDevIdByLogicDevId",
    "aclrtLaunchHostFunc",
    "aclrtMemcpyBatch",
    "aclrtMemcpyBatchAsync",
]
LIBRARIES = {
    "8.1": {"libascendcl.so", "libhccl.so"},
    "8.5": {"libacl_rt.so", "libascendcl.so", "libhcomm.so", "libhccl.so"},
    "hccl-only": {"libacl_rt.so", "libascendcl.so", "libhccl.so"},
    "batch-unsupported": {"libacl_rt.so", "libascendcl.so", "libhcomm.so", "libhccl.so"},
    "batch-v2": {"libacl_rt.so", "libascendcl.so", "libhcomm.so", "libhccl.so"},
}
LIBRARIES["9.0"] = LIBRARIES["9.1"] = LIBRARIES["8.5"] | {"libcann_hixl.so"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_its_libraries_and_version(variant: str) -> None:
    home = build(variant)
    found = {path.name for path in (home / "lib64").iterdir()}
    assert found == LIBRARIES[variant] | {"libkvsim_core.so"}
    version = (home / "runtime" / "version.info").read_text()
    assert version == f"Version={VARIANTS[variant].cann}\n"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_the_symbols_of_its_version(variant: str) -> None:
    old = ["aclrtMemcpyAsync", "aclrtPointerGetAttributes", "aclrtStreamAbort"]
    second = ["aclrtMemcpyBatchV2", "aclrtMemcpyBatchAsyncV2"]
    names = [*YOUNGER, *second, *old]
    found = in_process(f"answer([name for name in {names} if hasattr(acl, name)])", variant)
    expected = {"8.1": old, "batch-v2": [*YOUNGER[:-2], *second, *old]}
    assert found == expected.get(variant, [*YOUNGER, *old])


def test_only_the_interface_is_exported() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(build() / "lib64" / "libacl_rt.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[-1] for line in listing.stdout.splitlines()]
    assert names
    # ACL's own names, and names of the runtime below it in versions whose ACL lacks them.
    assert all(name.startswith(("acl", "rt")) for name in names)


def test_a_second_build_changes_nothing() -> None:
    library = build() / "lib64" / "libacl_rt.so"
    before = library.stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "-m", "tests.ascend_sim.build", "8.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout == f"{build()}\n"
    assert library.stat().st_mtime_ns == before


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"variant='9': known are 8\.1, 8\.5, "):
        build("9")
