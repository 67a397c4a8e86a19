"""Prefill, written for llm_datadist: the program of an Ascend user, which runs here as it is.

    python -m kvplan.run llm_datadist_prefill.py     # one terminal
    python -m kvplan.run llm_datadist_decode.py      # another one

First in request mode: prefill waits until decode has pulled blocks, and a slot by the request it
holds. Then in remote mode: prefill pushes blocks, and then the same layer by layer, each one when
the model has computed it. Decode compares every byte, and exits with 1 if one is wrong. Between
two hosts, both programs are given the same addresses: --prefill, --decode and --scheduler.
"""

import argparse
import json
import math
import time
from multiprocessing.connection import Connection, Listener
from threading import Event

import numpy as np
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
    TransferWithCacheKeyConfig,
)

PREFILL, DECODE = 1, 2
REQUEST = 4711
LAYERS = 3
MINE, THEIRS = [4, 5, 9], [7, 8, 2]  # blocks of the request, here and over there
PAGED = CacheDesc(2 * LAYERS, [16, 8, 2, 16], DataType.DT_FLOAT, Placement.DEVICE)
SLOTS = CacheDesc(2 * LAYERS, [3, 32, 2, 16], DataType.DT_FLOAT, Placement.DEVICE)


def numbered(desc: CacheDesc) -> np.ndarray:
    """Return all tensors of a cache; no two elements hold the same number."""
    shape = (desc.num_tensors, *desc.shape)
    return np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)


class Tensors:
    """A stack of float32 tensors of one shape: stands in for those of torch_npu.

    On a machine with Ascend devices they lie in the memory of one, as `torch.zeros(...,
    device="npu")` would, and `addresses` are what its `data_ptr()` is. Elsewhere they are arrays of
    NumPy.

    Args:
        values: what they hold at first, tensor by tensor.
        device_id: where they lie, if there is such a device.
    """

    def __init__(self, values: np.ndarray, device_id: int) -> None:
        # Only for this class, which a program with torch_npu does not need.
        from kvplan import LLMException, LLMStatusCode
        from kvplan.device.ascend import AscendDevice

        self._here = np.array(values, np.float32, order="C")
        self._device: AscendDevice | None = None
        base = self._here.ctypes.data
        try:
            self._device = AscendDevice(device_id)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                raise
            # There is none: the array is what peers read and write.
        else:
            self._buffer = self._device.allocate(values.nbytes)
            base = self._buffer.address
            self._device.write(base, self._here)
        self._tensor_nbytes = values[0].nbytes
        self.addresses = [base + number * self._tensor_nbytes for number in range(len(values))]

    def write(self, values: np.ndarray, first: int = 0) -> None:
        """Let the tensors from `first` on hold these values."""
        self._here[first : first + len(values)] = values
        if self._device is not None:
            self._device.write(self.addresses[first], self._here[first : first + len(values)])

    def read(self) -> np.ndarray:
        """Return what they hold now."""
        if self._device is not None:
            self._device.read(self.addresses[0], self._here)
        return self._here.copy()

    def close(self) -> None:
        """Release the device; no engine may use the tensors any more."""
        if self._device is not None:
            del self._buffer
            self._device.close()
            self._device = None


def ip_and_port(address: str) -> tuple[str, int]:
    ip, _, port = address.rpartition(":")
    return ip, int(port)


def rank_table(*ips: str) -> str:
    """Rank and device 0 on the host with the first address, 1 on that with the second."""
    devices: dict[str, list[dict[str, str]]] = {ip: [] for ip in ips}  # one, if they are one host
    for i, ip in enumerate(ips):
        devices[ip].append({"device_id": str(i), "device_ip": ip, "rank_id": str(i)})
    servers = [{"server_id": ip, "device": held} for ip, held in devices.items()]
    table = {"version": "1.0", "server_count": str(len(servers)), "status": "completed"}
    return json.dumps({**table, "server_list": servers})


def linked_by_name(datadist: LLMDataDist, options: argparse.Namespace) -> int:
    """Link both clusters, each of which calls this; returns the communicator's id."""
    table = rank_table(*(ip_and_port(value)[0] for value in (options.prefill, options.decode)))
    name = f"pair-{ip_and_port(options.scheduler)[1]}"
    comm_id = datadist.link(name, {PREFILL: 0, DECODE: 1}, table)
    while (status := datadist.query_register_mem_status(comm_id)) == RegisterMemStatus.PREPARING:
        time.sleep(0.01)
    if status != RegisterMemStatus.OK:
        raise RuntimeError(f"link {name} is {status}")
    return comm_id


