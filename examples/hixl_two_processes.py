"""Two processes, written for hixl: one reads the other's memory, and writes it back, by addresses.

    python -m kvplan.run hixl_two_processes.py

The server registers 512 blocks of 16 KiB and listens; its Python takes no part in what follows. The
client reads all blocks with one call, in reversed order, adds 1 to each byte, and writes them back
as requests of 64 blocks each, which it asks for until all have ended. Then it says so in a message.
Each process compares every byte, and exits with 1 if one is wrong.
"""

import argparse
import multiprocessing
import socket
import sys
from multiprocessing.connection import Connection

import hixl
import numpy as np

BLOCKS, NBYTES = 512, 16 << 10
PER_REQUEST = 64


def check(what: str, status: int) -> None:
    if status != hixl.SUCCESS:
        sys.exit(f"{what} returned {status}")


def engine_at(address: str, options: dict[str, str]) -> hixl.Hixl:
    engine = hixl.Hixl()
    check("initialize", engine.initialize(address, options))
    return engine


def register(engine: hixl.Hixl, blocks: np.ndarray) -> int:
    memory = hixl.MemDesc(addr=blocks.ctypes.data, len=blocks.nbytes)
    status, handle = engine.register_mem(memory, hixl.MEM_HOST)
    check("register_mem", status)
    return handle


def numbered() -> np.ndarray:
    """Return all blocks; the bytes of each depend on its number."""
    numbers = np.arange(BLOCKS)[:, None] * 31 + np.arange(NBYTES)
    return numbers.astype(np.uint8)


def server(pipe: Connection, address: str, options: dict[str, str]) -> None:
    engine = engine_at(address, options)
    blocks = numbered()
    handle = register(engine, blocks)
    pipe.send(blocks.ctypes.data)
    pipe.recv()  # the client has written all, and said so
    status, messages = engine.get_notifies()
    check("get_notifies", status)
    right = np.array_equal(blocks, numbered() + 1)
    print(f"server: {messages[0].name}: {messages[0].notify_msg}; as it should be: {right}")
    check("deregister_mem", engine.deregister_mem(handle))
    engine.finalize()
    sys.exit(not right)


def client(pipe: Connection, address: str, options: dict[str, str]) -> bool:
    there = pipe.recv()
    engine = engine_at(address.rpartition(":")[0], options)  # no port: it does not listen
    blocks = np.zeros((BLOCKS, NBYTES), np.uint8)
    handle = register(engine, blocks)
    here = blocks.ctypes.data
    check("connect", engine.connect(address, timeout_in_millis=5000))

    reversed_order = [
        hixl.TransferOpDesc(here + (BLOCKS - 1 - i) * NBYTES, there + i * NBYTES, NBYTES)
        for i in range(BLOCKS)
    ]
    check("transfer_sync", engine.transfer_sync(address, hixl.READ, reversed_order, 5000))
    right = np.array_equal(blocks, numbered()[::-1])
    print(f"client: read {BLOCKS} blocks of {NBYTES} bytes; as they should be: {right}")

    blocks += 1
    for first in range(0, BLOCKS, PER_REQUEST):
        args = hixl.TransferArgs()
        args.user_data = first
        some = reversed_order[first : first + PER_REQUEST]
        check("transfer_async", engine.transfer_async(address, hixl.WRITE, some, args)[0])
    written: list[int] = []
    while len(written) < BLOCKS // PER_REQUEST:
        query = hixl.GetTransferStatusArgs(skip_waiting=True)
        status, results = engine.get_all_transfer_status(query)
        check("get_all_transfer_status", status)
        for result in results:
            if result.status != hixl.TransferStatus.COMPLETED:
                sys.exit(f"request {result.req} has ended as {result.status}")
            written.append(result.user_data)
    print(f"client: wrote them back, {PER_REQUEST} at a time, from {sorted(written)} on")

    message = hixl.NotifyDesc(name="written", notify_msg=f"{BLOCKS} blocks")
    check("send_notify", engine.send_notify(address, message))
    check("disconnect", engine.disconnect(address))
    check("deregister_mem", engine.deregister_mem(handle))
    engine.finalize()
    pipe.send("done")
    return right


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--transport", default="auto", help="of kvplan: auto, local, tcp...")
    options = {"kvplan.transport": parser.parse_args().transport}
    address = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server, args=(theirs, address, options))
    process.start()
    theirs.close()
    right = client(ours, address, options)
    process.join()
    sys.exit(not right or process.exitcode)


if __name__ == "__main__":
    main()
