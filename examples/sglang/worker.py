"""One worker of the program: SGLang's own manager, sender and receiver, prefill's end or decode's.

Started by `python -m kvplan.run --as nixl worker.py ROLE nixl PORT`. The classes are SGLang's,
unmodified; this file replaces the scheduler and the model around them. Commands come as JSON lines.
"""

import importlib
import json
import os
import sys
import time
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from transformers import AutoProcessor  # before the mocks: it looks for torchvision itself

# SGLang imports torchvision for models with images. PyPI has none that fits torch for CPUs.
assert AutoProcessor
PARTS = ("", ".transforms", ".transforms.functional", ".io")
PARTS += (".transforms.v2", ".transforms.v2.functional")
for name in PARTS:
    sys.modules[f"torchvision{name}"] = MagicMock(name=name)

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

LAYERS, PAGES, PAGE_NBYTES, AUX_NBYTES, REQUESTS = 4, 64, 32 << 10, 256, 16


class Pool:
    """Keys and values of each layer, and the rows of auxiliary data."""

    def __init__(self) -> None:
        self.kv = [np.full((PAGES, PAGE_NBYTES), 0xAB, np.uint8) for _ in range(2 * LAYERS)]
        self.aux = np.full((REQUESTS, AUX_NBYTES), 0xAB, np.uint8)

    def args(self) -> KVArgs:
        """Describe the pool as SGLang's scheduler does."""
        args = KVArgs()
        args.engine_rank = args.gpu_id = args.system_dp_rank = args.pp_rank = 0
        args.kv_data_ptrs = [tensor.ctypes.data for tensor in self.kv]
        args.kv_data_lens = [tensor.nbytes for tensor in self.kv]
        args.kv_item_lens = [PAGE_NBYTES] * len(self.kv)
        args.kv_layer_ids = [*range(LAYERS)] * 2
        args.kv_data_mem_kinds = ["DRAM"] * len(self.kv)
        args.kv_cache_dtype_str = "torch.float16"
        args.aux_data_ptrs = [self.aux.ctypes.data]
        args.aux_data_lens = [self.aux.nbytes]
        args.aux_item_lens = [AUX_NBYTES]
        args.state_types, args.state_data_ptrs, args.state_data_lens = [], [], []
        args.state_item_lens, args.state_layer_ids, args.state_dim_per_tensor = [], [], []
        args.ib_device = ""
        args.kv_head_num = args.total_kv_head_num = 4
        args.page_size = 16
        args.prefill_start_layer, args.prefill_end_layer = 0, LAYERS
        args.rust_http_port = None
        return args


def content(number: int, pages: "list[int]", request: int) -> Any:
    """Return the bytes of these pages of the request in tensor `number`."""
    seeds = np.arange(len(pages))[:, None] * 7 + request * 31 + number * 13
    return (seeds + np.arange(PAGE_NBYTES)[None, :] // 64).astype(np.uint8)


def poll_until(end: Any, wanted: "set[int]", seconds: float = 60) -> int:
    """Poll as SGLang's scheduler does, until a wanted state or a failure."""
    deadline = time.monotonic() + seconds
    while (state := end.poll()) not in wanted | {KVPoll.Failed}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return int(state)


def reply(**values: Any) -> None:
    """Answer the last command."""
    print("REPLY", json.dumps(values), flush=True)


def main() -> None:
    """Serve commands until the end of the input."""
    role, surface, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    module = importlib.import_module(f"sglang.srt.disaggregation.{surface}.conn")
    prefix = {"nixl": "Nixl", "mooncake": "Mooncake"}[surface]
    server_args = ServerArgs(
        model_path="dummy",
        device="cpu",
        host="127.0.0.1",
        disaggregation_mode=role,
        disaggregation_bootstrap_port=port,
        disaggregation_transfer_backend=surface,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
    get_parallel().override_permanently(pp_group=None)
    if surface == "mooncake":
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

        mooncake_transfer_engine.init_mooncake_transfer_engine("127.0.0.1", 0, None)
    if role == "prefill":
        server = getattr(module, f"{prefix}KVBootstrapServer")("127.0.0.1", port)
        assert server
    pool = Pool()
    manager = getattr(module, f"{prefix}KVManager")(
        pool.args(), DisaggregationMode(role), server_args, False
    )
    reply(torch=torch.__version__, file=module.__file__)
    ends: dict[int, Any] = {}
    before: list[Any] = []
    address = f"127.0.0.1:{port}"
    for line in sys.stdin:
        command = json.loads(line)
        room, pages = command.get("room", 0), command.get("pages", [])
        what = command["do"]
        if what == "receive":
            manager.try_ensure_parallel_info(address)
            before = [tensor.copy() for tensor in pool.kv]
            ends[room] = end = getattr(module, f"{prefix}KVReceiver")(manager, address, room)
            end.init(0)
            state = poll_until(end, {KVPoll.WaitingForInput})
            end.send_metadata(np.array(pages, np.int32), room % REQUESTS)
            reply(state=state)
        elif what == "send":
            for number, tensor in enumerate(pool.kv):
                tensor[pages] = content(number, pages, room)
            pool.aux[room % REQUESTS] = room % 251
            ends[room] = end = getattr(module, f"{prefix}KVSender")(manager, address, room)
            end.init(len(pages), room % REQUESTS)
            state = poll_until(end, {KVPoll.WaitingForInput})
            half = len(pages) // 2
            end.send(np.array(pages[:half], np.int32))
            if command.get("rest", True):
                end.send(np.array(pages[half:], np.int32))
            reply(state=state)
        elif what == "rest":
            ends[room].send(np.array(pages, np.int32))
            reply()
        elif what == "abort":
            ends[room].abort()
            deadline = time.monotonic() + 30
            while not (is_safe := manager.is_abort_release_safe(room, 1)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            reply(is_safe=is_safe)
        elif what == "wait":
            reply(state=poll_until(ends[room], {KVPoll.Success}))
        elif what == "check":
            kv = all(
                np.array_equal(tensor[pages], content(number, pages, room))
                for number, tensor in enumerate(pool.kv)
            )
            others = np.delete(np.arange(PAGES), pages)
            kept = all(
                np.array_equal(tensor[others], old[others])
                for tensor, old in zip(pool.kv, before, strict=True)
            )
            aux = bool((pool.aux[room % REQUESTS] == room % 251).all())
            reply(kv=kv, aux=aux, others_kept=kept)
        elif what == "fill":
            for tensor in pool.kv:
                tensor[pages] = 0xCD
            reply()
        elif what == "filled":
            reply(filled=all(bool((tensor[pages] == 0xCD).all()) for tensor in pool.kv))
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads have no end


if __name__ == "__main__":
    main()
