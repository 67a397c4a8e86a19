"""What the small examples share: another process, numbered tensors, and a check."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc


def explain_yourself(text: str) -> None:
    """Answer --help with what an example is about; refuse all other arguments."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=text, formatter_class=formatter).parse_args()


@contextmanager
def peer(run: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Call `run(pipe, *arguments)` in a new process that inherits nothing; yields our end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # a process that has ended then reads as end of file
    with ours:
        try:
            yield ours
        except EOFError:
            sys.exit(f"FAILED: the process of {run.__name__} has ended too early")
    process.join()
    if process.exitcode:
        sys.exit(f"FAILED: the process of {run.__name__} has ended with {process.exitcode}")


def until_closed(pipe: Connection) -> None:
    """Wait until the process that has started this one closes its end, or ends."""
    pipe.poll(None)


def numbered(desc: CacheDesc, first: int = 0) -> NDArray[np.float16]:
    """Return all tensors of a cache; each row holds its own number, first + 100 * tensor + row."""
    tensors = 100 * np.arange(desc.num_tensors)
    rows = first + tensors[:, None] + np.arange(desc.batch_size)
    ones = np.ones(desc.shape[1:], np.float16)
    return rows.astype(np.float16).reshape(*rows.shape, 1, 1, 1) * ones


def check(what: str, arrived: Iterable[NDArray[Any]], sent: NDArray[Any]) -> None:
    """Print what arrived, tensor by tensor, or end the example: it is not what was sent."""
    print(f"{what}:")
    for tensor, (got, expected) in enumerate(zip(arrived, sent, strict=True)):
        print(f"  tensor {tensor}: {_rows(got)}")
        if not np.array_equal(got, expected):
            sys.exit(f"FAILED: tensor {tensor} should hold {_rows(expected)}")


def _rows(tensor: NDArray[Any]) -> str:
    """Each row's values: one, if all its elements are the same."""
    shown = []
    for row in tensor.reshape(len(tensor), -1):
        values = [f"{value:g}" for value in dict.fromkeys(row.tolist())]
        shown.append(values[0] if len(values) == 1 else f"({' '.join(values)})")
    return " ".join(shown)
