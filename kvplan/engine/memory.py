"""Memory of caches, allocated or registered, on the host or a device, and arrays over it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvplan.device.memory import DeviceMemory
from kvplan.execution.memory import HostMemory, check_lent, using
from kvplan.execution.rows import are_apart
from kvplan.status import invalid, unsupported
from kvplan.tensors.description import check_described, check_host
from kvplan.tensors.form import TensorForm, array_form, read_form
from kvplan.transport.protocol import DeviceRange
from kvplan.types import CacheDesc, Placement
from kvplan.validation import UINT64_MAX, check_width

if TYPE_CHECKING:
    from kvplan.device.device import Device
    from kvplan.engine.pools import Span
    from kvplan.execution import TensorMemory
    from kvplan.transport.link import PeerMemory
    from kvplan.transport.protocol import Registrable


CacheMemory = HostMemory | DeviceMemory

_ACCELERATORS: Final = {"cuda": "cuda", "npu": "ascend"}
"""torch's type of device -> value of kvplan.accelerator."""

_ALL: Final = slice(None)  # every tensor

# Owner of registered addresses. Without an owner each transfer would look up every address twice,
# which costs microseconds a tensor.
_USER: Final = "the user, until it is unregistered"


def memory_of_span(desc: CacheDesc, span: Span) -> CacheMemory:
    """Return the memory of a cache: tensors that follow each other in `span`, kept allocated."""
    sizes = np.full(desc.num_tensors, desc.tensor_nbytes, dtype=np.uint64)
    offsets = np.arange(desc.num_tensors, dtype=np.uint64) * np.uint64(desc.tensor_nbytes)
    addresses = np.uint64(span.address) + offsets
    if span.device is not None:
        return DeviceMemory(span.device, addresses, sizes, writable=True, owner=span)
    return HostMemory(addresses, sizes, writable=True, owner=span)


def memory_of_tensors(
    desc: CacheDesc,
    tensors: Sequence[Any],
    *,
    writable: bool | None,
    device: Device | None = None,
) -> CacheMemory:
    """Return the memory of the user's tensors: addresses, arrays or tensors of a framework.

    Args:
        desc: description of the cache; if the engine has a device, the placement says where the
            tensors must be.
        tensors, writable: as for `register_cache` and `CacheRegistry.register`.
        device: the device of the engine, if it has one.
    """
    if isinstance(tensors, str | bytes) or not isinstance(tensors, Sequence):
        raise TypeError(
            f"tensors must be a sequence of addresses or arrays, not {type(tensors).__name__}"
        )
    if len(tensors) != desc.num_tensors:
        raise invalid(
            f"tensors has {len(tensors)} elements; num_tensors={desc.num_tensors} are needed"
        )
    if all(isinstance(given, int | np.integer) for given in tensors):
        addresses = [given if isinstance(given, int) else int(given) for given in tensors]
        for position, address in enumerate(addresses):
            if check_width(f"tensors[{position}]", address, 0, UINT64_MAX) == 0:
                raise invalid(f"tensors[{position}]=0 is not a valid address")
        _check_apart(np.array(addresses, np.uint64), desc)
        return memory_at(
            desc, addresses, device=device, writable=writable is not False, owner=_USER
        )
    forms = [read_form(f"tensors[{position}]", tensor) for position, tensor in enumerate(tensors)]
    on_device = device if desc.placement is Placement.DEVICE else None
    for form, given in zip(forms, tensors, strict=True):
        if on_device is None:
            check_host(form, _how_to_register(form, device))
        else:
            _check_on_device(form, given, on_device)
        check_described(form, desc)
    memory: CacheMemory
    if on_device is None:
        memory = HostMemory.from_forms(forms)
    else:
        memory = DeviceMemory.from_forms(on_device, forms)
    _check_apart(memory.addresses, desc)
    if writable and not memory.writable:
        raise invalid("writable=True, but one of the tensors is a read-only array")
    if writable is False and memory.writable:
        if on_device is not None:
            assert isinstance(memory, DeviceMemory)
            return DeviceMemory(
                on_device,
                memory.addresses,
                memory.nbytes,
                writable=False,
                owner=memory,
                watches=memory.watches,
            )
        return HostMemory(memory.addresses, memory.nbytes, writable=False, owner=memory)
    return memory


def _check_apart(addresses: NDArray[np.uint64], desc: CacheDesc) -> None:
    """Refuse tensors of one cache that share memory, which would be written twice."""
    nbytes = desc.tensor_nbytes
    if are_apart(addresses, [desc], [len(addresses)]):
        return
    order = np.argsort(addresses, kind="stable")
    gaps = np.diff(addresses[order])
    close = np.flatnonzero(gaps < np.uint64(nbytes))
    if len(close):
        first, second = sorted(order[close[0] : close[0] + 2].tolist())
        raise invalid(
            f"tensors[{second}] at {int(addresses[second]):#x} shares memory with "
            f"tensors[{first}] at {int(addresses[first]):#x}, of {nbytes} bytes; a cache needs "
            "memory of its own for each tensor"
        )


