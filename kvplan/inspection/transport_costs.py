"""The transports whose costs are known, and those of which nobody has measured any."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvplan.inspection.transport_cost import CostLine, TransportCost
from kvplan.status import invalid
from kvplan.validation import check_type, shown

_HERE: Final = "measured by benchmarks/cost_model.py on a 2-core VM, scaled to an ordinary day"
_NO_HARDWARE: Final = "it has run on simulated libraries only, which says nothing of time"

TRANSPORT_COSTS: Final = MappingProxyType(
    {
        cost.name: cost
        for cost in (
            TransportCost(
                name="local",
                way="mapped",
                source=_HERE,
                lines=(
                    CostLine(fixed_us=148, descriptor_us=0.96, mib_us=72, upto_nbytes=256 << 10),
                    CostLine(fixed_us=232, descriptor_us=0.136, mib_us=73.6, upto_nbytes=24 << 20),
                    CostLine(fixed_us=576, descriptor_us=0.112, mib_us=56),
                ),
            ),
            TransportCost(
                name="local-registered",
                way="process_vm",
                call_nbytes=4 << 20,
                call_descriptors=1024,
                source=_HERE,
                lines=(
                    CostLine(fixed_us=152, descriptor_us=3.2, mib_us=414, upto_nbytes=128 << 10),
                    CostLine(fixed_us=266, descriptor_us=0.52, mib_us=103),
                ),
            ),
            TransportCost(
                name="tcp",
                way="sockets",
                source=_HERE,
                lines=(CostLine(fixed_us=350, descriptor_us=0.24, mib_us=320),),
            ),
            TransportCost(
                name="ucx",
                way="one-sided",
                call="get or put",
                call_descriptors=1,
                source=_HERE,
                lines=(CostLine(fixed_us=1390, descriptor_us=1.34, mib_us=207),),
            ),
            TransportCost(
                name="hccl",
                way="one-sided",
                call="HCCL operation",
                call_descriptors=256,
                source=_NO_HARDWARE,
            ),
            TransportCost(name="acl", way="batch copies of ACL", source=_NO_HARDWARE),
        )
    }
)
"""By name. `plan.estimate` takes a name, or a `TransportCost` of your own."""


def cost_of(transport: str | TransportCost) -> TransportCost:
    """The costs that are meant.

    Raises:
        TypeError: neither a name nor costs.
        LLMException: LLM_PARAM_INVALID: a name that there is not.
    """
    if isinstance(transport, TransportCost):
        return transport
    cost = TRANSPORT_COSTS.get(check_type("transport", transport, str))
    if cost is None:
        names = ", ".join(TRANSPORT_COSTS)
        raise invalid(f"transport={shown(transport)} must be one of {names}, or a TransportCost")
    return cost
