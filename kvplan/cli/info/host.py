"""The host apart from accelerators: Python, native modules, limits of the system."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import kvplan
from kvnative.cores import usable_cores
from kvplan.status import LLMException

_TRIED_NBYTES = 4 << 20
_HUGETLB = ("Hugepagesize", "HugePages_Total", "HugePages_Free", "HugePages_Rsvd")
_DESCRIPTORS_OF_A_LINK = {"local": 6, "ucx": 5}  # file descriptors at each end


def describe() -> dict[str, object]:
    """Return a description of the host, ready for JSON."""
    return {
        "kvplan": kvplan.__version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "cores": usable_cores(),
        },
        "native_modules": _native_modules(),
        "copies_tuned": _tuning(),
        "user_key": _user_key(),
        "limits": _limits(),
        "pages": _pages(),
    }


def _native_modules() -> dict[str, str]:
    """Return the error of each native module by name; empty if it loads."""
    try:
        import kvnative
    except ImportError as error:
        return {"kvnative": str(error)}
    folder = Path(str(kvnative.__file__)).parent
    # By the stubs, which exist also for modules that were not built.
    return {stub.stem: _load(f"kvnative.{stub.stem}") for stub in sorted(folder.glob("_*.pyi"))}


def _tuning() -> dict[str, object]:
    """Return the tuning of copies for an engine in this environment, and its source."""
    try:
        from kvplan.execution.tuning import choose, load_tuning, tuning_path

        choice = choose()
        found = load_tuning() if choice.source == "measured" else None
        where = str(tuning_path())
    except (ImportError, LLMException) as error:
        return {"why_not": str(error)}
    return {
        "why_not": "",
        **choice.tuning._asdict(),
        "source": choice.source,
        "note": choice.note,
        "path": where,
        "measured": found.measured if found else None,
        "reasons": list(found.reasons) if found else [],
    }


def _user_key() -> dict[str, object]:
    from kvplan.control.auth import describe_user_key  # slow: loads ZeroMQ

    return describe_user_key()._asdict()


def _load(module: str) -> str:
    try:
        import_module(module)
    except Exception as error:  # any error is part of the report
        return f"{type(error).__name__}: {error}"
    return ""


def _limits() -> dict[str, object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "open_files": {"soft": soft, "hard": hard},
        "links_by_open_files": {
            name: None if soft < 0 else soft // each
            for name, each in _descriptors_of_a_link().items()
        },
        "ptrace_scope": _number_in("/proc/sys/kernel/yama/ptrace_scope"),
        "shared_memory_free_bytes": _free("/dev/shm"),
    }


def _descriptors_of_a_link() -> dict[str, int]:
    """Return the file descriptors of a link at each end, by transport."""
    with suppress(ImportError):  # `native_modules` reports modules that do not load
        from kvplan.transport.tcp.transport import connections_of

        tcp = 5 + 2 * connections_of(usable_cores())
        return {**_DESCRIPTORS_OF_A_LINK, "tcp": tcp}
    return _DESCRIPTORS_OF_A_LINK


def _pages() -> dict[str, object]:
    """Return the page sizes and settings of this host, and the results of trials."""
    meminfo = dict(line.split(":", 1) for line in _text_of("/proc/meminfo").splitlines())
    kib = {name: int(meminfo.get(name, "0").split()[0]) for name in _HUGETLB}
    found: dict[str, object] = {
        "nbytes": resource.getpagesize(),
        "hugetlb": {
            "nbytes": kib["Hugepagesize"] << 10,
            "total": kib["HugePages_Total"],
            "free": kib["HugePages_Free"] - kib["HugePages_Rsvd"],
        },
        "shmem_enabled": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge": None,
        "populates": None,
        "numa_nodes": None,
        "why_not": "",
    }
    try:
        from kvnative._host import Arena, PageWalk, page_use
        from kvplan.engine.numa import numa_nodes

        found["numa_nodes"] = {node: len(cores) for node, cores in numa_nodes().items()}
        with Arena(_TRIED_NBYTES, prefault=True) as arena:
            huge = page_use(arena.address, arena.nbytes)[2]
            found["huge"] = None if huge is None else huge == arena.nbytes
            found["populates"] = PageWalk(arena.nbytes).advance(arena, 1.0) > 0
    except (ImportError, OSError, MemoryError, NotImplementedError) as error:
        found["why_not"] = str(error)
    return found


def _chosen(path: str) -> str:
    """Return the word in brackets, as in "always [never]"; empty if the file does not exist."""
    return _text_of(path).partition("[")[2].partition("]")[0]


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _free(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
