"""Context parallelism: a prefilling engine in another process, and a decoding one here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvplan.layout import Interleaved
from kvplan.serving import Place
from kvplan.vllm.worker import place_of
from tests.support import peer
from tests.support.refusals import refused
from tests.vllm.contexts import BLOCKS, Sizes, Workers

PROMPT = list(range(1000, 1037))  # 37 tokens


class Peer(peer.Peer):
    """A process whose snippets use `Workers` and `Sizes`."""

    module = "tests.vllm.peer_process"


@pytest.fixture(scope="module")
def prefill() -> Iterator[Peer]:
    item = Peer()
    yield item
    item.close()


def table(sizes: Sizes, first: int, tokens: int = len(PROMPT)) -> list[int]:
    """Return blocks for a prompt, in descending order."""
    count = -(-tokens // (sizes.block * sizes.dcp))
    return [(first - 5 * at) % BLOCKS for at in range(count)]


def moved(prefill: Peer, theirs: Sizes, mine: Sizes, computed: int, prompt: list[int]) -> Workers:
    """Move a prompt, and compare the caches of all workers with those that vLLM would read."""
    params = prefill.run(
        """
        workers = Workers("prefill", Sizes(*sizes))
        result = workers.finish("p", prompt, blocks)
        """,
        sizes=tuple(theirs),
        prompt=prompt,
        blocks=table(theirs, 7, len(prompt)),
    )
    decode = Workers("decode", mine)
    blocks = table(mine, 4, len(prompt))
    decode.fetch(decode.request("d", prompt, params), blocks, computed)  # type: ignore[misc]
    assert decode.results() == [(set(), {"d"}, set())] * len(decode.workers)
    for (tp, pcp), array in zip(mine.workers(), decode.arrays, strict=True):
        expected = mine.expected(tp, pcp, blocks, range(computed, len(prompt)))
        np.testing.assert_array_equal(array, expected, f"worker tp {tp} pcp {pcp}")
    number = len(theirs.workers())
    assert prefill.run("result = workers.results()") == [({"p"}, set(), set())] * number
    prefill.run("workers.close()")
    return decode


MLA, GQA = {"heads": 0}, {"heads": 2}
PAIRS = {
    "dcp 2 to 1": (Sizes(2, 1, 2), Sizes(1)),
    "dcp 2 to 1, by block": (Sizes(2, 1, 2, 8), Sizes(1, block=16)),
    "dcp 1 to 2": (Sizes(1, block=4), Sizes(2, 1, 2, 4)),
    "dcp 2 to 2": (Sizes(2, 1, 2, 2), Sizes(2, 1, 2, 2)),
    "dcp 2 to 2, other interleaving and blocks": (Sizes(2, 1, 2, 8), Sizes(2, 1, 2, 1, 4)),
    "dcp 4 to 2, tp 4 to 2": (Sizes(4, 1, 4, 2), Sizes(2, 1, 2, 4)),
    "dcp 2 of tp 4 to tp 2, with heads": (Sizes(4, 1, 2, 1, heads=2), Sizes(2, heads=2)),
    "tp 2 to dcp 2 of tp 4, with heads": (Sizes(2, heads=2), Sizes(4, 1, 2, 2, 4, heads=2)),
    "replicas to dcp 2": (Sizes(2), Sizes(2, 1, 2)),
    "pcp 2 to 1": (Sizes(1, 2), Sizes(1)),
    "pcp 2 of tp 2 to tp 1, with heads": (Sizes(2, 2, heads=2), Sizes(1, heads=2)),
    "pcp 1 to 2": (Sizes(1), Sizes(1, 2)),
    "tp 2 to pcp 2 of tp 2, with heads": (Sizes(2, heads=2), Sizes(2, 2, heads=2)),
    "pcp 2 with dcp 2 to 1": (Sizes(1, 2, 2), Sizes(1)),
    "tp 2 pcp 2 with dcp 4 to dcp 2": (Sizes(2, 2, 4, 2), Sizes(2, 1, 2, 4)),
    "tp 2 pcp 2 with dcp 2 to pcp 2": (Sizes(2, 2, 2, 4), Sizes(1, 2)),
}


@pytest.mark.parametrize(("theirs", "mine"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("computed", [0, 21])
def test_each_token_arrives_where_its_rank_reads_it(
    prefill: Peer, theirs: Sizes, mine: Sizes, computed: int
) -> None:
    moved(prefill, theirs, mine, computed, PROMPT).close()


@pytest.mark.parametrize("tokens", [1, 8, 9])
@pytest.mark.parametrize("pair", ["dcp 2 to 1, by block", "dcp 2 to 2", "dcp 1 to 2"])
def test_a_prompt_without_a_token_on_a_rank_is_moved(prefill: Peer, pair: str, tokens: int) -> None:
    moved(prefill, *PAIRS[pair], 0, PROMPT[:tokens]).close()


def test_each_rank_moves_the_bytes_of_its_tokens(prefill: Peer) -> None:
    decode = moved(prefill, *PAIRS["dcp 2 to 2"], 20, PROMPT)
    nbytes = [worker.take_figures().data["nbytes"] for worker in decode.workers]
    assert nbytes == [[9 * 2 * 2 * 4], [8 * 2 * 2 * 4]]  # tokens 20, 21, 24, ... and 22, 23, ...
    decode.close()


@pytest.mark.parametrize(
    ("ranks", "heads", "place"),
    [
        (((5, 8), (0, 1), (2, 4)), 2, Place(2, 4, context=Interleaved(1, 2, 4))),
        (((1, 2), (1, 3), (3, 1)), 2, Place(1, 2, context=Interleaved(1, 3))),
        (((1, 2), (1, 3), (6, 1)), 1, Place(0, 1, context=Interleaved(4, 6))),
        (((1, 2), (1, 3), (1, 1)), 2, Place(1, 2, copy=1, copies=3)),
    ],
)
def test_the_place_of_a_worker(ranks: Any, heads: int, place: Place) -> None:
    assert place_of(*ranks, num_heads=heads) == place


@pytest.mark.parametrize(
    ("ranks", "heads", "alike"),
    [((4, 1, 4), 2, 2), ((2, 1, 2), 4, 1), ((2, 2, 4), 4, 2), ((1, 3, 2), 8, 3)],
)
def test_ranks_with_different_heads_cannot_share_tokens(
    ranks: tuple[int, int, int], heads: int, alike: int
) -> None:
    """A rank of several heads shares tokens only with its copies."""
    tensor, copies, contexts = ranks
    text = f"decode_context_parallel_size={contexts} must be 1 or a divisor of {alike}, the work"
    with refused("LLM_PARAM_INVALID", text):
        place_of((0, tensor), (0, copies), (contexts, 1), num_heads=heads)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (Sizes(2, 1, 2, 3), {}, "cp_kv_cache_interleave_size=3 must be a divisor of the 8 tokens"),
        (
            Sizes(2, 1, 2),
            {"mode": "push"},
            'mode="push" does not support decode_context_parallel_size=2 and prefill_context_par',
        ),
        (Sizes(1, 2), {"mode": "push"}, "prefill_context_parallel_size=2: use mode=.pull"),
    ],
)
def test_invalid_sizes_are_refused(sizes: Sizes, options: dict[str, str], message: str) -> None:
    with refused("LLM_PARAM_INVALID", message):
        Workers("prefill", sizes, **options)
