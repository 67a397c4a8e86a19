"""What moves bytes from where to where: directly, through staging memory, or not at all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvplan.device.ascend import AscendDevice
from kvplan.device.cuda import CudaDevice
from kvplan.transport.protocol import Kind

if TYPE_CHECKING:
    from kvplan.device.ascend import Product
    from kvplan.device.device import Device
    from kvplan.transport.choice import TransportOptions

How = Literal["direct", "staged", "refused"]
KINDS = get_args(Kind)


class Way(NamedTuple):
    """Between the memory of this process and that of a peer, in both directions.

    Attributes:
        local: kind of memory of this process.
        remote: kind of memory of the peer; in one process, of the other side.
        how: "direct": one batch from where the bytes are to where they go; "staged": through other
            memory, which `note` names; "refused".
        note: by what means; where refused, what to do instead.
    """

    local: Kind
    remote: Kind
    how: How
    note: str


def ways_within(device: Device | None) -> list[Way]:
    """Between caches of one process."""
    ways = [Way("host", "host", "direct", "plain copies, on a pool of threads")]
    if device is not None:
        copies = "copies of CUDA" if isinstance(device, CudaDevice) else "batch copies of ACL"
        ways += [
            Way("host", "device", "direct", copies),
            Way("device", "device", "direct", "asynchronous copies on several streams, one device"),
        ]
    return ways


def ways_between(
    transport: str,
    reaches: frozenset[Kind],
    device: Device | None,
    options: TransportOptions,
) -> list[Way]:
    """Over a link of that transport, which works here."""
    kinds = KINDS if device is not None else ("host",)
    return [
        Way(local, remote, *_how(transport, local, remote, reaches, device, options))
        for local, remote in itertools.product(kinds, kinds)
    ]


def _how(
    transport: str,
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: Device | None,
    options: TransportOptions,
) -> tuple[How, str]:
    match transport:
        case "hccl" if remote in reaches:
            return _over_hccl(local, remote, device, options)
        case "hccl":
            return "refused", (
                f"HCCL takes no {remote} memory on this product: let the peer have that cache in "
                "device memory, or on one host link with kvplan.transport=local"
            )
        case "local" if remote not in reaches:
            return "refused", "peers on this host reach no device memory: link over hccl"
        case "local" if remote == "device":
            return "direct", (
                "allocations are mapped once a link, and this side's device copies; of another GPU "
                "where there is peer access"
            )
        case "local" if local == "host":
            return "direct", (
                "allocated caches are mapped and copied, registered ones go by "
                "process_vm_readv/writev"
            )
        case "local":
            return "direct", (
                "caches that the peer's engine has allocated, by copies from pageable memory; not "
                "what it has registered: copy that to a HOST cache"
            )
        case "tcp" if "device" in (local, remote):
            return "staged", "over sockets, through buffers of the connection"
        case "tcp":
            return "direct", "from and to the blocks themselves, over sockets"
        case "ucx" if {local, remote} <= reaches:
            return "direct", "a get or put for each descriptor"
        case "ucx":
            return "refused", (
                "UCX takes host memory alone: copy it to a HOST cache, or link over hccl"
            )
        case _ if {local, remote} <= reaches:
            return "direct", ""
    return "refused", f"it reaches {' and '.join(sorted(reaches))} memory"


def _over_hccl(
    local: Kind, remote: Kind, device: Device | None, options: TransportOptions
) -> tuple[How, str]:
    product = device.product if isinstance(device, AscendDevice) else None
    takes = product.registers if product is not None else frozenset()
    if local in takes:
        note = "by HCCL; staged where local memory is not registered"
        return "direct", note + _over_hccs(local, remote, product)
    if options.staging_nbytes:
        return "staged", "by HCCL, through device memory on this side, pipelined"
    return "refused", "HCCL does not take it as it is, and there is no staging memory"


def _over_hccs(local: Kind, remote: Kind, product: Product | None) -> str:
    """What is otherwise over HCCS, as the end of a note."""
    if product is None:
        return ""
    if remote not in product.remote_kinds(is_hccs=True):
        how = "refused"
    elif local not in product.local_kinds(is_hccs=True):
        how = "staged"
    else:
        return ""
    return f". Over HCCS, between devices of one host or super pod: {how}"
