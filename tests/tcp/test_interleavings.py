"""All interleavings of the threads of the native side of tcp, with few preemptions.

The sources are compiled unchanged, but a scheduler that runs one thread at a time
(`tests/tcp/interleavings`) replaces the calls in which threads meet: locks, atomics, sockets,
epoll. A failure prints `again:` and the arguments that repeat it. Bugs that are planted in a copy
of a source must be found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT, KVN_UNMAPPED

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/tcp/interleavings"
NATIVE = ROOT / "kvnative/src"
FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-fno-strict-aliasing", "-w"),
    "-U_FORTIFY_SOURCE",  # which would forbid longjmp between stacks
    *(f"-I{ROOT / 'include'}", f"-I{NATIVE}", f"-I{MODEL}"),
)
AS_THEY_ARE = (
    *(MODEL / name for name in ("scheduler.c", "locks.c", "files.c")),
    *(NATIVE / name for name in ("core/intervals.c", "core/report.c")),
    *(NATIVE / name for name in ("device/device.c", "device/copier.c", "tcp/wire.c")),
)
CONTROLLED = (
    *(MODEL / name for name in ("ends.c", "scenarios.c")),
    *(NATIVE / name for name in ("core/thread.c", "tcp/table.c")),
    *(NATIVE / "tcp" / f"{name}.c" for name in ("stream", "stage", "server", "service")),
    *(
        NATIVE / "tcp" / f"{name}.c"
        for name in ("client", "asking", "answers", "flight", "transfer")
    ),
    *(NATIVE / "tcp" / f"{name}.c" for name in ("link", "backend")),
)

# Minimum number of interleavings of each scenario, and all its outcomes.
SCENARIOS: dict[str, tuple[int, set[int]]] = {
    "submit_pull": (2000, {KVN_OK}),
    "submit_push": (2000, {KVN_OK}),
    "submit_pull_through_narrow": (4000, {KVN_OK}),
    "submit_push_through_narrow": (4000, {KVN_OK}),
    "submit_to_another": (800, {KVN_OK}),
    "submit_two": (3000, {KVN_OK}),
    "submit_after_another": (5000, {KVN_OK}),
    "wait_pull": (3000, {KVN_OK}),
    "wait_push_through_narrow": (7000, {KVN_OK}),
    "wait_late": (4000, {KVN_OK}),
    "two_wait": (10_000, {KVN_OK}),
    "two_submit": (20_000, {KVN_OK}),
    "two_wait_with_deadline": (500, {KVN_OK, KVN_TIMEOUT}),
    "wait_for_one_of_two": (700, {KVN_OK}),
    "wait_with_deadline": (8000, {KVN_OK, KVN_TIMEOUT}),
    "give_up_pull": (8000, {KVN_OK, KVN_CANCELLED}),
    "give_up_pull_in_narrow": (700, {KVN_OK, KVN_CANCELLED}),
    "give_up_push": (1000, {KVN_OK, KVN_CANCELLED, KVN_PEER_GONE}),
    "give_up_waited_pull": (5000, {KVN_OK, KVN_CANCELLED}),
    "give_up_waited_push": (20_000, {KVN_OK, KVN_CANCELLED}),
    "close_while_submitted": (700, {KVN_OK, KVN_PEER_GONE}),
    "close_waited_pull": (2000, {KVN_OK, KVN_PEER_GONE}),
    "close_waited_push": (2000, {KVN_OK, KVN_PEER_GONE}),
    "close_and_free": (4000, {KVN_OK, KVN_PEER_GONE}),
    "close_twice": (2000, {KVN_OK, KVN_PEER_GONE}),
    "peer_closes": (1000, {KVN_OK, KVN_PEER_GONE}),
    "peer_closes_while_waited_for": (600, {KVN_OK, KVN_PEER_GONE}),
    "stop_service": (5000, {KVN_OK, KVN_PEER_GONE}),
    "stop_while_closed": (10_000, set()),
    "deregister_pulled": (30_000, {KVN_OK, KVN_UNMAPPED}),
    "deregister_pushed": (3000, {KVN_OK, KVN_UNMAPPED}),
    "deregister_pulled_from_another": (9000, {KVN_OK, KVN_UNMAPPED}),
    "encrypted_submit_pull": (700, {KVN_OK}),
    "encrypted_submit_push": (700, {KVN_OK}),
    "encrypted_wait_with_deadline": (500, {KVN_OK, KVN_TIMEOUT}),
    "encrypted_give_up_pull": (1000, {KVN_OK, KVN_CANCELLED}),
    "encrypted_give_up_push": (1000, {KVN_OK, KVN_CANCELLED, KVN_PEER_GONE}),
    "encrypted_close": (200, {KVN_OK, KVN_PEER_GONE}),
    "encrypted_deregister": (2000, {KVN_OK, KVN_UNMAPPED}),
}


class Planted(NamedTuple):
    """Text of a source, its replacement, and the scenario and failure that show the bug."""

    name: str
    source: str
    old: str
    new: str
    scenario: str
    found: str


STUCK = "no thread can continue"
GONE = "that is not there|after it was freed|which is (closed|none)|must not|Segmentation fault"

PLANTED = [
    Planted(
        "submit does not hand over to the service",
        "client.c",
        "    else if (caller != KVN_CALLER_WAITS)\n        hand_over(self);\n",
        "",
        "submit_pull",
        STUCK,
    ),
    Planted(
        "who stops driving does not hand over",
        "client.c",
        "        spin(self, it, deadline_ns);\n    hand_over(self);\n",
        "        spin(self, it, deadline_ns);\n",
        "wait_with_deadline",
        STUCK,
    ),
    Planted(
        "the service does not ask for room",
        "client.c",
        "            events |= EPOLLOUT;\n",
        "            ;\n",
        "submit_push_through_narrow",
        STUCK,
    ),
    Planted(
        "what ends is not taken off the wire",
        "transfer.c",
        "            asked->transfer = NULL;\n",
        "            ;\n",
        "give_up_pull",
        GONE,
    ),
    Planted(
        "who waits is not woken",
        "transfer.c",
        "    pthread_cond_broadcast(&it->changed);\n",
        "",
        "two_wait",
        STUCK,
    ),
    Planted(
        "a transfer is let go while it is finished",
        "client.c",
        "    lock_soon(it->client);\n"
        "    pthread_mutex_unlock(&it->client->mutex);\n"
        "    pthread_cond_destroy",
        "    pthread_cond_destroy",
        "submit_pull",
        GONE,
    ),
    Planted(
        "a push ends while the peer takes it",
        "transfer.c",
        "    if (it->kind == KVN_TCP_PULL || it->in_flight == 0)\n"
        "        kvn_tcp_transfer_finish(it);\n",
        "    kvn_tcp_transfer_finish(it);\n",
        "give_up_push",
        "the push was given up",
    ),
    Planted(
        "a connection that has failed takes transfers",
        "client.c",
        "    kvn_tcp_transfer_put_in(self, it);\n    if (self->has_failed) {\n",
        "    kvn_tcp_transfer_put_in(self, it);\n    if (false) {\n",
        "close_while_submitted",
        STUCK,
    ),
    Planted(
        "a connection is forgotten while it is served",
        "service.c",
        "    while (epoch % 2 == 1 && atomic_load(&by->epoch) == epoch)\n        sched_yield();\n",
        "    (void)epoch;\n",
        "close_and_free",
        GONE,
    ),
    Planted(
        "a connection is looked up before its epoch begins",
        "service.c",
        "    atomic_fetch_add(&self->epoch, 1); /* before `find`: see kvn_tcp_service_forget */\n"
        "    kvn_tcp_watched *it = find(self, key);\n",
        "    kvn_tcp_watched *it = find(self, key);\n    atomic_fetch_add(&self->epoch, 1);\n",
        "close_and_free",
        GONE,
    ),
    Planted(
        "a thread that is stopped is not woken",
        "service.c",
        "    if (write(self->wake, &one, sizeof one) == sizeof one)\n",
        "    if (one == 1)\n",
        "stop_service",
        STUCK,
    ),
    Planted(
        "a thread is woken before it is stopped",
        "service.c",
        "    atomic_store(&self->stops, true);\n"
        "    if (write(self->wake, &one, sizeof one) == sizeof one)\n",
        "    write(self->wake, &one, sizeof one);\n    atomic_store(&self->stops, true);\n",
        "stop_service",
        STUCK,
    ),
    Planted(
        "a row is removed while it is read",
        "table.c",
        "    if (was_there)\n        kvn_tcp_table_wait_for_threads(self);\n",
        "",
        "deregister_pulled",
        "it was deregistered",
    ),
    Planted(
        "removals are counted after the wait",
        "table.c",
        "        atomic_fetch_add(&self->removals, 1);\n"
        "    }\n"
        "    pthread_mutex_unlock(&self->mutex);\n"
        "    if (was_there)\n"
        "        kvn_tcp_table_wait_for_threads(self);\n",
        "    }\n"
        "    pthread_mutex_unlock(&self->mutex);\n"
        "    if (was_there)\n"
        "        kvn_tcp_table_wait_for_threads(self);\n"
        "    atomic_fetch_add(&self->removals, 1);\n",
        "deregister_pulled",
        "it was deregistered",
    ),
    Planted(
        "a range is not looked at again",
        "server.c",
        "        if (!is_still_registered(self)) {\n",
        "        if (false) {\n",
        "deregister_pulled",
        "it was deregistered",
    ),
    Planted(
        "a range is looked at before the table is entered",
        "server.c",
        "        kvn_tcp_table_enter(self->table, thread);\n"
        "        if (!is_still_registered(self)) {\n"
        "            kvn_tcp_table_leave(self->table, thread);\n"
        "            return 0;\n"
        "        }\n",
        "        if (!is_still_registered(self))\n"
        "            return 0;\n"
        "        kvn_tcp_table_enter(self->table, thread);\n",
        "deregister_pulled",
        "it was deregistered",
    ),
    Planted(
        "who sends a record in part does not come again",
        "stream.c",
        "    return flushed < 0 ? flushed : total - (flushed == 0);\n",
        "    return flushed < 0 ? flushed : total;\n",
        "encrypted_submit_pull",
        STUCK,
    ),
    Planted(
        "a link is closed while its transfers go on",
        "link.c",
        "        kvn_tcp_client_fail(&it->client, 0, why);\n",
        "",
        "close_waited_pull",
        f"{STUCK}|{GONE}",
    ),
    Planted(
        "a link is closed while it answers",
        "link.c",
        "        kvn_tcp_service_forget(&it->server.watched);\n",
        "",
        "close_and_free",
        f"{STUCK}|{GONE}",
    ),
]


def compile_to(folder: Path, source: Path, *flags: str | Path) -> Path:
    made = folder / f"{source.stem}.o"
    subprocess.run(["cc", *FLAGS, *flags, "-c", source, "-o", made], check=True)
    return made


def compile_controlled(folder: Path, source: Path, *flags: str) -> Path:
    return compile_to(folder, source, *flags, "-include", MODEL / "redirect.h")


def link(program: Path, objects: list[Path]) -> Path:
    subprocess.run(["cc", "-o", program, *objects, "-pthread", "-ldl"], check=True)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("interleavings")
    with ThreadPoolExecutor(2) as pool:
        controlled = pool.map(lambda source: compile_controlled(folder, source), CONTROLLED)
        as_they_are = pool.map(lambda source: compile_to(folder, source), AS_THEY_ARE)
        return [*controlled, *as_they_are]


@pytest.fixture(scope="module")
def program(objects: list[Path]) -> Path:
    return link(objects[0].parent / "interleavings", objects)


def test_no_scenario_is_left_out(program: Path) -> None:
    assert [line.split()[0] for line in run(program).stdout.splitlines()] == list(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_all_interleavings(program: Path, scenario: str) -> None:
    done = run(program, scenario)
    assert done.returncode == 0, done.stderr
    sys.stdout.write(done.stdout)
    report = re.fullmatch(rf"{scenario}: (\d+) interleavings, outcomes([\d ]*)\n", done.stdout)
    assert report
    at_least, outcomes = SCENARIOS[scenario]
    assert int(report[1]) >= at_least
    assert {-int(part) for part in report[2].split()} == outcomes


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_finds_planted(objects: list[Path], tmp_path: Path, planted: Planted) -> None:
    text = (NATIVE / "tcp" / planted.source).read_text()
    assert text.count(planted.old) == 1
    source = tmp_path / planted.source
    source.write_text(text.replace(planted.old, planted.new))
    changed = compile_controlled(tmp_path, source, "-O0")
    others = [shared for shared in objects if shared.name != changed.name]
    program = link(tmp_path / "planted", [changed, *others])
    found = run(program, planted.scenario)
    assert found.returncode == 1, found.stdout
    assert re.search(planted.found, found.stderr.splitlines()[0]), found.stderr
    again = re.search(r"again: (.*)", found.stderr)
    assert again
    repeated = run(program, *again[1].split())
    assert repeated.returncode == 1
    assert repeated.stderr.splitlines()[0] == found.stderr.splitlines()[0]
