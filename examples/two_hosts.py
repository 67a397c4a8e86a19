"""Two hosts, one key: decode pulls a request from another host, and pushes one back.

    kvplan keygen cluster.key      # once; copy it to the other host, mode 0600
    python two_hosts.py --key cluster.key --listen 10.0.0.1:26000        # on the one host
    python two_hosts.py --key cluster.key --connect 10.0.0.1:26000       # on the other one

Without the key no other engine can link, and the handshake is encrypted; --encrypt encrypts the
caches as well. Prefill, which listens, waits until decode is done. A notification tells it so:
kvplan delivers it after the last byte of the push. Each host compares all bytes that it was given,
and ends with 1, and says why, if one is wrong or the other host has failed.
"""

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LinkState,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
)

PREFILL, DECODE = 1, 2
PAGED = CacheDesc(num_tensors=16, shape=(64, 16, 8, 64), data_type=DataType.DT_UINT16)
AT_PREFILL, AT_DECODE = [4, 5, 9, 30, 31, 32, 33, 2], [17, 18, 40, 41, 42, 43, 7, 8]
BACK = [50, 51, 52, 53, 54, 55, 60, 61]  # where decode pushes its own blocks to
GONE = (LinkState.BROKEN, LinkState.CLOSED)


def content(seed: int) -> list[NDArray[np.uint16]]:
    """Return all tensors of a cache, with other numbers for each seed."""
    random = np.random.default_rng(seed)
    shape = (PAGED.num_tensors, *PAGED.shape)
    return list(random.integers(1, 1 << 16, size=shape, dtype=np.uint16))


def prefill(options: Options) -> None:
    """Listen, be pulled from, and look at what was pushed."""
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize(options)
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(PREFILL))
        datadist.write_cache(cache, content(PREFILL))
        print(f"prefill: listening at {datadist.listen_address}", flush=True)
        notifications = datadist.notifications()
        while not notifications.wait(timeout_ms=500):
            gone = any(link.state in GONE for link in datadist.links())
            if gone and len(notifications) == 0:
                sys.exit("FAILED: prefill: decode has gone, and has not said that it was done")
        (message,) = notifications
        print(f"prefill: cluster {message.cluster_id} says: {message.data.decode()}")
        expected = content(PREFILL)
        for tensor, pushed in zip(expected, content(DECODE), strict=True):
            tensor[BACK] = pushed[BACK]
        check("prefill", datadist, cache, expected)


def decode(options: Options, address: str) -> None:
    """Link, pull a request, look at it, and push another one."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize(options)
        clusters = [ClusterInfo(PREFILL, address)]
        datadist.link_clusters(clusters, timeout_ms=10_000).raise_for_status()
        (link,) = datadist.links()
        print(f"decode: linked with {address}; the bytes go over {link.transport}")

        cache = datadist.allocate_blocks_cache(PAGED)
        datadist.write_cache(cache, content(DECODE))
        key = BlocksCacheKey(PREFILL)
        began = time.perf_counter()
        datadist.pull_blocks(key, cache, AT_PREFILL, AT_DECODE, timeout_ms=10_000)
        ms = (time.perf_counter() - began) * 1e3
        nbytes = datadist.links()[0].bytes_pulled
        print(f"decode: pulled {nbytes >> 10} KiB in {ms:.1f} ms")
        expected = content(DECODE)
        for tensor, pulled in zip(expected, content(PREFILL), strict=True):
            tensor[AT_DECODE] = pulled[AT_PREFILL]
        check("decode", datadist, cache, expected)
        datadist.push_blocks(cache, key, BACK, BACK, timeout_ms=10_000, notify=b"pushed 8 blocks")


def check(
    name: str, datadist: LlmDataDist, cache: Cache, expected: list[NDArray[np.uint16]]
) -> None:
    """End the program if a byte of the cache is wrong."""
    found = datadist.arrays(cache, copy=True)
    for number, (tensor, right) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(tensor, right):
            blocks = np.flatnonzero((tensor != right).any(axis=(1, 2, 3)))
            sys.exit(f"FAILED: {name}: tensor {number} is wrong in blocks {blocks}")
    print(f"{name}: {len(found)} tensors of {len(found[0])} blocks, every byte as it should be")


def main() -> None:
    """Be one of the two."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", metavar="IP:PORT", help="be prefill, at this address")
    side.add_argument("--connect", metavar="IP:PORT", help="be decode; where prefill listens")
    parser.add_argument("--key", required=True, help="file that `kvplan keygen` has made")
    parser.add_argument("--encrypt", action="store_true", help="encrypt the caches too")
    parser.add_argument("--transport", default="auto", help="auto (default), tcp, ucx, local")
    given = parser.parse_args()
    try:
        options = Options(
            listen_ip_info=given.listen or "",
            cluster_key_file=given.key,
            encrypt=given.encrypt,
            transport=given.transport,
        )
        if given.listen:
            prefill(options)
        else:
            decode(options, given.connect)
    except LLMException as error:  # an argument, the key, the address, the other host
        sys.exit(f"FAILED: {error}")
    except KeyboardInterrupt:  # the engine is closed by now
        sys.exit(130)


if __name__ == "__main__":
    main()
