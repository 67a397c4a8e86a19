"""The connector in the scheduler of each installed vLLM, which calls its hooks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.pretended import NEEDS_VLLM, PYTHON, VERSIONS

ROOT = Path(__file__).parents[2]
FREE = [False, 0.0]  # without a request, and without a used block
pytestmark = [pytest.mark.slow, NEEDS_VLLM]  # imports torch


@pytest.fixture(scope="module", params=VERSIONS)
def results(request: pytest.FixtureRequest) -> Any:
    version: Mapping[str, str] = request.param
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **version}
    command = [PYTHON, "-m", "tests.vllm.scheduled"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_blocks_of_a_finished_request_are_held_until_workers_report_it(results: Any) -> None:
    """Until then vLLM makes steps, in which workers report, without `has_pending_push_work`."""
    produced = results["produced"]
    assert (produced["held"], produced["left"], produced["pushes"]) == (True, FREE, False)
    assert produced["offered"] == [["p", 3]]


def test_workers_of_all_stages_are_in_the_reference(results: Any) -> None:
    reference = results["produced"]["params"]["kvplan"]
    assert reference["sources"] == [[7, "a:0", None, None], [8, "a:1", None, None]]


def test_only_a_producer_requires_delivery(results: Any) -> None:
    """A request that is preempted at its end is computed again only if delivery is required."""
    assert [results[name]["delivers"] for name in ("produced", "fetched")] == [True, False]


@pytest.mark.parametrize(
    ("case", "computed", "reason"),
    [
        ("fetched", 1, "length"),
        ("a block failed", 24, "length"),
        ("all failed", 40, "length"),
        ("failed for good", 0, "error"),
    ],
)
def test_tokens_that_were_not_fetched_are_computed(
    results: Any, case: str, computed: int, reason: str
) -> None:
    result = results[case]
    assert result["waiting"] == {}  # while it is fetched
    assert (result["blocks"], result["computed"], result["reason"]) == (3, computed, reason)
    assert result["left"] == FREE


def test_blocks_of_an_aborted_fetch_are_held_until_its_result(results: Any) -> None:
    assert results["aborted"] == {"held": True, "cancelled": ["d"], "left": FREE}


@pytest.mark.parametrize(("case", "computed"), [("states", 1), ("states failed", 40)])
def test_states_leave_out_the_last_token(results: Any, case: str, computed: int) -> None:
    """The first engine computes 39 of 40 tokens, and has one block of states."""
    result = results[case]
    assert (result["scheduled"], result["computed"], result["reason"]) == (39, computed, "length")
    assert (result["offered"], result["fetched"], result["null"]) == ([3, 1], [3, 1], False)
    assert result["left"] == [FREE, FREE]


def test_a_block_of_the_scheduler_has_the_tokens_of_all_ranks(results: Any) -> None:
    """40 tokens are two blocks of 2 x 16; 8 tokens of the second block are computed."""
    shared = results["shared out"]
    assert shared["sources"] == [[7, "a:0", None, [0, 2, 1]], [8, "a:1", None, [1, 2, 1]]]
    assert (shared["blocks"], shared["computed"]) == ([2, 2], {"d": 8})


def test_a_request_moves_also_beside_offloading(results: Any) -> None:
    """MultiConnector gives the request to the first connector that has its tokens."""
    moved = results["offloaded"]
    assert (moved["scheduled"], moved["held"], moved["used"]) == ({"p": 40}, True, 0.0)
    assert (moved["blocks"], moved["waiting"], moved["computed"]) == ([3, 3], {}, {"d": 1})
