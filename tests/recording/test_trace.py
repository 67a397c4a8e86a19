"""`kvplan trace` as a shell command, on recordings of two engines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from itertools import combinations, product
from pathlib import Path

import pytest

import kvplan
from kvplan import (
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Plan,
    Rows,
    Transfer,
    load_plan,
)
from kvplan.cli import main
from kvplan.recording import read
from kvplan.recording.format import EVENT, HEADER, MAGIC, encode, framed
from kvplan.recording.records import OPERATIONS
from tests.recording.operations import PLAN, record, recorder
from tests.recording.test_reading import assert_is_a_trace
from tests.support.plans import joined
from tests.support.refusals import refused

DESC = CacheDesc(4, (64, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
WHOLE = kvplan.plan(Transfer(Rows(DESC, [1]), Rows(DESC, [2])), local="dst")
PAIRS = KvCacheExtParam(tensor_num_per_layer=2)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A prefill engine that pushes to a decode engine; the second request has a wrong table."""
    folder = tmp_path_factory.mktemp("recorded")
    with LlmDataDist(1, LlmRole.PROMPT) as prefill, LlmDataDist(2, LlmRole.DECODER) as decode:
        decode.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        prefill.initialize()
        prefill.record(folder / "prefill.kvrec")
        decode.record(folder / "decode.kvrec")
        prefill.link_clusters([ClusterInfo(2, decode.listen_address)]).raise_for_status()
        ours, theirs = prefill.allocate_blocks_cache(DESC), decode.allocate_blocks_cache(DESC)
        there = CacheIndex(2, theirs.cache_id)
        prefill.push_blocks(ours, there, [1, 2, 3], [41, 42, 43], tag="request 7")
        prefill.push_blocks(ours, there, [8, 9], [44, 43], tag="request 8")
        with refused("LLM_PARAM_INVALID"):
            prefill.push_blocks(ours, there, [8], [64], tag="request 9")
        decode.copy_blocks(theirs, {41: [50]}, tag="request 7")
        prefill.notify(2, b"done", tag="request 7 done")
        there = f"{theirs.cache_id}:43"
    return folder / "prefill.kvrec", folder / "decode.kvrec", there


