"""The number of usable cores, with control groups simulated by files of a folder."""

import os
from pathlib import Path

import pytest

from kvnative.cores import usable_cores

ALL = len(os.sched_getaffinity(0))


class Groups:
    """A tree of cgroups."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()

    def belongs(self, *rows: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{row}\n" for row in rows))

    def write(self, path: str, text: str) -> None:
        place = self.groups / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def cores(self) -> int:
        return usable_cores(proc=self.proc, groups=self.groups)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", ALL),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("6400000 100000", ALL),
        ("nonsense", ALL),
        ("1 0", ALL),
        ("", ALL),
    ],
)
def test_a_limit_of_the_own_group(groups: Groups, limit: str, cores: int) -> None:
    groups.belongs("0::/pod/worker")
    groups.write("pod/worker/cpu.max", limit + "\n")
    assert groups.cores() == cores


def test_version_1_if_the_folder_has_another_name_than_the_hierarchy(
    groups: Groups,
) -> None:
    """Linux 3.10 names cpuacct,cpu, but the folder is cpu,cpuacct, with a link for each name."""
    groups.belongs("4:cpuacct,cpu:/pod")
    groups.write("cpu/pod/cpu.cfs_quota_us", "100000\n")
    groups.write("cpu/pod/cpu.cfs_period_us", "100000\n")
    assert groups.cores() == 1


def test_a_part_of_a_core_counts_as_one(groups: Groups) -> None:
    groups.belongs("0::/")
    groups.write("cpu.max", "150000 100000\n")
    assert groups.cores() == min(ALL, 2)


def test_the_tightest_limit_on_the_way_to_the_root_counts(groups: Groups) -> None:
    groups.belongs("0::/pod/worker")
    groups.write("pod/worker/cpu.max", "max 100000\n")
    groups.write("pod/cpu.max", "90000 100000\n")
    assert groups.cores() == 1


def test_a_path_of_the_host_that_a_container_does_not_have(groups: Groups) -> None:
    groups.belongs("0::/kubepods/pod1/abc")
    groups.write("cpu.max", "100000 100000\n")
    assert groups.cores() == 1


def test_version_1(groups: Groups) -> None:
    groups.belongs("4:memory:/x", "3:cpu,cpuacct:/x")
    groups.write("cpu,cpuacct/x/cpu.cfs_quota_us", "100000\n")
    groups.write("cpu,cpuacct/x/cpu.cfs_period_us", "100000\n")
    assert groups.cores() == 1
    groups.write("cpu,cpuacct/x/cpu.cfs_quota_us", "-1\n")
    assert groups.cores() == ALL


def test_without_control_groups(groups: Groups, tmp_path: Path) -> None:
    assert groups.cores() == ALL
    assert usable_cores() <= ALL
