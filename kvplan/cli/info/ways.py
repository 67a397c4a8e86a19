"""What moves bytes from where to where: directly, through staging memory, or not at all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvplan.transport.protocol import Kind

if TYPE_CHECKING:
    from kvplan.device.ascend import AscendDevice, Product
    from kvplan.transport.choice import TransportOptions

How = Literal["direct", "staged", "refused"]
KINDS = get_args(Kind)


class Way(NamedTuple):
    """Between the memory of this process and that of a peer, in both directions.

    Attributes:
        local: kind of memory of this process.
        remote: kind of memory of the peer; in one process, of the other side.
        how: "direct": one batch from where the bytes are to where they go; "staged": through other
            memory, which `note` tells; "refused".
        note: by what means; where refused, what to do instead.
    """

    local: Kind
    remote: Kind
    how: How
    note: str


def ways_within(has_device: bool) -> list[Way]:
    """Between caches of one process."""
    ways = [Way("host", "host", "direct", "plain copies, on a pool of threads")]
    if has_device:
        ways += [
            Way("host", "device", "direct", "batch copies of ACL"),
            Way("device", "device", "direct", "asynchronous copies on several streams, one device"),
        ]
    return ways


def ways_between(
    transport: str,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> list[Way]:
    """Over a link of that transport, which works here."""
    row = {"hccl": _over_hccl, "local": _over_local, "ucx": _over_ucx, "tcp": _over_tcp}.get(
        transport, _over_any
    )
    kinds = KINDS if device is not None else ("host",)
    return [
        row(local, remote, reaches, device, options)
        for local, remote in itertools.product(kinds, kinds)
    ]


def _over_hccl(
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> Way:
    if remote not in reaches:
        return Way(
            local,
            remote,
            "refused",
            f"HCCL takes no {remote} memory on this product: let the peer have that cache in "
            "device memory, or on one host link with kvplan.transport=local",
        )
    product = None if device is None else device.product
    takes = product.registers if product is not None else frozenset()
    if local in takes:
        note = "by HCCL; staged where local memory is not registered"
        return Way(local, remote, "direct", note + _over_hccs(local, remote, product))
    if options.staging_nbytes:
        return Way(local, remote, "staged", "by HCCL, through device memory at this end, pipelined")
    return Way(
        local, remote, "refused", "HCCL does not take it as it is, and there is no staging memory"
    )


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


def _over_local(
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> Way:
    if remote not in reaches:
        return Way(
            local, remote, "refused", "peers on this host reach no device memory: link over hccl"
        )
    if local == "host":
        how = (
            "allocated caches are mapped and copied, registered ones go by process_vm_readv/writev"
        )
        return Way(local, remote, "direct", how)
    how = "caches that the peer's engine has allocated, by copies of ACL from pageable memory; not "
    return Way(local, remote, "direct", f"{how}what it has registered: copy that to a HOST cache")


def _over_ucx(
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> Way:
    if {local, remote} <= reaches:
        return Way(local, remote, "direct", "a get or put for each descriptor")
    how = "UCX takes host memory alone: copy it to a HOST cache, or link over hccl"
    return Way(local, remote, "refused", how)


def _over_tcp(
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> Way:
    if "device" in (local, remote):
        return Way(local, remote, "staged", "over sockets, through buffers of the connection")
    return Way(local, remote, "direct", "from and to the blocks themselves, over sockets")


def _over_any(
    local: Kind,
    remote: Kind,
    reaches: frozenset[Kind],
    device: AscendDevice | None,
    options: TransportOptions,
) -> Way:
    if {local, remote} <= reaches:
        return Way(local, remote, "direct", "")
    return Way(local, remote, "refused", f"it reaches {' and '.join(sorted(reaches))} memory")