def run(capsys, *arguments: object, code: int = 0) -> str:
    assert main(["trace", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_list_has_a_line_per_transfer(recorded, capsys):
    text = run(capsys, recorded[0])
    head, titles, *rows, count = text.splitlines()
    assert "cluster 1 (PROMPT), process" in head
    assert titles.split() == ["#", "time", "operation", "peer", "cache", "tag", "layers", "blocks",
                              "bytes", "ms", "outcome"]  # fmt: skip
    pushes = [row for row in rows if " push_blocks " in row]
    assert len(pushes) == 3
    words = pushes[0].split()
    assert words[2:9] == ["push_blocks", "2", "1", "request", "7", "0-1", "3"]
    assert pushes[0].endswith("done")
    assert "LLM_PARAM_INVALID: dst.blocks[0]=64 is out of range" in pushes[2]
    assert count == f"{len(rows)} rows"


@pytest.mark.parametrize(
    ("options", "tags"),
    [
        (["--tag", "request 8"], ["request 8"]),
        (
            ["--tag", "request*", "--cluster", "2"],
            ["request 7", "request 8", "request 9", "request 7 done"],
        ),
        (["--failed"], ["request 9"]),
        (["--operation", "push", "--since", "1h"], ["request 7", "request 8", "request 9"]),
        (["--operation", "notify"], ["request 7 done"]),
        (["--operation", "swap_blocks"], []),
        (["--since", "2099-01-01"], []),
        (["--cluster", "5"], []),
    ],
)
def test_filters_select_rows(recorded, capsys, options, tags):
    found = json.loads(run(capsys, recorded[0], *options, "--json"))
    assert found["schema_version"] == 1
    (recording,) = found["recordings"]
    assert recording["cluster_id"] == 1
    assert recording["complete"]
    assert [item["tag"] for item in recording["rows"]] == tags
    text = run(capsys, recorded[0], *options)
    assert len(text.splitlines()) == 3 + len(tags)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_time_without_a_date_means_the_day_of_each_recording(tmp_path, capsys, order):
    files = []
    for day in (3, 4):
        hours = [datetime(2026, 5, day, hour).timestamp() for hour in (9, 10, 14)]
        head = (HEADER, "ab" * 8, 0, "1", "host", 1, day, "MIX", hours[0], 0.0)
        events = [(EVENT, hour - hours[0], 0.0, "link", 0, "", {"at": hour}) for hour in hours[1:]]
        files.append(tmp_path / f"{day}.kvrec")
        files[-1].write_bytes(MAGIC + b"".join(framed(map(encode, (head, *events)))))
    given = [files[index] for index in order]
    found = json.loads(run(capsys, *given, "--since", "12:00", "--json"))["recordings"]
    times = [datetime.fromtimestamp(item["time"]) for one in found for item in one["rows"]]
    assert times == [datetime(2026, 5, (3, 4)[index], 14) for index in order]


def test_the_writer_of_a_block_is_found_in_the_peers_recording(recorded, capsys):
    prefill, decode, block = recorded
    alone = run(capsys, decode, "--block", block)
    cache_id = block.split(":")[0]
    none = f"no recorded transfer wrote block 43 of cache {cache_id} of cluster 2"
    assert alone.splitlines()[0] == none
    assert "pushes of these peers are only in their own recordings: clusters 1" in alone
    head, first, second = run(capsys, decode, prefill, "--block", block).splitlines()
    assert head == f"2 transfers wrote block 43 of cache {cache_id} of cluster 2, oldest first"
    assert "push_blocks of request 7: from block 3 of cache 1 of cluster 1, run by" in first
    assert "push_blocks of request 8: from block 9 of cache 1 of cluster 1, run by" in second
    document = json.loads(run(capsys, decode, prefill, "--block", block, "--json"))
    assert [item["transfer"]["tag"] for item in document["writes"]] == ["request 7", "request 8"]
    assert [item["src_rows"] for item in document["writes"]] == [[3], [9]]
    assert [(item["cluster"], item["source"]) for item in document["writes"]] == [(1, 1), (1, 1)]


def test_a_pull_that_wrote_a_block_is_described_whole(capsys, tmp_path):
    """The cache and the cluster of the source differ from those of the destination."""
    part = PLAN.part
    src, dst = replace(part.src, cache_id=8), replace(part.dst, cache_id=5)
    path = tmp_path / "a.kvrec"
    with recorder(path) as writer:
        record(writer, Plan.made(replace(part, src=src, dst=dst)), tag="request 7")
    (transfer,) = read(path).transfers
    document = json.loads(run(capsys, path, "--block", "5:4", "--json"))
    (write,) = document["writes"]
    assert write.pop("transfer") == {
        "kind": "transfer", "number": 0, "time": transfer.time, "ms": 1.0,
        "operation": "pull_blocks", "status": "LLM_SUCCESS", "error": "", "cache": 1, "peer": 7,
        "caches": [[8, 5]], "tag": "request 7", "leases": [], "blocks": 3, "nbytes": PLAN.nbytes,
    }  # fmt: skip
    assert write == {
        "cluster": 3, "part": "", "source": 7, "src_cache": 8, "src_rows": [1], "partial": False,
    }  # fmt: skip
    line = run(capsys, path, "--block", "5:4").splitlines()[1]
    ended = datetime.fromtimestamp(transfer.time + transfer.seconds)
    assert line.startswith(f"{ended:%H:%M:%S.%f}  #0 pull_blocks of request 7: from block 1 of")


def test_a_plan_is_explained_and_saved(recorded, capsys, tmp_path):
    transfer = read(recorded[0]).transfers[1]
    assert transfer.tag == "request 8"
    text = run(capsys, recorded[0], "--plan", transfer.number)
    assert text.endswith(f"{transfer.plan.explain()}\nsrc_blocks: 8, 9\ndst_blocks: 44, 43\n")
    out = tmp_path / "plan.json"
    run(capsys, recorded[0], "--save-plan", transfer.number, out)
    assert load_plan(out) == transfer.plan


def test_block_tables_have_the_names_of_their_parts(capsys, tmp_path):
    slots, blocks = (
        CacheDesc(2, (6, size, 8), DataType.DT_INT8, kv_tensor_format=f"{row} token dim")
        for row, size in (("slot", 8), ("block", 4))
    )
    pairs = {
        "b": (Rows(slots, [1]), Rows(blocks, [5, 3])),
        "c": (Rows(blocks, [0, 4]), Rows(blocks, [2, 1])),
    }
    plan = joined({name: kvplan.plan(Transfer(*rows)) for name, rows in pairs.items()})
    with recorder(tmp_path / "a.kvrec") as writer:
        record(writer, plan)
    text = run(capsys, tmp_path / "a.kvrec", "--plan", 0)
    assert [line for line in text.splitlines() if "_blocks: " in line] == [
        "part b, src_blocks: 1",
        "part b, dst_blocks: 5, 3",
        "part c, src_blocks: 0, 4",
        "part c, dst_blocks: 2, 1",
    ]
    found = json.loads(run(capsys, tmp_path / "a.kvrec", "--plan", 0, "--json"))
    assert found["block_tables"] == [
        {"part": "b", "src": [1], "dst": [5, 3]},
        {"part": "c", "src": [0, 4], "dst": [2, 1]},
    ]


def test_a_transfer_without_a_plan_is_listed_compared_and_not_saved(capsys, tmp_path):
    path, out = tmp_path / "a.kvrec", tmp_path / "plan.json"
    with recorder(path) as writer:
        record(writer, None, "failed", "as the test says")
        record(writer, WHOLE, "planned")
    text = run(capsys, path, "--plan", 0)
    assert text.endswith("no plan: the transfer failed before planning\n")
    assert main(["trace", str(path), "--save-plan", "0", str(out)]) == 2
    assert "transfer 0 has no plan: it failed before planning" in capsys.readouterr().err
    assert not out.exists()
    for first, second, owner in (("failed", "planned", "B"), ("planned", "failed", "A")):
        text = run(capsys, path, "--compare", first, second, code=1)
        assert f"plan: only {owner} has one" in text


def test_a_table_is_expected_only_of_a_transfer_of_one_cache(capsys, tmp_path):
    with recorder(tmp_path / "a.kvrec") as writer:
        record(writer, joined({"a": WHOLE, "b": WHOLE}))
    assert main(["trace", str(tmp_path / "a.kvrec"), "--plan", "0", "--expect", "dst:2"]) == 2
    assert "transfer 0 has 2 pairs of block tables; --expect" in capsys.readouterr().err


def test_saved_files_are_named_in_the_json_document(recorded, capsys, tmp_path):
    number = read(recorded[0]).transfers[1].number
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    saves = ("--save-plan", number, plan, "--json")
    told = json.loads(run(capsys, recorded[0], *saves))
    assert told.pop("saved") == str(plan)
    assert told.keys() == {"schema_version"}
    both = json.loads(run(capsys, recorded[0], *saves, "--plan", number))
    assert both.pop("saved") == str(plan)
    assert both == json.loads(run(capsys, recorded[0], "--plan", number, "--json"))
    told = json.loads(run(capsys, recorded[0], "--perfetto", trace, "--json"))
    assert (told["saved"], told["events"]) == (
        str(trace), len(json.loads(trace.read_text())["traceEvents"])
    )  # fmt: skip


def test_a_folder_stands_for_all_its_recordings(recorded, capsys, tmp_path):
    prefill, decode, block = recorded
    assert run(capsys, prefill.parent) == run(capsys, decode, prefill)
    assert run(capsys, decode, prefill.parent / "prefill.kvrec", "--block", block) == run(
        capsys, prefill.parent, "--block", block
    )
    (tmp_path / "notes.txt").touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no file *.kvrec" in capsys.readouterr().err


def test_all_operations_of_engines_are_known():
    """The table must have every operation that an engine counts, or it would refuse recordings.

    Names of transfers are computed: see `test_every_operation_is_recorded_with_its_plan`.
    """
    source = "\n".join(path.read_text() for path in (ROOT / "kvplan/engine").glob("*.py"))
    call = r"(?:Operation\((?:self\._running\(\)|engine), |_recorded\(|_reported\(|operation = )"
    named = set(re.findall(call + r'"([a-z_]+)"', source))
    assert len(named) > 15
    assert named - OPERATIONS == set()


def test_a_cancelled_transfer_is_not_a_failure(capsys, caplog, tmp_path):
    """A cancellation has its own outcome in logs, metrics, links and recordings."""
    path = tmp_path / "a.kvrec"
    caplog.set_level("INFO", "kvplan")
    with LlmDataDist(1, LlmRole.PROMPT) as prefill, LlmDataDist(2, LlmRole.DECODER) as decode:
        decode.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        prefill.initialize()
        prefill.link_clusters([ClusterInfo(2, decode.listen_address)]).raise_for_status()
        ours, theirs = prefill.allocate_cache(DESC), decode.allocate_cache(DESC)
        prefill.record(path)
        there = CacheIndex(2, theirs.cache_id)
        task = prefill.layered(Transfer(Rows(ours), Rows(there), layers=PAIRS), tag="request 7")
        task.cancel()
        with refused("LLM_CANCELLED", "cancelled"):
            task.wait()
        assert prefill.metrics()["operations"]["push_layers"]["statuses"] == {"LLM_CANCELLED": 1}
        assert prefill.links()[0].last_error == ""
    (line,) = (
        record for record in caplog.records if "operation=push_layers" in record.getMessage()
    )
    assert (line.levelname, "status=LLM_CANCELLED" in line.getMessage()) == ("INFO", True)
    assert "LLM_CANCELLED: " in run(capsys, path, "--tag", "request 7")
    found = json.loads(run(capsys, path, "--tag", "request 7", "--json"))["recordings"][0]["rows"]
    assert [entry["status"] for entry in found] == ["LLM_CANCELLED"]
    assert "\n0 of " in run(capsys, path, "--failed")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("dst:44,43", ""),
        ("src:8..9", ""),
        (
            "dst:44,45",
            "1 of 2 entries of dst_blocks differ; the first is dst_blocks[1]: 43, expected 45",
        ),
        (
            "dst:43,44",
            "2 of 2 entries of dst_blocks differ; the first is dst_blocks[0]: 44, expected 43; "
            "dst_blocks[0] and dst_blocks[1] are swapped (43 and 44)",
        ),
        ("src:8..10", "src_blocks has 2 entries; 3 were expected"),
    ],
)
def test_a_block_table_is_compared(recorded, capsys, table, message):
    number = read(recorded[0]).transfers[1].number
    asked = (recorded[0], "--plan", number, "--expect", table)
    text = run(capsys, *asked, code=bool(message))
    name = f"{table[:3]}_blocks"
    assert text.splitlines()[-1] == (message or f"{name} is as expected")
    found = json.loads(run(capsys, *asked, "--json", code=bool(message)))
    assert found["unexpected"] == message
    assert found["block_tables"] == [{"part": "", "src": [8, 9], "dst": [44, 43]}]


