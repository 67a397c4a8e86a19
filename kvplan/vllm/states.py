"""States of Mamba and linear attention in vLLM's pages, as caches with heads.

A page of a layer holds its convolution state, its recurrent state, or first one and then the other.
vLLM's `MambaSpec` has the shapes and the kind of a rank's states. The kind determines which columns
belong to which heads of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from kvplan.layout import Shard
from kvplan.status import invalid
from kvplan.tensors.states import Columns, StateCache, convolution_caches, recurrent_cache


class StateSpec(Protocol):
    """The fields of vLLM's MambaSpec that the connector uses."""

    shapes: tuple[tuple[int, ...], ...]  # of a rank's states in a page, without blocks
    dtypes: tuple[Any, ...]
    mamba_type: Any
    tp_replicated: bool


@dataclass(frozen=True)
class StateForm:
    """The states in a page of a layer, as a rank of tensor parallelism has them."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]  # of torch, or of NumPy
    columns: Mapping[str, Columns]  # of the convolution, in the model
    num_heads: int  # of the recurrent state, in the model; 0: none
    ranks: int  # that share out the heads
    columns_first: bool = False  # True if they are the first dimension of a convolution state

    @classmethod
    def of(
        cls, spec: StateSpec, ranks: int, *, groups: int | None = None, columns_first: bool = False
    ) -> StateForm:
        """Read vLLM's description of a layer's states; `groups` are those of B and C of Mamba2."""
        ranks = 1 if spec.tp_replicated else ranks
        kind, shapes = spec.mamba_type.name, tuple(map(tuple, spec.shapes))
        described = f"states {kind} of shapes {list(map(list, shapes))}"
        conv, ssm = (None, shapes[0]) if kind == "LINEAR" else (shapes[0], shapes[-1])
        if len(shapes) != (1 if kind in ("LINEAR", "SHORT_CONV") else 2):
            raise NotImplementedError(f"KvplanConnector: {described} are not supported")
        width = 0 if conv is None else conv[0 if columns_first else 1]
        columns: dict[str, Columns] = {}
        if kind in ("MAMBA1", "SHORT_CONV"):
            columns = {"x": Columns(width * ranks, 1)}
        elif kind == "MAMBA2":
            heads, head_dim, state = ssm
            local = (width - heads * head_dim) // 2 // state
            if groups is None and (local > 1 or ranks == 1):  # otherwise ranks may share a group
                groups = local * ranks
            if groups is None:
                raise NotImplementedError(
                    f"KvplanConnector: {described}: the model does not say its number of groups"
                )
            columns = {"x": Columns(heads * ranks, head_dim)}
            columns |= {name: Columns(groups, state) for name in ("B", "C")}
        elif kind == "GDN_ATTN":
            heads, value_dim, key_dim = ssm
            keys = (width - heads * value_dim) // 2 // key_dim
            columns = {name: Columns(keys * ranks, key_dim) for name in ("q", "k")}
            columns["v"] = Columns(heads * ranks, value_dim)
        elif kind != "LINEAR":
            raise NotImplementedError(f"KvplanConnector: {described} are not supported")
        form = cls(
            shapes,
            tuple(spec.dtypes),
            columns,
            0 if kind == "SHORT_CONV" else ssm[0] * ranks,
            ranks,
            columns_first,
        )
        held = sum(max(1, of.num_heads // ranks) * of.dim for of in columns.values())
        if held != width:
            raise NotImplementedError(
                f"KvplanConnector: {described} have {width} columns; the model's "
                f"{columns} are {held} for each of {ranks} ranks"
            )
        return form

    def caches(self, pages: Sequence[Any], rank: int, shard: Shard) -> dict[str, StateCache]:
        """Return the caches in the pages of the layers, by name: the projections, and `state`.

        `pages` has a tensor for each layer with the bytes of its pages, which may have padding.
        """
        rank %= self.ranks
        found: list[list[Any]] = []
        offset = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = offset + prod(shape) * dtype.itemsize
            views = []
            for tensor in pages:
                flat = tensor.reshape(tensor.shape[0], -1)
                if flat.shape[1] < end:
                    raise invalid(f"a page has {flat.shape[1]} bytes; its states have {end}")
                views.append(flat[:, offset:end].view(dtype).reshape(len(flat), *shape))
            found.append(views)
            offset = end
        made: dict[str, StateCache] = {}
        if self.columns:
            made = convolution_caches(
                found[0],
                self.columns,
                rank,
                self.ranks,
                columns_first=self.columns_first,
                shard=shard,
            )
        if self.num_heads:
            layout = "block head state" if len(self.shapes[-1]) == 2 else "block head dim state"
            made["state"] = recurrent_cache(
                found[-1], self.num_heads, rank, self.ranks, layout=layout, shard=shard
            )
        return made
