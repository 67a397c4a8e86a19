"""Messages between serving engines, and references that travel with requests."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from kvplan.layout import Interleaved
from kvplan.serving import (
    Compatibility,
    ExchangeOptions,
    Handle,
    Place,
    Reference,
    Source,
    token_digest,
)
from kvplan.serving.messages import (
    Ask,
    Done,
    Grant,
    Hello,
    Refusal,
    Renew,
    check_transfer,
    decode,
    encode,
    grants,
)
from kvplan.serving.tables import Held, Share, heads_of, read_from, share_of
from tests.support.refusals import refused

HANDLE = bytes(range(16))
REFERENCE = Reference(
    b"instance",
    Handle(HANDLE),
    b"digest",
    100,
    (Source(5, "10.0.0.1:26000"), Source(6, "b")),
)


@pytest.mark.parametrize(
    "message",
    [
        Hello({"model": "m"}, b"instance", answer=True),
        Ask(2**62, b"instance", HANDLE, bytes(16)),
        Ask(2**62, b"instance", b"", bytes(16), "x" * 128, 1, 2, bytes(3500)),
        Grant(1, HANDLE, 0, 0, 2, bytes(3500)),
        Refusal(1, "x" * 1000),
        Done(b"instance", HANDLE, bytes(16), 4),
        Done(b"instance", b"", bytes(16), 4, "transfer"),
        Renew(b"instance", (HANDLE,) * 128),
    ],
)
def test_a_message_is_a_notification(message: Any) -> None:
    data = encode(message)
    assert len(data) <= 4096
    assert decode(data) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        msgspec.msgpack.encode([9, 1]),
        msgspec.msgpack.encode([4, b"i", bytes(17), b"d", 1]),
        msgspec.msgpack.encode([4, b"i", HANDLE, b"d", 0]),
        msgspec.msgpack.encode([5, b"i", [HANDLE, b""]]),
        msgspec.msgpack.encode([6, 1, "surplus"]),
        encode(Refusal(1, "x"))[:-1],
    ],
)
def test_other_data_than_messages_are_refused(data: bytes) -> None:
    with refused("LLM_PARAM_INVALID", "is not a message of kvplan.serving"):
        decode(data)


def test_a_lease_is_sent_in_parts() -> None:
    lease = bytes(index % 251 for index in range(8000))
    parts = grants(3, HANDLE, 64, lease)
    assert {(part.handle, part.pushed) for part in parts} == {(HANDLE, 64)}
    assert [(part.number, part.part, part.parts, len(part.data)) for part in parts] == [
        (3, 0, 3, 3500),
        (3, 1, 3, 3500),
        (3, 2, 3, 1000),
    ]
    assert b"".join(part.data for part in parts) == lease


def test_a_reference_travels_as_json() -> None:
    assert Reference.from_dict(json.loads(json.dumps(REFERENCE.to_dict()))) == REFERENCE


def test_an_unfinished_request_needs_only_a_transfer_name() -> None:
    by_number = {key: REFERENCE.to_dict()[key] for key in ("protocol", "instance", "sources")}
    reference = Reference.from_dict(by_number | {"transfer": "cmpl-1"})
    assert (reference.transfer, reference.digest, reference.num_tokens) == ("cmpl-1", b"", 0)
    assert Reference.from_dict(reference.to_dict()) == reference


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"protocol": 1}, "protocol=1 of kvplan.serving; it must be 4"),
        ({"handle": "7"}, "is invalid: "),
        ({"handle": 7}, "is invalid: "),
        ({"handle": ""}, "must have handle, digest and num_tokens"),
        ({"instance": "no hex"}, "is invalid: "),
        ({"sources": []}, "is invalid: "),
        ({"sources": [[1, 2]]}, "is invalid: "),
        ({"num_tokens": -1}, "is invalid: "),
        ({"num_tokens": 0}, "must have handle, digest and num_tokens"),
        ({"digest": ""}, "must have handle, digest and num_tokens"),
        ({"transfer": "x" * 129}, "is invalid: "),
        ({"transfer": "a\n"}, "at most 128 printable characters"),
        ({"surplus": 1}, "is invalid: "),
    ],
)
def test_invalid_references_are_refused(change: dict[str, Any], match: str) -> None:
    with refused("LLM_PARAM_INVALID", match):
        Reference.from_dict(REFERENCE.to_dict() | change)


@pytest.mark.parametrize(("transfer", "fits"), [("", True), ("x" * 128, True), ("x" * 129, False)])
def test_the_name_of_a_transfer_has_up_to_128_characters(transfer: str, fits: bool) -> None:
    with nullcontext() if fits else refused("LLM_PARAM_INVALID", "at most 128 printable"):
        assert check_transfer(transfer) == transfer


def test_a_digest_covers_the_tokens_and_extra_inputs() -> None:
    digests = {
        token_digest([1, 2]),
        token_digest([2, 1]),
        token_digest([1]),
        token_digest([1, 2], "adapter"),
        token_digest([1, 2], "adap", "ter"),
    }
    assert (len(digests), {len(digest) for digest in digests}) == (5, {16})
    assert token_digest([1, 2], "adapter") == token_digest((1, 2), "adapter")


@pytest.mark.parametrize(
    ("tokens", "extra", "named"),
    [
        (2.5, "", "tokens=2.5 must be ints"),
        ([2**63], "", r"tokens=\[9223372036854775808\] must be ints below 2\*\*63"),
        (["a"], "", r"tokens=\['a'\] must be ints"),
        ([1], 3, r"extra\[0\]=3 must be str, not int"),
    ],
)
def test_values_without_a_digest_are_named(tokens: Any, extra: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"^{named}"):
        token_digest(tokens, extra)


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({"model": "m", "dtype": "bf16"}, ""),
        ({"model": "n", "dtype": "fp8"}, "model is 'm' here and 'n' there"),
        ({"model": "m"}, "dtype is 'bf16' here and None there"),
        ({"model": "m", "dtype": "bf16", "new": "1"}, "new is None here and '1' there"),
    ],
)
def test_the_first_field_that_differs_is_named(theirs: dict[str, str], difference: str) -> None:
    assert Compatibility({"model": "m", "dtype": "bf16"}).difference(theirs) == difference


def test_fields_that_fit_into_no_message_are_refused() -> None:
    with refused("LLM_PARAM_INVALID", "at most 3500 fit into a message"):
        Compatibility({"model": "m" * 4000})


@pytest.mark.parametrize(
    ("rank", "ranks", "owners", "sources"),
    [
        (0, 1, 1, [0]),
        (1, 2, 1, [0]),
        (0, 1, 2, [0, 1]),
        (1, 2, 4, [2, 3]),
        (3, 4, 4, [3]),
        (0, 1, 16, [0, 2, 4, 6, 8, 10, 12, 14]),  # each head twice
        (15, 16, 2, [1]),
    ],
)
def test_workers_read_from_those_that_have_their_heads(
    rank: int, ranks: int, owners: int, sources: list[int]
) -> None:
    assert read_from(rank, ranks, owners, num_heads=8, turn=rank) == sources


HALVES, UNEVEN = ((0, 2), (2, 4)), ((0, 3), (3, 4))


@pytest.mark.parametrize(
    ("place", "num_heads", "sources", "share"),
    [
        # One stage reads all of two, and frees no other.
        (Place(), 1, UNEVEN, Share((0, 1), (), (1, 1))),
        # The second of two stages reads the end of the first source, which both read.
        (Place(0, 1, 1, HALVES), 1, UNEVEN, Share((0, 1), (), (2, 1))),
        (Place(0, 1, 0, HALVES), 1, UNEVEN, Share((0,), (), (2, 1))),
        (Place(0, 1, 1, HALVES), 1, (None,), Share((0,), (), (2,))),
        # Each of two stages has two workers: heads and layers are cut.
        (Place(1, 2), 8, ((0, 2), (0, 2), (2, 4), (2, 4)), Share((1, 3), (), (1, 1, 1, 1))),
        (Place(0, 1), 8, ((0, 2), (0, 2), (2, 4), (2, 4)), Share((0, 1, 2, 3), (), (1,) * 4)),
        # Four workers share two heads: two sources are not read, and the first worker frees them.
        (Place(0, 2), 2, (None,) * 4, Share((0,), (1, 2), (1, 1, 1, 1))),
        (Place(1, 2), 2, (None,) * 4, Share((3,), (), (1, 1, 1, 1))),
        # All sources have the only head: each worker reads another source.
        (Place(1, 2), 1, (None,) * 2, Share((1,), (), (1, 1))),
        (Place(2, 4), 1, (None,) * 2, Share((0,), (), (2, 2))),
        (Place(5, 16), 8, (None,) * 8, Share((2,), (), (2,) * 8)),
    ],
)
def test_workers_read_from_those_that_have_their_layers(
    place: Place, num_heads: int, sources: tuple[tuple[int, int] | None, ...], share: Share
) -> None:
    assert share_of(place, num_heads, tuple(map(Held, sources))) == share


def test_a_producer_without_the_layers_of_a_stage_is_refused() -> None:
    with refused("LLM_PARAM_INVALID", r"no source has layers of \(2, 4\): \(\(0, 2\),\)"):
        share_of(Place(0, 1, 1, HALVES), 1, (Held((0, 2)),))


EVEN, ODD = Held(None, (0, 2, 1)), Held(None, (1, 2, 1))


def test_a_worker_reads_the_ranks_that_have_its_tokens() -> None:
    """A worker with all tokens reads all ranks; copies with equal tokens read different ranks."""
    assert share_of(Place(), 1, (EVEN, ODD)) == Share((0, 1), (), (1, 1))
    second = Place(context=Interleaved(1, 2))
    assert share_of(second, 1, (EVEN, ODD)) == Share((1,), (), (1, 1))
    assert share_of(Place(context=Interleaved(1, 4, 2)), 1, (EVEN, ODD)).mine == (0, 1)
    assert share_of(second, 1, (EVEN, ODD, EVEN, ODD)) == Share((3,), (), (1, 1, 1, 1))
    assert share_of(Place(copy=1, copies=2), 1, (EVEN, ODD)) == Share((0, 1), (), (2, 2))


@pytest.mark.parametrize("mine", [(2, 1), (2, 6), (3, 4), (4, 3), (6, 2)])
@pytest.mark.parametrize("theirs", [(2, 1), (2, 6), (3, 4), (4, 3), (6, 2), (1, 5)])
def test_ranks_without_a_token_of_the_reader_are_not_read(
    mine: tuple[int, int], theirs: tuple[int, int]
) -> None:
    sources = tuple(Held(None, (rank, *theirs)) for rank in range(theirs[0]))
    for rank in range(mine[0]):
        tokens = [token for token in range(5000) if token // mine[1] % mine[0] == rank]
        having = {token // theirs[1] % theirs[0] for token in tokens}
        assert {*share_of(Place(context=Interleaved(rank, *mine)), 1, sources).mine} == having


@pytest.mark.parametrize(
    "sources",
    [(EVEN,), (EVEN, Held(None, (1, 2, 4))), (EVEN, Held()), (EVEN, ODD, Held((0, 1), (0, 2, 1)))],
)
def test_a_producer_without_a_rank_of_its_context_is_refused(sources: tuple[Held, ...]) -> None:
    with refused(
        "LLM_PARAM_INVALID", "sources of some layers have contexts .*; they must be None, or"
    ):
        share_of(Place(), 1, sources)


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("owners", [1, 2, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_each_source_gets_messages_from_all_its_readers(
    ranks: int, owners: int, heads: int
) -> None:
    """Each head of a reader is read from exactly one worker that has it."""
    shares = [share_of(Place(rank, ranks), heads, (Held(),) * owners) for rank in range(ranks)]
    num_messages = Counter(owner for share in shares for owner in (*share.mine, *share.spare))
    assert {share.readers for share in shares} == {
        tuple(num_messages[index] for index in range(owners))
    }
    for rank, share in enumerate(shares):
        read = [{*heads_of(owner, owners, heads)} for owner in share.mine]
        for head in heads_of(rank, ranks, heads):
            assert sum(head in heads_of_source for heads_of_source in read) == 1


def test_heads_that_cannot_be_divided_are_refused() -> None:
    assert heads_of(5, 16, 8) == range(2, 3)
    with refused("LLM_PARAM_INVALID", "num_heads=8 must be a multiple or a divisor of 3 workers"):
        heads_of(0, 3, 8)


def test_time_limits_are_checked() -> None:
    with refused("LLM_PARAM_INVALID", "lease_ttl_ms=0 must be > 0"):
        ExchangeOptions(lease_ttl_ms=0)
    with pytest.raises(TypeError, match="pull_timeout_ms='5' must be a number"):
        ExchangeOptions(pull_timeout_ms="5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_pulls"):
        ExchangeOptions(max_pulls=1.5)  # type: ignore[arg-type]


def test_a_refusal_commands_no_terminal_and_no_log():
    data = msgspec.msgpack.encode([3, 1, "no\x1b[2J room\nevent=done"])
    assert decode(data).reason == "no?[2J room event=done"
