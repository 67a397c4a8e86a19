"""A worker of a hybrid model: states and attention share memory, as in vLLM 0.33."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.serving import Place
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.states import StateForm
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model
from tests.datadist.states import ATTENTION_BLOCKS, BLOCKS, MODELS, TOKENS, Rank, share, whole
from tests.vllm.worker import VllmWorker

KINDS = {
    "Mamba2, one group": "MAMBA2",
    "Mamba2, four groups": "MAMBA2",
    "gated delta net": "GDN_ATTN",
    "Mamba1": "MAMBA1",
}
STATE_TOKENS = 64  # of a block of states; in vLLM a multiple of that of attention


class HostArray(NDArray[Any]):
    """An array with its device, and with torch's `view` of a shape."""

    device = SimpleNamespace(type="cpu")

    def view(self, item: Any) -> Any:  # type: ignore[override]
        return self.reshape(item) if isinstance(item, tuple) else super().view(item)


def form_of(name: str, ranks: int, columns_first: bool) -> StateForm:
    """Return the form that the connector reads from vLLM's description of a rank's states."""
    model, rank = MODELS[name], Rank(MODELS[name], 0, ranks, columns_first)
    conv, ssm = rank.conv[0], rank.ssm[0]
    spec = SimpleNamespace(
        shapes=(conv.shape[1:], ssm.shape[1:]),
        dtypes=(conv.dtype, ssm.dtype),
        mamba_type=SimpleNamespace(name=KINDS[name]),
        tp_replicated=False,
    )
    groups = model.columns["B"].num_heads if "B" in model.columns else None
    return StateForm.of(spec, ranks, groups=groups, columns_first=columns_first)


class HybridWorker(VllmWorker):
    """A worker of three layers with states and three of attention, whose blocks share pages."""

    def __init__(
        self, name: str, rank: int, ranks: int, *, produces: bool, columns_first: bool = False
    ) -> None:
        self.model = MODELS[name]
        self.rank = Rank(self.model, rank, ranks, columns_first)
        self.pages = self.rank.pages
        heads = share(whole(self.model, 0)["kv"], rank, ranks).shape[1]
        shape = (BLOCKS, heads, TOKENS, 2 * self.model.dim)
        nbytes = 2 * int(np.prod(shape[1:]))
        self.kv = [page[:, :nbytes].view(np.uint16).reshape(shape) for page in self.pages]
        layers: dict[str, Any] = {}
        for number, (page, kv) in enumerate(zip(self.pages, self.kv, strict=True)):
            layers[f"model.layers.{number}.mixer"] = page.view(np.int8)[:, None, None]
            layers[f"model.layers.{3 + number}.attn"] = kv
        mixers, attention = (
            tuple(layer for layer in layers if kind in layer) for kind in ("mixer", "attn")
        )
        form = form_of(name, ranks, columns_first)
        groups = (
            LayerGroup(attention, TOKENS),
            LayerGroup(mixers, STATE_TOKENS, states=form),
        )
        model = Model(
            name=name,
            num_heads=self.model.kv_heads,
            place=Place(rank, ranks),
            worker=rank,
            num_blocks=BLOCKS,
            groups=groups,
            produces=produces,
            consumes=not produces,
        )
        self.scheduler = ConnectorScheduler(
            "prefill" if produces else "decode", states=(0, STATE_TOKENS)
        )
        self.worker = ConnectorWorker(self.scheduler.instance, model, ConnectorOptions.of({}))
        self.worker.register({layer: item.view(HostArray) for layer, item in layers.items()})

    def fill(self, request: dict[str, NDArray[Any]]) -> None:
        """Write a request to its blocks: the states, and keys and values beside each other."""
        self.rank.fill(request)
        mine = share(request["kv"], self.rank.rank, self.rank.ranks)
        for layer, kv in enumerate(self.kv):
            for number, block in enumerate(ATTENTION_BLOCKS):
                tokens = mine[layer][:, :, number * TOKENS : (number + 1) * TOKENS]
                kv[block] = np.concatenate([tokens[:, 0], tokens[:, 1]], axis=-1)
