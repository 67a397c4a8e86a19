"""Use an installed kvplan: each native module, a plan, a pull between two processes, the command.

`tools/wheels.py` and the tests run this file without the rest of the project. Its arguments are
the transports to try; default: local and tcp.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import pkgutil
import platform
import subprocess
import sys
import sysconfig
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import kvnative
import kvplan
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)

DESC = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)
THEIRS, MINE = [4, 5, 9], [7, 8, 2]


def serve(pipe: Connection, options: dict[str, str]) -> None:
    """Serve, in the other process, a cache in which each tensor holds its own number."""
    with LlmDataDist(1, LlmRole.PROMPT) as prefill:
        prefill.initialize({"llm.ListenIpInfo": "127.0.0.1:0", **options})
        cache = prefill.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        for number, tensor in enumerate(prefill.arrays(cache)):
            tensor[:] = number + 1
        pipe.send(prefill.listen_address)
        pipe.recv()


def pull(options: dict[str, str]) -> None:
    """Pull three blocks of this cache, and compare all bytes."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    peer = spawn.Process(target=serve, args=(there, options), daemon=True)
    peer.start()
    there.close()
    with LlmDataDist(2, LlmRole.DECODER) as decode:
        decode.initialize(options)
        decode.link_clusters([ClusterInfo(1, here.recv())], 120_000).raise_for_status()
        cache = decode.allocate_blocks_cache(DESC)
        decode.pull_blocks(BlocksCacheKey(1), cache, THEIRS, MINE)
        for number, tensor in enumerate(decode.arrays(cache)):
            expected = np.zeros_like(tensor)
            expected[MINE] = number + 1
            np.testing.assert_array_equal(tensor, expected)
    here.send(None)
    peer.join()
    if peer.exitcode != 0:
        raise SystemExit(f"the other process ended with {peer.exitcode}")


def main() -> None:
    modules = [module.name for module in pkgutil.iter_modules(kvnative.__path__)]
    for name in modules:
        importlib.import_module(f"kvnative.{name}")
    gil = ""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        on = getattr(sys, "_is_gil_enabled", lambda: True)()
        gil = f"; the GIL is {'on' if on else 'off'}"
    print(
        f"  kvplan {importlib.metadata.version('kvplan')} on Python {platform.python_version()},"
        f" {platform.machine()}, NumPy {np.__version__}: {len(modules)} modules imported"
        f" from {Path(kvplan.__file__).parents[1]}{gil}"
    )
    plan = kvplan.plan(Transfer(Rows(DESC, THEIRS), Rows(DESC, MINE)), local="dst")
    print(f"  {plan!r}")
    for transport in sys.argv[1:] or ("local", "tcp"):
        pull({"kvplan.transport": transport})
        print(
            f"  pulled blocks {THEIRS} of another process over {transport}: all bytes as expected"
        )
    print("  $ kvplan info", flush=True)
    told = subprocess.run([sys.executable, "-m", "kvplan", "info"], check=False)
    if told.returncode not in (0, 1):  # 1: kvplan does not work here, which is printed
        raise SystemExit(f"kvplan info ended with {told.returncode}")


if __name__ == "__main__":
    main()