def test_dropped_rows_are_counted_below_the_list(capsys, tmp_path):
    wide = CacheDesc(1, (4096, 16), DataType.DT_FLOAT)
    long = kvplan.plan(Transfer(Rows(wide, range(4096)), Rows(wide, range(4096))), local="dst")
    with recorder(tmp_path / "a.kvrec", max_queued=32 << 10) as writer:
        record(writer, WHOLE)
        for _ in range(7):
            record(writer, long)
    last = run(capsys, tmp_path / "a.kvrec").splitlines()[-1]  # the writer may drop in two parts
    assert last.endswith(" rows; 7 rows were dropped")
    (found,) = json.loads(run(capsys, tmp_path / "a.kvrec", "--json"))["recordings"]
    assert (found["dropped"], found["complete"]) == (7, True)


def test_layers_are_listed(capsys, tmp_path):
    plan = kvplan.plan(
        Transfer(Rows(DESC, [1]), Rows(DESC, [2]), layers=KvCacheExtParam((0, 0), (1, 1))),
        local="dst",
    )
    with recorder(tmp_path / "a.kvrec") as writer:
        record(writer, plan)
        record(writer, joined({"a": plan, "b": plan.for_layers(range(1)), "c": WHOLE}))
        record(writer, None, error="no link")
    rows = run(capsys, tmp_path / "a.kvrec").splitlines()[2:5]
    assert [row.split()[4] for row in rows] == ["0>1", "0>1,0-1", "0"]


