"""A worker of vLLM on a CPU, as its connector sees it, for tests and their peers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.serving import Place
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model

LAYERS, BLOCKS, HEADS, DIM = 2, 8, 2, 4


class CpuTensor:
    """An array with the used part of a torch tensor's interface: its device and `view`."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.shape, self.ndim = array.shape, array.ndim
        self.__array_interface__ = array.__array_interface__

    def view(self, shape: tuple[int, ...]) -> CpuTensor:
        return CpuTensor(self.array.reshape(shape))


class VllmWorker:
    """A worker with both halves of a connector, and its cache.

    Attributes:
        layers: An array for each layer, as in vLLM; layer 10 comes after layer 9. Groups share
            the arrays: a block belongs to one group at a time.

    Args:
        windows: Window of each group of two layers; 0 means none.
        first_layer: Number of the first layer.
        latent: True for layers of MLA, which all workers have whole.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        produces: bool = True,
        block_tokens: int = 32,
        blocks: int = BLOCKS,
        layers: int = LAYERS,
        dim: int = DIM,
        latent: bool = False,
        windows: Sequence[int] = (0,),
        first_layer: int = 9,
        model: str = "tiny",
        place: Place | None = None,
        **options: Any,
    ) -> None:
        place = place or Place()
        shape = (blocks, block_tokens, dim) if latent else (blocks, HEADS, block_tokens, 2 * dim)
        arrays = [np.zeros(shape, np.float32) for _ in range(layers)]
        groups = [
            LayerGroup(
                tuple(
                    f"model.layers.{first_layer + index}.attn" for index in reversed(range(*ends))
                ),
                block_tokens,
                "" if latent else "vec",
                window,
            )
            for number, window in enumerate(windows)
            for ends in [(layers * number, layers * (number + 1))]
        ]
        self.layers = {
            name: array
            for group in groups
            for name, array in zip(group.layers, arrays, strict=True)
        }
        described = Model(
            name=model,
            num_heads=1 if latent else HEADS,
            place=place,
            worker=place.stage,
            num_blocks=blocks,
            groups=tuple(groups),
            produces=produces,
            consumes=not produces,
        )
        self.scheduler = ConnectorScheduler(engine_id, windowed=any(windows))
        self.worker = ConnectorWorker(
            self.scheduler.instance, described, ConnectorOptions.of(options)
        )
        self.worker.register({name: CpuTensor(layer) for name, layer in self.layers.items()})
        if (address := self.worker.address) is not None:
            self.scheduler.set_workers({(0, 0): address})

    def packed(self, layer: int) -> NDArray[np.float32]:
        """Return a layer as attention on CPUs has it: (block, head, keys or values, content)."""
        array = self.layers[f"model.layers.{layer}.attn"]
        return array.reshape(len(array), HEADS, 2, -1)

    def finish(self, name: str, prompt: list[int], *blocks: list[int]) -> dict[str, Any]:
        """Let a request finish with blocks in each group, and return its parameters."""
        request = self.request(name, prompt, {"do_remote_decode": True})
        self.scheduler.arrived(request)
        _, params = self.scheduler.finished(request, blocks)
        assert params is not None
        self.step()
        return params

    def fetch(self, request: Any, *blocks: list[int], computed: int = 0) -> None:
        """Let a request arrive and have blocks."""
        self.scheduler.arrived(request)
        missing = self.scheduler.missing_tokens(request, computed)
        self.scheduler.allocated(request, blocks, missing)
        self.step()

    def step(self) -> None:
        """Let vLLM make a step."""
        step = self.scheduler.take_step()
        self.worker.prepare(step)
        self.worker.begin(step)

    def request(self, name: str, prompt: list[int], params: dict[str, Any]) -> Any:
        return SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            prompt_token_ids=[*prompt],
            _all_token_ids=[*prompt],
            num_prompt_tokens=len(prompt),
            num_computed_tokens=len(prompt),
            max_tokens=16,
            status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
            lora_request=None,
            prompt_embeds=None,
            cache_salt=None,
            mm_features=[],
        )

    def results(self) -> tuple[set[str], set[str], set[int | str]]:
        """Wait for results after a step, and return them; failed blocks come last."""
        assert self.worker.exchange.wait(60_000)
        found = self.worker.results()
        return found.sent, found.received, found.failed_blocks | found.failed
