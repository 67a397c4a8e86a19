"""Allocations: limited to the available memory by default, and populated at once on request."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplan import CacheDesc, DataType, Placement
from kvplan.engine.options import Options
from kvplan.engine.registry import CacheRegistry
from kvplan.status import LLMStatusCode
from kvplan.system.limits import memory_limit
from kvplan.transport.local import LocalTransport
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
FAR_TOO_MUCH = 10_000 * GIB
HUGE = CacheDesc(1, (10_000, GIB), DataType.DT_UINT8, Placement.HOST)


def registry(transport: LocalTransport, **options: str) -> CacheRegistry:
    return CacheRegistry([transport], Options.of(options), lambda: None)


def pool(nbytes: int) -> dict[str, str]:
    return {"llm.HostMemPoolConfig": f'{{"memory_size": {nbytes}}}'}


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    with LocalTransport() as local_transport:
        yield local_transport


def test_more_than_the_available_memory_is_refused(transport: LocalTransport) -> None:
    limit = memory_limit()
    assert limit is not None
    for allocate in (
        lambda: transport.allocate(FAR_TOO_MUCH),
        lambda: registry(transport).allocate(HUGE, paged=True),
        lambda: registry(transport, **pool(FAR_TOO_MUCH)),
    ):
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY) as caught:
            allocate()
        for part in (f"={FAR_TOO_MUCH} is more", f" {limit.nbytes} ", "kvplan.allow_overcommit=1"):
            assert part in str(caught.value)


def test_more_than_the_available_memory_is_allocated_on_request(transport: LocalTransport) -> None:
    asked = {"kvplan.allow_overcommit": "1"}
    assert transport.allocate(FAR_TOO_MUCH, allow_overcommit=True).nbytes == FAR_TOO_MUCH
    assert registry(transport, **asked).allocate(HUGE, paged=True)
    assert registry(transport, **asked, **pool(FAR_TOO_MUCH)).allocate(HUGE, paged=True)


@pytest.mark.parametrize("config", [{}, pool(1 << 20)], ids=["of its own", "pool"])
def test_prefault_takes_every_page_at_once(
    transport: LocalTransport, config: dict[str, str]
) -> None:
    for prefault, present in (("0", 0), ("1", 1 << 20)):
        caches = registry(transport, **config, **{"kvplan.prefault": prefault})
        arena = caches.pools.take(Placement.HOST, 1 << 20).allocation
        assert os.fstat(arena.fd).st_blocks * 512 == present  # type: ignore[union-attr]


MEMINFO = "MemTotal:  8388608 kB\nMemFree:  12 kB\nSwapTotal:  1048576 kB\n"  # 8 and 1 GiB
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
NONE = "9223372036854771712"


@pytest.mark.parametrize(
    ("cgroup", "files", "nbytes", "whose"),
    [
        ("0::/\n", {}, 9 * GIB, "this machine"),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": "max"}, 9 * GIB, "this machine"),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": f"{GIB}"}, 2 * GIB, "cgroup /a/b"),
        (
            "0::/a/b\n",
            {f"{V2}/a/memory.max": f"{GIB}", f"{V2}/a/memory.swap.max": "0"},
            GIB,
            "cgroup /a",
        ),
        # In a container the path is that of the host, or outside of the visible tree.
        ("0::/a/b\n", {f"{V2}/memory.max": f"{GIB}"}, 2 * GIB, "cgroup /"),
        ("0::/../a\n", {f"{V2}/memory.max": f"{GIB}"}, 2 * GIB, "cgroup /"),
        (
            "3:cpu:/\n2:hugetlb,memory:/a\n0::/\n",
            {f"{V1}/a/memory.limit_in_bytes": f"{3 * GIB}"},
            4 * GIB,
            "cgroup /a",
        ),
        (
            "2:memory:/a\n",
            {
                f"{V1}/a/memory.limit_in_bytes": NONE,
                f"{V1}/a/memory.memsw.limit_in_bytes": f"{5 * GIB}",
            },
            5 * GIB,
            "cgroup /a",
        ),
    ],
)
def test_the_smallest_of_the_limits_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], nbytes: int, whose: str
) -> None:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path) == (nbytes, whose)


def test_without_proc_nothing_is_limited(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("meminfo", "nbytes"), [("MemTotal: 4 kB\n", 4096), ("SwapTotal: 4 kB\n", None), ("", None)]
)
def test_a_system_may_leave_sizes_out(tmp_path: Path, meminfo: str, nbytes: int | None) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    (tmp_path / "proc" / "self" / "cgroup").touch()
    limit = memory_limit(tmp_path)
    assert (None if limit is None else limit[0]) == nbytes


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of 256 MiB, if this process may make one."""
    folder = Path("/", V1)
    limits = {"memory.limit_in_bytes": 256 << 20, "memory.memsw.limit_in_bytes": 256 << 20}
    if not folder.exists():
        folder, limits = Path("/", V2), {"memory.max": 256 << 20, "memory.swap.max": 0}
    folder /= f"kvplan-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        for name, nbytes in limits.items():
            if (folder / name).exists():  # the files about swap may be missing
                (folder / name).write_text(str(nbytes))
        yield folder
    except OSError as error:
        pytest.skip(f"no cgroup can be limited here: {error}")
    finally:
        folder.rmdir()


def test_a_process_in_a_cgroup_has_the_limit_of_the_cgroup(small_cgroup: Path) -> None:
    code = f"""
from pathlib import Path
import os
Path({str(small_cgroup / "cgroup.procs")!r}).write_text(str(os.getpid()))
from kvplan.transport.local import LocalTransport
transport = LocalTransport()
transport.allocate(255 << 20)
transport.allocate(257 << 20)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"nbytes={257 << 20} is more than the {256 << 20} bytes" in run.stderr
