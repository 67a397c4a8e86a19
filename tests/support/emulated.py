"""pytest plugin of tools/arm64_test: skips tests that an emulator cannot run, and lists them.

Each row of `LACKS` names a feature in which qemu-user differs from Linux, and the tests of that
feature, as patterns of their node ids. A pattern that matches no test of a collected file is an
error, so that no pattern is outdated. KVPLAN_EMULATED=all runs these tests, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest


class Lack(NamedTuple):
    """A feature that cannot be tested under emulation."""

    what: str
    why: str
    tests: tuple[str, ...]


LACKS = (
    Lack(
        "pages made present or huge",
        "madvise does nothing, and says that it did; mincore finds no page; hugetlbfs is missing.",
        (
            "tests/native/test_arena.py::test_prefault_makes_every_page_present",
            "tests/native/test_pages.py::TestPopulating::test_existing_pages_are_mapped[*",
            "tests/native/test_pages.py::TestPopulating::test_holes_stay_holes",
            "tests/native/test_pages.py::TestPopulating::test_later_pages_are_found*",
            "tests/native/test_pages.py::TestPopulating::test_pages_that_were_populated*",
            "tests/native/test_pages.py::TestPopulating::test_a_walk_takes_turns",
            "tests/native/test_pages.py::TestHugePages::test_an_option_selects_small_pages",
            "tests/native/test_pages.py::TestHugetlb::test_without_reserved_pages*",
            "tests/transport/test_populating.py::*",
            "tests/transport/test_memory_limit.py::*test_prefault_takes_every_page_at_once*",
            "tests/datadist/test_populated.py::*",
        ),
    ),
    Lack(
        "memory of a NUMA node",
        "mbind and move_pages do not exist (ENOSYS).",
        (
            "tests/native/test_pages.py::TestNode::test_others_are_refused*",
            "tests/native/test_host_backend.py::test_the_node_of_a_page_that_exists",
            "tests/engine/test_numa.py::test_copying_threads_are_spread_over_all_nodes",
        ),
    ),
    Lack(
        "a word that says that a peer lives",
        "set_robust_list does not exist (ENOSYS), nor filters of calls: the system is asked.",
        (
            "tests/transport/test_life.py::test_a_forked_child_has_a_word_of_its_own",
            "tests/transport/test_life.py::test_tables_come_and_go_in_any_order",
            "tests/transport/test_life.py::test_a_check_makes_no_system_call*",
            "tests/transport/test_life.py::test_the_thread_starts_with_large_thread_local_storage*",
            "tests/transport/test_life.py::test_a_kill_while_a_table_is_closed_leaves_no_live_word*",
            "tests/transport/test_life.py::test_a_kill_is_seen_with_more_tables_than_the_kernel_marks",
            "tests/transport/test_life.py::test_the_child_of_a_fork_without_handlers_has_a_word*",
        ),
    ),
    Lack(
        "processes of another user, or less visible",
        "The emulated machine is a user namespace, which has one user and may not mount /proc.",
        (
            "tests/transport/test_connect.py::TestPermission::test_one_user_is_enough*",
            "tests/transport/test_connect.py::TestPermission::test_a_peer_of_another_user_is_refused*",
            "tests/transport/test_connect.py::TestPermission::test_a_peer_that_is_not_dumpable",
            "tests/transport/test_connect.py::TestNamespaces::test_a_proc_that_hides_others_is_refused",
            "tests/execution/test_tuning.py::test_a_file_of_another_user_is_not_used",
            "tests/control/test_authentication.py::*test_is_refused_when_it_belongs_to_another_user*",
            "tests/control/test_direct.py::test_another_user_that_knows*",
            "tests/control/test_user_key.py::test_a_file_of_another_user_is_refused",
            "tests/control/test_user_key.py::test_the_home_of_another_user_is_left_alone",
        ),
    ),
    Lack(
        "a machine without OpenSSL",
        "ldconfig names the libraries of this machine, which the test hides, and not the emulated.",
        ("tests/tcp/test_encrypted.py::test_without_libcrypto_encryption_is_refused",),
    ),
    Lack(
        "filters of calls",
        "prctl refuses them (EINVAL).",
        ("tests/transport/test_connect.py::test_a_sandbox_*",),
    ),
    Lack(
        "floods",
        "To make thousands of connections takes longer than what they are to keep out waits.",
        (
            "tests/control/streams/test_hostile_streams.py::test_a_flood_of_half_open_connections*",
            "tests/control/test_hostile.py::test_a_flood_from_one_address*",
        ),
    ),
    Lack(
        "much data that is encrypted",
        "It takes 30 times as long, and passes deadlines; tests with little data are run.",
        (
            "tests/tcp/test_transfers.py::*[encrypted*",
            "tests/tcp/test_device.py::*[encrypted*",
            "tests/tcp/test_abandoned.py::*[encrypted*",
            "tests/transport/tcp/test_transfers.py::*encrypted*",
            "tests/transport/tcp/test_endings.py::*encrypted*",
        ),
    ),
    Lack(
        "fork beside threads",
        "qemu 7.2 ends the child in an assertion of its own (cpu == current_cpu).",
        (
            "tests/native/test_executor_processes.py::test_a_forked_child_makes_its_own",
            "tests/transport/tcp/test_linking.py::test_a_forked_child_leaves_all_to_its_parent",
        ),
    ),
    Lack(
        "a limit of address space",
        "RLIMIT_AS is the emulator's own, which ends where memory is refused or 10 TB asked for.",
        (
            "tests/native/test_out_of_memory.py::test_no_memory_for_*",
            "tests/transport/test_memory_limit.py::test_more_than_the_available_memory_is_allocated_on_request",
        ),
    ),
    Lack(
        "all interleavings of tcp",
        "Their scheduler runs one thread at a time on any machine: nothing of aarch64 is in it.",
        ("tests/tcp/test_interleavings.py::*",),
    ),
)

_REASON = "emulated, without "


def _fits(item: pytest.Item, pattern: str) -> bool:
    # Brackets enclose parameters here, not character sets.
    return fnmatchcase(item.nodeid, pattern.replace("[", "[[]"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KVPLAN_EMULATED") == "all":
        return
    files = {value.nodeid.partition("::")[0] for value in items}
    is_part = config.option.keyword or any("::" in arg for arg in config.args)
    for lack in LACKS:
        for pattern in lack.tests:
            found = [value for value in items if _fits(value, pattern)]
            if not found and not is_part and pattern.partition("::")[0] in files:
                raise pytest.UsageError(f"{__name__}: no test fits {pattern}")
            for item in found:
                item.add_marker(pytest.mark.skip(reason=_REASON + lack.what))


def _left_out(reports: list[pytest.TestReport], lack: Lack) -> Iterator[str]:
    """Yield the names of tests that a lack left out, without parameters."""
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason.removeprefix("Skipped: ") == _REASON + lack.what:
            yield re.sub(r"\[.*", "", report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    terminalreporter.section("what cannot be tested under emulation")
    for lack in LACKS:
        names = list(_left_out(reports, lack))
        terminalreporter.write_line(f"{lack.what}: {len(names)} tests. {lack.why}")
        for name in sorted(set(names)):
            terminalreporter.write_line(f"    {name} ({names.count(name)})")