def _check_on_device(form: TensorForm, given: object, device: Device) -> None:
    """Refuse a tensor that is not on the device: LLM_PARAM_INVALID.

    Tensors and `llm.DeviceId` count the devices that this process sees (CUDA_VISIBLE_DEVICES).
    Another process may give the same number to another device; UUIDs and PCI addresses identify
    devices across processes.
    """
    at = form.device
    if at is None:
        raise invalid(
            f"{form.name} is a {type(given).__name__}; a cache with placement=DEVICE needs tensors "
            f"on device {device.id}, or their addresses; arrays are host memory, of placement=HOST "
            "(kvplan.accelerator=none: placement is only a label)"
        )
    if at.kind not in ("", device.tensor_kind) or at.number not in (None, device.id):
        raise invalid(
            f"{form.name} is on {at.text}, but the caches of this engine with placement=DEVICE are "
            f"on device {device.tensor_kind}:{device.id} (options kvplan.accelerator and "
            "llm.DeviceId)"
        )


def _how_to_register(form: TensorForm, device: Device | None) -> str:
    """Return the remedy for an error about a tensor on a device."""
    at = form.device
    if at is None:
        return ""
    if device is not None:
        return ", as placement=HOST says; CacheDesc.from_tensors sets the placement of tensors"
    if at.kind not in (known := _ACCELERATORS):
        return ""
    number = "" if at.number is None else f" and llm.DeviceId={at.number}"
    return f", because the engine has no device: set kvplan.accelerator={known[at.kind]}{number}"


def memory_at(
    desc: CacheDesc,
    addresses: Sequence[int],
    *,
    device: Device | None,
    writable: bool = True,
    owner: object = None,
) -> CacheMemory:
    """Check the placement of `addresses`, one for each tensor of `desc`, and return their memory.

    `owner` keeps the memory alive; None: each transfer checks the memory again.
    """
    if device is None:
        return HostMemory.from_addresses(desc, addresses, writable=writable, owner=owner)
    if desc.placement is Placement.DEVICE:
        return DeviceMemory.from_addresses(device, desc, addresses, writable=writable, owner=owner)
    for position, address in enumerate(addresses):
        device.check_host(f"tensor {position}", address)
    return HostMemory.from_addresses(desc, addresses, writable=writable, owner=owner)


def joined(memories: Sequence[TensorMemory]) -> TensorMemory:
    """Return the memory of several caches of this process, one after another."""
    if len(memories) == 1:
        return memories[0]
    addresses = np.concatenate([*map(attrgetter("addresses"), memories)])
    nbytes = np.concatenate([*map(attrgetter("nbytes"), memories)])
    writable = all(map(attrgetter("writable"), memories))
    if {*map(type, memories)} == {HostMemory}:
        on_host = cast("tuple[HostMemory, ...]", tuple(memories))
        owner = on_host if all(map(attrgetter("held"), on_host)) else None
        return HostMemory(addresses, nbytes, writable=writable, owner=owner, parts=on_host)
    on_device = tuple(memory for memory in memories if isinstance(memory, DeviceMemory))
    if len(on_device) < len(memories) or len({id(part.device) for part in on_device}) > 1:
        raise unsupported(
            "caches of this process are in host memory and on the device, which one transfer "
            "cannot combine; use two transfers"
        )
    return DeviceMemory(
        on_device[0].device,
        addresses,
        nbytes,
        writable=writable,
        owner=on_device if all(each.held for each in on_device) else None,
        parts=on_device,
        watches=tuple(watch for each in on_device for watch in each.watches),
    )


def check_again(memory: CacheMemory) -> None:
    """Refuse memory that has moved or gone since its registration: LLM_PARAM_INVALID."""
    if isinstance(memory, DeviceMemory):
        memory.check_located()
    else:
        memory.check_mapped()


def merged_ranges(memory: CacheMemory, *, adjacent: bool = True) -> list[tuple[int, int]]:
    """Return the (address, nbytes) of the tensors; overlaps are merged, and `adjacent` ones."""
    ranges: list[tuple[int, int]] = []
    for address, nbytes in sorted(_pairs(memory.addresses, memory.nbytes)):
        start, before = ranges[-1] if ranges else (0, -1)
        if address < start + before or (adjacent and address == start + before):
            ranges[-1] = (start, max(before, address + nbytes - start))
        else:
            ranges.append((address, nbytes))
    return ranges


def offered_ranges(memory: CacheMemory) -> Sequence[Registrable]:
    """Return the ranges of the user's memory that are registered for peers.

    Adjacent tensors on a device stay apart, because they may belong to two allocations.
    """
    if isinstance(memory, DeviceMemory):
        return [DeviceRange(*span) for span in merged_ranges(memory, adjacent=False)]
    return merged_ranges(memory)


