"""A request whose answer is wrong, and the tools that say why: two processes on NIXL, observed.

A prefill process fills blocks of its KV cache for two requests. A decode process reads them by
NIXL, or by kvplan's if NIXL is not installed, and answers. The second answer is wrong:

  stale    the owner has given a block to another request before it was read
  swapped  the decode process has two blocks of its table in the wrong order
  layer    it reads each layer from the one after it

Without --plant, each of these happens, and `kvplan trace` names it. With --plant and --folder, the
recordings are left for you: docs/how-to/why-is-it-wrong.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import kvplan.observe
from kvplan.cli import main as command

try:
    from nixl_cu12 import nixl_agent
except ImportError:
    from kvplan.nixl import nixl_agent

LAYERS, BLOCKS, BLOCK = 4, 16, 256  # bytes of a block in each layer
THERE = {"cmpl-1": [3, 4, 9], "cmpl-2": [7, 1, 12]}  # blocks of each request, in its order
HERE = {"cmpl-1": [0, 1, 2], "cmpl-2": [5, 6, 4]}
PLANTS = {
    "stale": ["--sums", "--request", "cmpl-2"],
    "swapped": ["--sums", "--request", "cmpl-2"],
    "layer": ["--compare", "cmpl-1", "cmpl-2"],
}
"""Mistakes, and the options of `kvplan trace` that find them."""

Cache = NDArray[np.uint8]


def keys_and_values(request: str, layer: int, position: int) -> Cache:
    """Return what a model computes for a block of a request."""
    seed = crc32(f"{request} {layer} {position}".encode())
    return np.random.default_rng(seed).integers(0, 256, BLOCK, np.uint8)


def answer(blocks: list[Cache]) -> str:
    """Return a model's answer, from the blocks of a request."""
    return f"{crc32(b''.join(block.tobytes() for block in blocks)):08x}"


def registered(agent: Any) -> tuple[list[Cache], list[int]]:
    """Return an empty cache, each layer registered by its name, and the layers' addresses."""
    cache = [np.zeros((BLOCKS, BLOCK), np.uint8) for _ in range(LAYERS)]
    addresses = [layer.ctypes.data for layer in cache]
    regions = [(its, BLOCKS * BLOCK, 0, f"layer.{i}") for i, its in enumerate(addresses)]
    agent.register_memory(regions, "DRAM")
    return cache, addresses


def rows(addresses: list[int]) -> list[tuple[int, int, int]]:
    """Return every block of every layer, as NIXL takes them."""
    return [(its + BLOCK * block, BLOCK, 0) for its in addresses for block in range(BLOCKS)]


def indices(blocks: list[int], layers: list[int]) -> list[int]:
    """Return rows of these blocks, layer by layer."""
    return [layer * BLOCKS + block for layer in layers for block in blocks]


def prefill(plant: str) -> None:
    """Fill the cache, and hand the requests over; wait until they have been read."""
    agent = nixl_agent("prefill")
    cache, addresses = registered(agent)
    every = rows(addresses)
    for request, blocks in THERE.items():
        for layer in range(LAYERS):
            for position, block in enumerate(blocks):
                cache[layer][block] = keys_and_values(request, layer, position)
        # The only line for the tools: without an observer it does nothing.
        kvplan.observe.sums(request, [every[row] for row in indices(blocks, [*range(LAYERS)])])
    if plant == "stale":
        for tensor in cache:
            tensor[THERE["cmpl-2"][1]] = 0  # another request's: block 1 was freed too early
    metadata = agent.get_agent_metadata().hex()
    print(json.dumps({"metadata": metadata, "addresses": addresses}), flush=True)
    sys.stdin.readline()  # the other process has ended


def decode(plant: str, said: str) -> None:
    """Read the requests, and answer."""
    there = json.loads(said)
    agent = nixl_agent("decode")
    cache, addresses = registered(agent)
    peer = agent.add_remote_agent(bytes.fromhex(there["metadata"]))
    name = peer.decode() if isinstance(peer, bytes) else peer
    lists = (
        agent.prep_xfer_dlist("", rows(addresses), "DRAM"),
        agent.prep_xfer_dlist(name, rows(there["addresses"]), "DRAM"),
    )
    for request, theirs in THERE.items():
        table, layers = [*theirs], [*range(LAYERS)]
        if request == "cmpl-2" and plant == "swapped":
            table[0], table[1] = table[1], table[0]
        if request == "cmpl-2" and plant == "layer":
            layers = [*layers[1:], layers[0]]
        mine = indices(HERE[request], [*range(LAYERS)])
        handle = agent.make_prepped_xfer(
            "READ", lists[0], mine, lists[1], indices(table, layers), request.encode()
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        right = answer(
            [
                keys_and_values(request, layer, position)
                for layer in range(LAYERS)
                for position in range(len(theirs))
            ]
        )
        found = answer([tensor[block] for tensor in cache for block in HERE[request]])
        verdict = "as it should be" if found == right else f"WRONG, alone it is {right}"
        print(f"{request}: {state}, the answer is {found}: {verdict}", flush=True)


def run(plant: str, folder: Path) -> str:
    """Run both processes, observed; return what the decode process printed."""
    observed = [sys.executable, "-m", "kvplan.run", "--observe", f"nixl,sums={folder}", "--"]
    program = [*observed, __file__, "--plant", plant]
    with subprocess.Popen(
        [*program, "--role", "prefill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        said = next((line for line in owner.stdout if line.startswith("{")), "")  # NIXL logs
        done = subprocess.run(
            [*program, "--role", "decode", "--said", said],
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        owner.communicate("\n")
    if done.returncode or owner.returncode:
        sys.exit(f"FAILED: the processes ended with {done.returncode} and {owner.returncode}")
    return done.stdout


def find(plant: str, folder: Path) -> None:
    """Have what was planted found, and print it."""
    text = run(plant, folder)
    print(f"--- {plant}\n{text}", end="", flush=True)
    files = sorted(map(str, folder.glob("nixl-decode-*.kvrec")))
    if "--sums" in PLANTS[plant]:
        files += sorted(map(str, folder.glob("nixl-prefill-*.kvrec")))
    print(f"$ kvplan trace {' '.join(PLANTS[plant])}", flush=True)
    if "cmpl-1: DONE" not in text or text.count("WRONG") != 1:
        sys.exit("FAILED: not the second answer alone is wrong")
    if command(["trace", *files, *PLANTS[plant]]) != 1:
        sys.exit("FAILED: kvplan trace found no difference")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plant", choices=PLANTS, help="make this mistake only")
    parser.add_argument("--folder", type=Path, help="of the recordings, which are left there")
    parser.add_argument("--role", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("--said", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role == "prefill":
        prefill(asked.plant)
    elif asked.role == "decode":
        decode(asked.plant, asked.said)
    elif asked.plant and asked.folder:
        print(run(asked.plant, asked.folder), end="")
    else:
        for plant in [asked.plant] if asked.plant else PLANTS:
            with tempfile.TemporaryDirectory() as folder:
                find(plant, Path(folder))


if __name__ == "__main__":
    main()
