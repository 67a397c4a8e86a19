"""Decode, written for llm_datadist: the other half of llm_datadist_prefill, to be started second.

    python -m kvplan.run llm_datadist_decode.py

It pulls in request mode, is pushed to in remote mode, and compares every byte that it has then:
what arrived, and what lies beside it.
"""

import argparse
import sys
from multiprocessing.connection import Client, Connection

import numpy as np
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist_prefill import (
    DECODE,
    MINE,
    PAGED,
    PREFILL,
    REQUEST,
    SLOTS,
    THEIRS,
    Tensors,
    arguments,
    ip_and_port,
    linked_by_name,
    numbered,
)


def check(what: str, arrived: np.ndarray, expected: np.ndarray) -> None:
    """Say that all is right, or end the program: it is not what was sent."""
    wrong = np.argwhere(arrived != expected)
    if len(wrong):
        tensor, row = wrong[0][:2]
        sys.exit(f"FAILED: {what}: {len(wrong)} numbers differ, first in tensor {tensor} row {row}")
    print(f"decode: {what}: {np.count_nonzero(expected)} numbers, all in their places")


def request_mode(datadist: LLMDataDist, prefill: Connection, options: argparse.Namespace) -> None:
    """Pull blocks, and a slot by its request, whose key is gone then."""
    config = LLMConfig()
    config.device_id = 1
    config.enable_cache_manager = True
    datadist.init(config.generate_options())
    manager = datadist.cache_manager
    empty = [np.zeros_like(numbered(value)) for value in (PAGED, SLOTS)]
    blocks, slots = (Tensors(item, config.device_id) for item in empty)
    paged = manager.register_blocks_cache(PAGED, blocks.addresses)
    contiguous = manager.register_cache(SLOTS, slots.addresses)
    comm_id = linked_by_name(datadist, options)

    # Over there they are MINE, as prefill calls them.
    manager.pull_blocks(BlocksCacheKey(PREFILL), paged, src_blocks=MINE, dst_blocks=THEIRS)
    expected = empty[0].copy()
    expected[:, THEIRS] = numbered(PAGED)[:, MINE]
    check("pull_blocks", blocks.read(), expected)

    request = CacheKey(PREFILL, REQUEST)
    manager.pull_cache(request, contiguous, batch_index=2)
    expected = empty[1].copy()
    expected[:, 2] = numbered(SLOTS)[:, 1]
    check("pull_cache", slots.read(), expected)
    try:
        manager.pull_cache(request, contiguous)
        sys.exit("FAILED: one key was pulled twice")
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise
        print("decode: pull_cache again: the key is gone")
    datadist.unlink(comm_id)
    prefill.send("pulled")
    datadist.finalize()
    for value in (blocks, slots):
        value.close()


def remote_mode(datadist: LLMDataDist, prefill: Connection, here: str) -> None:
    """Register memory, listen, and be pushed to."""
    config = LLMConfig()
    config.device_id = 1
    config.listen_ip_info = here
    config.local_comm_res = ""
    datadist.init(config.generate_options())
    manager = datadist.cache_manager
    empty = np.zeros_like(numbered(PAGED))
    blocks = Tensors(empty, config.device_id)
    cache = manager.register_blocks_cache(PAGED, blocks.addresses, BlocksCacheKey(DECODE))
    expected = empty.copy()
    expected[:, THEIRS] = numbered(PAGED)[:, MINE]

    prefill.send("registered")
    for what in ("push_blocks", "transfer_cache_async"):
        prefill.recv()  # the pushing end says when
        check(what, blocks.read(), expected)
        blocks.write(empty)
        prefill.send("looked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    blocks.close()


def main() -> None:
    """Run both modes, one after the other, with one LLMDataDist."""
    options = arguments(__doc__ or "")
    with Client(ip_and_port(options.scheduler)) as prefill:
        datadist = LLMDataDist(LLMRole.DECODER, DECODE)
        request_mode(datadist, prefill, options)
        remote_mode(datadist, prefill, options.decode)


if __name__ == "__main__":
    main()