def _pairs(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> Iterable[tuple[int, int]]:
    return zip(addresses.tolist(), sizes.tolist(), strict=True)


def tensor_arrays(
    desc: CacheDesc, memory: CacheMemory | PeerMemory, chosen: slice = _ALL
) -> list[NDArray[Any]]:
    """Return an array over each tensor, or each chosen one; an array keeps the memory alive.

    Arrays have the shape of the cache; for packed elements a row is flat, in whole bytes.
    """
    if isinstance(memory, DeviceMemory):
        raise unsupported(
            f"the cache is in memory of device {memory.device.id}, which arrays cannot view; "
            "arrays(cache, copy=True) and write_cache copy it"
        )
    shape, dtype = array_form(desc)
    strides = _strides(desc, shape, dtype.itemsize)
    return [
        np.asarray(_Tensor(memory, address, shape, strides, dtype))
        for address in memory.addresses[chosen].tolist()
    ]


def _strides(desc: CacheDesc, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return the strides of an array over a tensor, in bytes; None if it is C-contiguous."""
    if desc.row_stride is None:
        return None
    axis, strides = desc.batch_dim_index, []
    for dim in range(len(shape)):
        unit, inner = (desc.stride, axis) if dim <= axis else (itemsize, len(shape) - 1)
        strides.append(unit * math.prod(shape[dim + 1 : inner + 1]))
    return tuple(strides)


class _Tensor:
    """Array interface of a tensor. NumPy's array refers to this object, and so to the memory."""

    def __init__(
        self,
        memory: HostMemory | PeerMemory,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any],
    ) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not memory.writable),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
        }


def read_tensors(desc: CacheDesc, memory: CacheMemory) -> list[NDArray[Any]]:
    """Return a copy of each tensor, in the shape of `tensor_arrays`."""
    memory.check()
    shape, dtype = array_form(desc)
    copies = [np.empty(shape, dtype) for _ in range(desc.num_tensors)]
    with using(memory):
        if isinstance(memory, DeviceMemory):
            for address, copy in zip(memory.addresses.tolist(), copies, strict=True):
                for offset, rows in _pieces(desc, copy):
                    check_lent(memory)
                    memory.device.read(address + offset, rows)
        else:
            for tensor, copy in zip(tensor_arrays(desc, memory), copies, strict=True):
                check_lent(memory)
                copy[...] = tensor
    return copies


def _pieces(desc: CacheDesc, array: NDArray[Any]) -> Iterator[tuple[int, memoryview]]:
    """Yield each contiguous piece of a tensor: its offset there, and its part of `array`."""
    if desc.row_stride is None:
        yield 0, array.data
        return
    rows = array.reshape(-1, *array.shape[desc.batch_dim_index + 1 :])
    for row in range(len(rows)):
        yield row * desc.stride, rows[row : row + 1].data


def block_checksum(tensors: Sequence[NDArray[Any]], axis: int, block: int) -> str:
    """Return the BLAKE2b-64 of a block or slot in all tensors; `axis` counts blocks or slots."""
    total = blake2b(digest_size=8)
    for tensor in tensors:
        row = np.ascontiguousarray(np.moveaxis(tensor, axis, 0)[block])
        total.update(row.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def write_tensors(
    desc: CacheDesc, memory: CacheMemory, arrays: Sequence[Any] | NDArray[Any]
) -> None:
    """Copy an array into each tensor; all arrays are checked before the first is written."""
    memory.check()
    given = _checked(desc, arrays)
    if not memory.writable:
        raise invalid("the cache was registered with writable=False, or from read-only arrays")
    with using(memory):
        if isinstance(memory, DeviceMemory):
            for address, array in zip(memory.addresses.tolist(), given, strict=True):
                for offset, rows in _pieces(desc, array):
                    check_lent(memory)
                    memory.device.write(address + offset, rows)
        else:
            tensors = tensor_arrays(desc, memory)
            for position, array in enumerate(given):  # views of tensors that are written earlier
                if any(np.may_share_memory(array, earlier) for earlier in tensors[:position]):
                    given[position] = array.copy()
            for tensor, array in zip(tensors, given, strict=True):
                check_lent(memory)
                tensor[...] = array.view(tensor.dtype)


def _checked(desc: CacheDesc, arrays: Sequence[Any] | NDArray[Any]) -> list[NDArray[Any]]:
    if isinstance(arrays, str | bytes) or not isinstance(arrays, Sequence | np.ndarray):
        raise TypeError(f"arrays must be a sequence of arrays, not {type(arrays).__name__}")
    if len(arrays) != desc.num_tensors:
        raise invalid(
            f"arrays has {len(arrays)} elements; num_tensors={desc.num_tensors} are needed"
        )
    shape, dtype = array_form(desc)
    given = [np.asarray(tensor) for tensor in arrays]
    for position, array in enumerate(given):
        if array.shape != shape or array.dtype.itemsize != dtype.itemsize or array.dtype.hasobject:
            raise invalid(
                f"arrays[{position}] has shape {array.shape} and type {array.dtype}; it must have "
                f"shape {shape} and type {dtype}, or another type of {dtype.itemsize} bytes"
            )
    return [np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for array in given]
