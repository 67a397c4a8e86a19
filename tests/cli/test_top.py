"""`kvplan top`: rates between two looks, and their printed page."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from kvplan import BlocksCacheKey, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from kvplan.cli import main
from kvplan.cli.top import checked, compared, rendered
from kvplan.control.status_socket import Answer, read_all
from tests.cli.test_command import command
from tests.support.peer import DEADLINE_S

DESC = CacheDesc(2, (16, 4, 2, 8), DataType.DT_FLOAT16)


@pytest.fixture
def engines() -> Iterator[tuple[LlmDataDist, LlmDataDist]]:
    """Two linked engines, with a cache each."""
    with ExitStack() as held:
        prefill, decode = (
            held.enter_context(LlmDataDist(number, LlmRole.MIX)) for number in (71, 72)
        )
        prefill.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        decode.initialize()
        prefill.allocate_blocks_cache(DESC, BlocksCacheKey(71))
        assert prefill.listen_address is not None
        decode.link_clusters([ClusterInfo(71, prefill.listen_address)]).raise_for_status()
        yield prefill, decode


def look() -> list[Answer]:
    """Return the answers of both engines; other engines of earlier tests are left out."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        own = [item for item in read_all() if item.pid == os.getpid()]  # others may be stopped
        both = [
            answer
            for answer in own
            if answer.document and answer.document["cluster_id"] in (71, 72)
        ]
        if len(both) == 2:
            return both
        assert time.monotonic() < deadline, own


def test_rates_are_of_the_time_between_two_looks(
    engines: tuple[LlmDataDist, LlmDataDist],
) -> None:
    decode = engines[1]
    mine = decode.allocate_blocks_cache(DESC)
    arguments = BlocksCacheKey(71), mine, [1, 2], [3, 4]
    decode.pull_blocks(*arguments)  # before the first look, so not counted
    before = look()
    for _ in range(3):
        decode.pull_blocks(*arguments)
    with pytest.raises(Exception, match="out of range"):
        decode.pull_blocks(BlocksCacheKey(71), mine, [99], [3])
    after = look()
    (engine,) = (item for item in compared(before, after) if item.document["cluster_id"] == 72)
    started, ended = (
        next(
            answer.document["seconds"] for answer in answers if answer.document["cluster_id"] == 72
        )
        for answers in (before, after)
        if all(answer.document for answer in answers)
    )
    seconds = ended - started
    assert engine.rates.operations * seconds == pytest.approx(4)
    assert engine.rates.failed * seconds == pytest.approx(1)
    assert engine.rates.pulled * seconds == pytest.approx(3 * 4 * DESC.stride)
    assert engine.rates.pushed == engine.rates.copied == 0
    assert engine.rates.median_us is not None
    assert engine.links[0].pulled == pytest.approx(engine.rates.pulled)


def test_a_new_engine_has_no_transfers(
    engines: tuple[LlmDataDist, LlmDataDist],
) -> None:
    found = compared([], look())
    assert {entry.document["cluster_id"] for entry in found} == {71, 72}
    assert {entry.rates.operations for entry in found} == {0.0}


def shown(answers: list[Answer]) -> str:
    from kvplan.cli.common import console

    out = console()
    with out.capture() as captured:
        out.print(rendered(compared(answers, answers), answers))
    return captured.get()


def document(**changes: Any) -> dict[str, Any]:
    """Return a possible answer of an engine."""
    link = {
        "cluster_id": 1,
        "instance": "ab",
        "state": "LINKED",
        "transport": "local",
        "way": "mapped arenas",
        "passed_over": ["hccl: cluster 71 does not have it: no Ascend device was found"],
        "caches": 2,
        "in_flight": 1,
        "operations": 0,
        "bytes_pulled": 0,
        "bytes_pushed": 0,
        "age_s": 30.0,
        "last_error": "first line\nsecond",
    }
    row = {"operation": "push_layers", "tag": "cmpl-7", "peer": 1, "nbytes": 1 << 20, "age_s": 0.25}
    return {
        "schema_version": 1,
        "cluster_id": 2,
        "role": "DECODER",
        "command": ["/usr/bin/serve.py", "--secret"],
        "listen_address": None,
        "seconds": 5.0,
        "operations": {},
        "links": [link],
        "caches": [{"nbytes": 3 << 30}],
        "leases": 4,
        "in_flight": [row],
    } | changes


