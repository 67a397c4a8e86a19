"""A cache that is offered over several transports: by all of them, or by none."""

from __future__ import annotations

import pytest

from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.transport import offer
from tests.support.refusals import refused


@pytest.mark.parametrize("over_tcp_first", [True, False])
@pytest.mark.parametrize(("local", "tcp"), [(1, 3), (2, 3), (3, 1), (3, 2)])
def test_memory_that_one_transport_refuses_is_offered_by_none(
    local: int, tcp: int, *, over_tcp_first: bool
) -> None:
    """Each transport refuses once at its second range, and once at its third."""
    with LocalTransport(max_registrations=local) as one, TcpTransport(max_registrations=tcp) as two:
        both = [two, one] if over_tcp_first else [one, two]
        ranges = [bytearray(4096) for _ in range(3)]
        with refused("LLM_OUT_OF_MEMORY", "deregister memory"):
            offer(both, ranges, writable=True)
        assert [repr(each).endswith(": 0 registrations>") for each in both] == [True, True]
        made = offer(both, ranges[: min(local, tcp)], writable=True)
        assert [*made.metadata] == [each.name for each in both]
        assert all(made.metadata.values())