def request_mode(datadist: LLMDataDist, decode: Connection, options: argparse.Namespace) -> None:
    """Keep caches with keys until decode has pulled from them."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": 1 << 20})
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    blocks, slots = (Tensors(numbered(value), config.device_id) for value in (PAGED, SLOTS))
    manager.register_blocks_cache(PAGED, blocks.addresses, BlocksCacheKey(PREFILL))
    computed = manager.register_cache(SLOTS, slots.addresses)
    waiting = manager.allocate_cache(SLOTS, [CacheKey(PREFILL, REQUEST)])
    manager.copy_cache(waiting, computed, dst_batch_index=0, src_batch_index=1)
    manager.deallocate_cache(waiting)  # lives on until its key is pulled
    comm_id = linked_by_name(datadist, options)
    decode.recv()
    datadist.unlink(comm_id)
    datadist.finalize()
    for value in (blocks, slots):
        value.close()


class Model(LayerSynchronizer):
    """Computes keys and values, layer after layer, into a cache that is sent meanwhile."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._computed = [Event() for _ in range(LAYERS)]

    def forward(self) -> None:
        result = numbered(PAGED)
        for layer, computed in enumerate(self._computed):
            both = slice(2 * layer, 2 * layer + 2)  # keys and values
            self._tensors.write(result[both], first=both.start)
            computed.set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Return when the layer may be sent."""
        seconds = None if timeout_in_millis is None else timeout_in_millis / 1000
        return self._computed[layer_index].wait(seconds)


def remote_mode(datadist: LLMDataDist, decode: Connection, here: str, there: str) -> None:
    """Push into memory that decode has registered."""
    config = LLMConfig()
    config.device_id = 0
    config.listen_ip_info = here
    config.local_comm_res = ""
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    tensors = Tensors(numbered(PAGED), config.device_id)
    cache = manager.register_blocks_cache(PAGED, tensors.addresses, BlocksCacheKey(PREFILL))
    decode.recv()  # its memory is registered
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = DECODE
    cluster.append_local_ip_info(*ip_and_port(here))
    cluster.append_remote_ip_info(*ip_and_port(there))
    code, codes = datadist.link_clusters([cluster], 5000)
    if code != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link_clusters: {codes}")

    key = BlocksCacheKey(DECODE)
    manager.push_blocks(key, cache, src_blocks=MINE, dst_blocks=THEIRS)
    decode.send("pushed")
    decode.recv()  # it has looked, and cleared its blocks

    tensors.write(np.zeros_like(numbered(PAGED)))
    model = Model(tensors)
    every = range(LAYERS)
    configs = [TransferWithCacheKeyConfig(key, src_layer_range=every, dst_layer_range=every)]
    task = manager.transfer_cache_async(cache, model, configs, MINE, THEIRS)
    model.forward()
    if task.synchronize(timeout_in_millis=5000) != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"transfer_cache_async: {task.get_results()}")
    decode.send("pushed")
    decode.recv()
    datadist.unlink_clusters([cluster], 5000)
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    tensors.close()


def arguments(text: str) -> argparse.Namespace:
    """Parse the command line of both programs."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=formatter)
    add = parser.add_argument
    add("--prefill", default="127.0.0.1:26001", help="where prefill's engine listens")
    add("--decode", default="127.0.0.1:26000", help="where decode's engine listens")
    add("--scheduler", default="127.0.0.1:26100", help="where prefill waits for decode")
    return parser.parse_args()


def main() -> None:
    """Run both modes, one after the other, with one LLMDataDist."""
    options = arguments(__doc__ or "")
    with Listener(ip_and_port(options.scheduler)) as listener:
        print("prefill: waiting for decode", flush=True)
        with listener.accept() as decode:
            datadist = LLMDataDist(LLMRole.PROMPT, PREFILL)
            request_mode(datadist, decode, options)
            remote_mode(datadist, decode, options.prefill, options.decode)
    print("prefill: all was sent")


if __name__ == "__main__":
    main()