def test_the_page_lists_engines_links_and_transfers() -> None:
    answers = [Answer(10, document(), ""), Answer(11, None, "no answer within 1 s")]
    lines = [line.split() for line in shown(answers).splitlines()]
    assert lines[1] == [
        "10",
        "2",
        "DECODER",
        "serve.py",
        "-",
        "1",
        "1",
        "(3.0",
        "GiB)",
        "4",
        "1",
        "0",
        "0",
        "-",
        "-",
        "-",
    ]
    assert lines[2] == ["process", "11:", "no", "answer", "within", "1", "s"]
    assert lines[4] == ["links"]
    linked = "2 1 LINKED local (mapped arenas) 2 1 0 - - 30 s first line"
    assert lines[6] == linked.split()
    why = "2 - 1: not hccl: cluster 71 does not have it: no Ascend device was found"
    assert lines[7] == why.split()
    assert lines[9] == ["in", "flight,", "oldest", "first"]
    assert lines[11] == ["2", "push_layers", "cmpl-7", "1", "1.0", "MiB", "250", "ms"]


def test_a_narrow_terminal_shows_its_first_lines(engines: tuple[LlmDataDist, LlmDataDist]) -> None:
    """A line wider than the terminal would wrap, and push the first ones out."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    arguments = [sys.executable, "-m", "kvplan", "top", "--pid", str(os.getpid())]
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        written = ""
        while "listens at" not in written or len(written.splitlines()) < 24:
            written += os.read(ours, 1 << 16).decode()
        running.send_signal(signal.SIGINT)
        try:
            with suppress(OSError):  # the process has ended
                while os.read(ours, 1 << 16):
                    pass
        finally:
            running.kill()  # otherwise a test that ran out of time would wait for the process
    os.close(ours)
    # A slow machine shows several pages, each from the top: only colours do not move the cursor.
    text = re.sub(r"\x1b\[[0-9;?]*m", "", written)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text).splitlines()
    assert max(map(len, lines)) <= 80
    assert running.returncode == 0


def test_a_pipe_gets_one_page_after_the_other(engines: tuple[LlmDataDist, LlmDataDist]) -> None:
    arguments = ["top", "--pid", str(os.getpid()), "--interval", "0.1"]
    running = subprocess.Popen(
        [sys.executable, "-m", "kvplan", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    with running, running.stdout:
        heads = 0
        for line in running.stdout:
            assert line == f"{line.rstrip()}\n"
            heads += "listens at" in line
            if heads == 3:
                break
        running.send_signal(signal.SIGINT)
        # if closed before the signal has come, the pipe would end the command
        running.stdout.read()
    assert running.returncode == 0


def test_top_goes_on_if_ctrl_c_is_ignored() -> None:
    """A shell starts commands with `&` so: the next Ctrl-C is for another program."""
    start = 'trap "" INT; exec "$@"'
    arguments = ["-m", "kvplan", "top", "--pid", str(os.getpid()), "--interval", "0.1"]
    with subprocess.Popen(
        ["sh", "-c", start, "sh", sys.executable, *arguments], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline()
            running.send_signal(signal.SIGINT)
            assert [line for _ in range(6) if (line := running.stdout.readline()).strip()]
            assert running.poll() is None
        finally:
            running.kill()


def test_without_engines_a_message_is_printed() -> None:
    assert shown([]).startswith("No engine of this user is running, or none that --cluster and")


def test_once_and_json(engines: tuple[LlmDataDist, LlmDataDist]) -> None:
    own = ("top", "--pid", str(os.getpid()), "--interval", "0.1")
    once = command(*own, "--once")
    assert once.returncode == 0, once.stderr
    assert once.stdout.count("LINKED") == 2
    one = command(*own, "--json", "--cluster", "72")
    said = json.loads(one.stdout)
    (engine,) = said["engines"]
    assert (engine["cluster_id"], engine["rates"]["pulled"]) == (72, 0)
    assert engine["links"][0]["cluster_id"] == 71
    misused = command("top", "--interval", "0")
    assert misused.returncode == 2
    assert "0.1<=x<=3600" in misused.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": "now"},
        {"links": [{}]},
        {"operations": {"pull_blocks": None}},
        {"command": [1]},
        {"caches": 7},
        {"in_flight": [[]]},
    ],
    ids=json.dumps,
)
def test_an_answer_of_another_kind_is_reported(changes: dict[str, Any]) -> None:
    impostor = checked(Answer(9, document(**changes), ""))
    text = shown([impostor, checked(Answer(10, document(), ""))])
    assert "process 9: not an answer of an engine: " in text
    assert "serve.py" in text


def test_an_engine_that_does_not_answer_is_listed_alone() -> None:
    text = shown([Answer(9, None, "no answer in time")])
    assert "process 9: no answer in time" in text
    assert "No engine" not in text


def test_answers_of_engines_do_not_command_the_terminal() -> None:
    escape = "\x1b[2J"
    said = document(role=escape, command=[escape], listen_address=escape)
    said["links"][0] |= dict.fromkeys(("state", "transport", "way", "last_error"), escape)
    said["links"][0]["passed_over"] = [escape]
    said["in_flight"][0] |= dict.fromkeys(("operation", "tag"), escape)
    assert "\x1b" not in shown([checked(Answer(10, said, "")), Answer(11, None, escape)])


def test_a_cancelled_transfer_is_not_a_failure() -> None:
    def did(**statuses: int) -> list[Answer]:
        row = {"statuses": statuses, "nbytes": 0, "count": sum(statuses.values()), "buckets": []}
        seconds = float(sum(statuses.values()))
        return [Answer(10, document(seconds=seconds, operations={"pull_cache": row}), "")]

    after = did(LLM_SUCCESS=4, LLM_CANCELLED=3, LLM_TIMEOUT=2, LLM_FAILED=1)
    (engine,) = compared(did(LLM_SUCCESS=2), after)
    assert engine.rates.operations == pytest.approx(1)
    assert engine.rates.failed * 8 == pytest.approx(3)


@pytest.mark.parametrize(("instance", "rate"), [("ab", 7.0), ("cd", 0.0)])
def test_a_link_with_a_peer_that_was_restarted_begins_anew(instance: str, rate: float) -> None:
    """The counters belong to another link; the peer has the same cluster id."""

    def said(seconds: float, **link: Any) -> list[Answer]:
        links = [document()["links"][0] | {"cluster_id": 3}, document()["links"][0] | link]
        return [Answer(10, document(seconds=seconds, links=links), "")]

    after = said(2.0, instance=instance, operations=27, bytes_pulled=27, bytes_pushed=27)
    (engine,) = compared(said(1.0, operations=20, bytes_pulled=20, bytes_pushed=20), after)
    other, link = engine.links
    assert (other.operations, other.pulled, other.pushed) == (0, 0, 0)
    assert (link.operations, link.pulled, link.pushed) == (rate, rate, rate)


def counted(count: int, nbytes: int, failed: int, fast: int) -> dict[str, Any]:
    """Return the row of an operation: `fast` of `count` calls took 10 us, the others a second."""
    statuses = {"LLM_SUCCESS": count - failed - 1, "LLM_CANCELLED": 1, "LLM_TIMEOUT": failed}
    buckets = [[1e-5, fast], [1.0, count], [None, count]]
    return {"count": count, "nbytes": nbytes, "statuses": statuses, "buckets": buckets}


def said(seconds: float, cluster_id: int, rows: dict[str, Any], *links: Any) -> Answer:
    document = {
        "seconds": seconds,
        "cluster_id": cluster_id,
        "listen_address": "127.0.0.1:1",
        "operations": rows,
        "links": [
            {
                "cluster_id": peer,
                "instance": instance,
                "operations": operations,
                "bytes_pulled": pulled,
                "bytes_pushed": pushed,
            }
            for peer, instance, operations, pulled, pushed in links
        ],
    }
    return Answer(50, document, "")


def test_each_rate_is_of_its_own_engine_peer_and_kind() -> None:
    """Two engines of one process; the second look has them in another order."""
    names = ("pull_blocks", "gather_blocks", "push_cache", "copy_blocks", "swap_blocks", "notify")
    before = [
        said(
            10, 1, {"pull_blocks": counted(5, 1000, 1, 1)}, (7, "a", 3, 100, 10), (8, "b", 1, 1, 1)
        ),
        said(20, 2, {}, (7, "c", 0, 0, 0)),
        Answer(50, None, "no answer"),
    ]
    after = [
        said(25, 2, {"link": counted(50, 0, 40, 0)}, (8, "b", 9, 9, 9), (7, "c", 5, 50, 500)),
        said(
            14,
            1,
            {name: counted(9 + i, 1000 << i, 2, 9) for i, name in enumerate(names)},
            (8, "b", 5, 41, 401),
            (7, "other", 9, 900, 900),
        ),
        Answer(51, None, "no answer"),
        said(99, 3, {"pull": counted(9, 9, 3, 9)}, (7, "c", 5, 50, 500)),
    ]
    second, first, third = compared(before, after)
    assert [engine.document["cluster_id"] for engine in (first, second, third)] == [1, 2, 3]
    rates = first.rates
    assert rates.operations == (sum(range(9, 15)) - 5) / 4
    assert rates.failed == (2 * 6 - 1) / 4
    assert (rates.pulled, rates.pushed, rates.copied) == (
        2000 / 4,
        4000 / 4,
        (8000 + 16000) / 4,
    )
    assert (rates.median_us, rates.slowest_us) == (10.0, 1e6)
    linked = [(rate.operations, rate.pulled, rate.pushed) for rate in first.links]
    assert linked == [(1.0, 10.0, 100.0), (0.0, 0.0, 0.0)]
    rates = second.rates
    assert (rates.operations, rates.failed) == (10.0, 8.0)
    assert (rates.pulled, rates.pushed, rates.copied) == (0, 0, 0)
    assert (rates.median_us, rates.slowest_us) == (None, None)
    linked = [(rate.operations, rate.pulled, rate.pushed) for rate in second.links]
    assert linked == [(0.0, 0.0, 0.0), (1.0, 10.0, 100.0)]
    assert (third.rates.operations, third.rates.failed, len(third.links)) == (0, 0, 1)
    assert third.links[0].operations == 0


def test_the_median_is_of_the_transfers_of_all_operations() -> None:
    rows = {"pull_blocks": counted(6, 0, 0, 6), "push_blocks": counted(5, 0, 0, 0)}
    for order in (rows, dict(reversed(rows.items()))):
        (engine,) = compared([said(1, 1, {})], [said(2, 1, order)])
        assert (engine.rates.median_us, engine.rates.slowest_us) == (10.0, 1e6)


def test_pages_show_the_engines_that_are_asked_for_since_the_page_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cluster 0 is asked for; the last two pages have the same counts."""
    looks = [
        [
            Answer(50, document(seconds=seconds, cluster_id=cluster_id, operations=rows), "")
            for cluster_id in (0, 5)
        ]
        for seconds, rows in (
            (1.0, {}),
            (2.0, {"pull_blocks": counted(700, 0, 0, 700)}),
            (3.0, {"pull_blocks": counted(700, 0, 0, 700)}),
        )
    ]

    def answers() -> list[Answer]:
        if not looks:
            raise KeyboardInterrupt
        return looks.pop(0)

    monkeypatch.setattr("kvplan.cli.top.read_all", answers)
    assert main(["top", "--cluster", "0", "--interval", "0.1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "serve.py" in line]
    clusters, rates = ([row[column] for row in rows] for column in (1, 11))
    assert (clusters, rates) == (["0"] * 3, ["0", "700", "0"])


@pytest.mark.parametrize(("fast", "slow", "median"), [(5, 5, 10.0), (4, 6, 1e6), (0, 0, None)])
def test_half_of_the_transfers_took_no_longer_than_the_median(
    fast: int, slow: int, median: float | None
) -> None:
    rows = {"pull": counted(fast + slow, 0, 0, fast)}
    (engine,) = compared([said(1, 1, {})], [said(2, 1, rows)])
    assert engine.rates.median_us == median
    rows["pull"]["buckets"][1][1] = fast  # the others took longer than any bound
    (engine,) = compared([said(1, 1, {})], [said(2, 1, rows)])
    assert engine.rates.slowest_us == (float("inf") if slow else median)