def test_traces_are_exported(recorded, capsys, tmp_path):
    trace = tmp_path / "out.json"
    run(capsys, *recorded[:2], "--perfetto", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    assert_is_a_trace(events)
    flows = [event for event in events if event["ph"] == "s"]
    assert len(flows) == 1  # from the push of request 7 to the copy, in the other engine


def test_a_trace_on_a_full_disk_names_its_file(recorded, capsys):
    assert main(["trace", str(recorded[0]), "--perfetto", "/dev/full"]) == 2
    assert capsys.readouterr().err == "kvplan: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}", "{1}", "--plan", "1"], "need one FILE"),
        (["{0}", "--plan", "999"], "row 999 is not a transfer"),
        (["{0}", "--plan", "0"], "row 0 is not a transfer"),
        (["{0}", "--expect", "dst:1"], "--expect needs --plan N"),
        (["{0}", "--plan", "1", "--expect", "dst:"], "must be SIDE:TABLE, such as dst:7,8,2"),
        (["{0}", "--plan", "1", "--expect", "dst:1,"], "must be SIDE:TABLE"),
        (["{0}", "--plan", "1", "--expect", "dst:5..3"], "must be SIDE:TABLE"),
        (["{0}", "--plan", "1", "--expect", "dst:0..99999999"], "at most 1,048,576 entries"),
        (["{0}", "--block", "x"], "write CACHE:BLOCK"),
        (["{0}", "--since", "soon"], "--since soon"),
        (["{0}", "--compare", "#²", "x"], "has no transfer of that tag"),
        (["{0}", "--compare", "#" + "9" * 5000, "x"], "has no transfer of that tag"),
        (["{0}", "--operation", "pull_blcks"], "similar: pull_blocks"),
        (["{0}", "--operation", "pusch"], "similar: push"),
        (["{0}.missing"], "No such file"),
        (["{0}", "{0}", "--block", "1:2"], "is of cluster 1 itself"),
        ([], "Missing argument"),
        ([__file__], "is not a recording"),
    ],
)
def test_wrong_arguments_exit_with_2(recorded, capsys, arguments, message):
    assert main(["trace", *(argument.format(*recorded) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


class TestCompare:
    def test_two_requests_are_compared(self, recorded, capsys):
        text = run(capsys, recorded[0], "--compare", "request 7", "request 8", code=1)
        assert re.search(r"^A: 1 transfer of request 7, in .*prefill.kvrec$", text, re.MULTILINE)
        assert "A #3, B #4\n" in text
        assert (
            "src blocks: 8 of 8 runs differ; the first is layer 0, run 0: block 1 > block 41"
            in (" ".join(text.split()))
        )

    def test_equal_rows_are_identical(self, recorded, capsys):
        text = run(capsys, recorded[0], "--compare", "#3", "#3")
        assert text.endswith("A #3, B #3\n  same runs in the same order\n")

    def test_requests_of_two_files_are_compared(self, recorded, capsys):
        document = json.loads(
            run(capsys, *recorded[:2], "--compare", "request 7*", "request 7*", "--json", code=1)
        )
        pair, alone = document["transfers"]
        assert alone["differences"] == ["only A has this transfer"]
        assert pair["differences"][0] == "operation: push_blocks in A, and copy_blocks in B"
        text = run(capsys, recorded[0], "--compare", "request*", "request 7", code=1)
        assert "A #4, B -\n  only A has this transfer\n" in text

    def test_an_unknown_request_is_refused(self, recorded, capsys):
        for names, why in (
            (("request 77", "#1"), "--compare request 77: .* has no transfer of that tag"),
            (("#99", "#1"), "row 99 is not a transfer"),
        ):
            assert main(["trace", str(recorded[0]), "--compare", *names]) == 2
            assert re.search(why, capsys.readouterr().err)
        assert main(["trace", *map(str, [*recorded[:2], recorded[0]]), "--compare", "a", "b"]) == 2
        assert "--compare needs one FILE, or two" in capsys.readouterr().err


CHOICES = ["--tag x", "--cluster 2", "--failed", "--since 1h"]
MODES = ["--block 1:43", "--plan 0", "--compare #0 #1", "--sums"]
COMBINED = [
    *(pair for pair in product(MODES, CHOICES) if pair != ("--sums", "--tag x")),
    *product([*MODES, "--save-plan 0 out.json"], ["--perfetto out.json"]),
    *combinations(["--compare #0 #1", "--sums", "--plan 0", "--block 1:43"], 2),
    ("--save-plan 0 out.json", "--block 1:43"),
]


@pytest.mark.parametrize(("mode", "choice"), COMBINED)
def test_an_option_without_effect_is_refused(recorded, capsys, mode, choice):
    assert main(["trace", str(recorded[1]), *mode.split(), *choice.split()]) == 2
    assert f"{choice.split()[0]} has no effect with {mode.split()[0]}" in capsys.readouterr().err


def test_an_empty_tag_selects_rows_without_a_tag(recorded, capsys):
    out = run(capsys, recorded[0], "--tag", "", "--json")
    rows = json.loads(out)["recordings"][0]["rows"]
    assert {row.get("tag", row.get("fields", {}).get("tag", "")) for row in rows} == {""}


def test_recordings_without_a_row_are_left_out_of_a_folder(recorded, capsys, tmp_path):
    """Such as that of an engine which has just begun; by its own name it is refused."""
    prefill, decode, _ = recorded
    empty = tmp_path / "began.kvrec"
    empty.touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no file *.kvrec with a row" in capsys.readouterr().err
    for path in (prefill, decode):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    both = run(capsys, tmp_path / decode.name, tmp_path / prefill.name)
    assert run(capsys, tmp_path) == both
    assert main(["trace", str(empty)]) == 2
    assert "has no row yet" in capsys.readouterr().err
