"""`kvplan bench` and `kvplan tune`, with few transfers: what they print and store, not how fast."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan import TRANSPORT_COSTS, LLMException
from kvplan.cli.measuring.pair import linked
from kvplan.cli.measuring.samples import Sample, measure
from kvplan.cli.measuring.sizes import Shape
from kvplan.inspection.measured_costs import load_costs
from tests.cli.running import ROOT, command, push, refused

SMALL = Shape(2, 8, 4096)


def test_bench_has_a_row_for_each_way_beside_its_limit() -> None:
    done = command("bench", "--seconds", "0", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [it["limit"] for it in rows] == [
        "", "memcpy", "memcpy", "process_vm_readv", "process_vm_readv", "a plain socket",
        "a plain socket",
    ]  # fmt: skip
    for row in rows:
        assert row["us"] > 0
        assert row["gigabytes_per_s"] == pytest.approx(row["nbytes"] / row["us"] / 1e3)
        if row["limit"]:
            assert row["of_limit"] == pytest.approx(row["limit_us"] / row["us"])


def test_tune_stores_what_estimate_then_uses(tmp_path: Path) -> None:
    push([7, 8, 2]).save(tmp_path / "plan.json")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = command("tune", "--seconds", "0", "-t", "local", **cache)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "cache/kvplan/costs.json"
    assert done.stdout.endswith(f"stored in {path}\n")
    found = load_costs(path)
    assert found is not None
    assert [*found.costs] == ["local"]
    cost = found.costs["local"]
    # As many lines as the shipped ones, for the same sizes.
    assert [it.upto_nbytes for it in cost.lines] == [
        it.upto_nbytes for it in TRANSPORT_COSTS["local"].lines
    ]
    said = command("estimate", tmp_path / "plan.json", **cache).stdout
    assert f"local: {cost.source}" in said
    assert cost.source.startswith("measured here by kvplan tune on 20")
    assert "local-registered, tcp, ucx: kvplan's own" in said


def test_tune_that_is_only_tried_stores_nothing(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = command("tune", "--seconds", "0", "-t", "tcp", "--dry-run", "--json", **cache)
    document = json.loads(done.stdout)
    assert (done.returncode, document["path"]) == (0, None)
    (tcp,) = document["transports"]
    assert tcp["name"] == "tcp"
    assert tcp["transfers"] == 72  # one of each
    assert not (tmp_path / "cache").exists()


def test_where_nothing_can_be_stored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused("tune", "--seconds", "0", "-t", "tcp", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert str(tmp_path / "file") in said


def test_bytes_that_arrive_are_compared(tmp_path: Path) -> None:
    with linked("local", [SMALL]) as pair:
        arrays = pair.engine.arrays(pair.caches[0])
        assert len({it.tobytes() for it in arrays}) == 2  # each tensor has bytes of its own
        sample = pair.pull(0, 2, 2)
        assert sample.plan is not None
        assert sample.plan.num_descriptors == 4  # none are adjacent
        measure([sample, pair.push(0, 2, 4)], 0, lambda share: None)
        assert len(sample.seconds) == 1  # after one that warms up


def test_a_transport_that_does_not_work_here_says_why() -> None:
    with pytest.raises(LLMException, match="no Ascend device"), linked("hccl", [SMALL]):
        pass


def test_progress_ends_at_all_of_it() -> None:
    shares: list[float] = []
    measure([Sample(lambda: 0.001)], 0, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_other_process_ends_with_this_one() -> None:
    program = (
        "import sys\n"
        "from kvplan.cli.measuring.pair import linked\n"
        "from kvplan.cli.measuring.sizes import Shape\n"
        "with linked('local', [Shape(2, 8, 4096)]) as pair:\n"
        "    print(pair.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        other = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert select.select([other], [], [], 60)[0], "it goes on without whom it serves"
    finally:
        os.close(other)
