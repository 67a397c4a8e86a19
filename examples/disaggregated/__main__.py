"""A language model prefills in one process and goes on generating in another.

The KV cache that the second one goes on from was planned and moved by kvplan. A third process runs
the model alone: its token ids must be identical. Then one block id is made wrong on purpose. At
last prefill runs as two processes with a part of the KV heads each, in another layout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .device import DEVICES, SIMULATED, prepare
from .hosts import TWO_HOSTS, Host, hosts
from .messages import (
    SHARD_CLUSTERS,
    AwaitPush,
    Gather,
    Generated,
    Handover,
    Located,
    Moved,
    MovedByLayer,
    OfferedHeads,
    PlantWrongHead,
    Pushed,
    PushTarget,
    Settings,
    WrongBlock,
    WrongHead,
)
from .report import (
    Console,
    DemoError,
    check_changed,
    check_identical,
    check_located,
    hidden_text,
    moved_text,
    speed_text,
)
from .requirements import SetupError, check_installed, weights_path
from .workers import WorkerError, Workers

PROMPT = Path(__file__).with_name("prompt.txt")
BREAK_TOKEN = 216
"""In prompt.txt, a token of the block that says when the lens was invented."""


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return an argument type: a whole number in [low, high]."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [{low}, {high}]")
        return int(text)

    return parse


def readable(text: str) -> Path:
    """Return the path of a text file that is not empty, as an argument type."""
    path = Path(text)
    try:
        if path.read_text(encoding="utf-8").strip():
            return path
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from None
    raise argparse.ArgumentTypeError(f"{text!r} is empty")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m examples.disaggregated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompt", metavar="FILE", type=readable, default=PROMPT, help="what to ask the model")
    add("--max-tokens", metavar="N", type=whole(2, 4096), default=96, help="tokens to generate")
    add("--block-size", metavar="N", type=whole(1, 1024), default=16, help="tokens in a block")
    add("--break-token", metavar="N", type=whole(0, 8191),
        help="break the block of this token of the prompt")  # fmt: skip
    add("--device", choices=DEVICES, default="host",
        help="where the KV caches lie: in host memory; in that of the first two Ascend devices; or "
        "of two simulated ones, which this needs no NPU for")  # fmt: skip
    add("--hosts", type=int, choices=(1, 2), default=1,
        help="let prefill and decode run on two hosts, made of network namespaces: with an address "
        "each, and TCP between them")  # fmt: skip
    add("--timeout", metavar="SECONDS", type=whole(1, 3600), default=120,
        help="give up when no process says a word for so long")  # fmt: skip
    options = parser.parse_args(argv)
    if options.hosts == 2 and options.device != "host":
        parser.error(f"--hosts 2 has its KV caches in host memory, not --device {options.device}")
    return options


def demonstrate(
    options: argparse.Namespace, console: Console, workers: Workers, places: tuple[Host, ...]
) -> None:
    """Run the demo from its first line to its last; `places`: of prefill and of decode.

    Raises:
        WorkerError: a process failed.
        DemoError: none did, but the outcome is not as it must be.
    """
    settings = Settings(
        options.prompt, options.max_tokens, options.block_size, weights_path(), options.device
    )
    if options.device == "simulated":
        console.title(SIMULATED)
    if options.hosts == 2:
        console.title(TWO_HOSTS)
    here, there = (replace(settings, host=place) for place in places)
    console.title("Prefill reads the prompt; decode has no prompt, only an empty cache")
    prefiller = workers.start("prefill", f"{__package__}.prefill", here, host=here.host)
    decoder = workers.start("decode", f"{__package__}.decode", there, host=there.host)
    handover: Handover = workers.answer(prefiller)

    decoder.send(handover)
    pull: Moved = workers.answer(decoder)
    console.title("Decode links to prefill, plans the pull, and executes it")
    console.lines(f"{pull.explanation}\n\n{moved_text(pull)}")

    console.title("Decode goes on from the cache that it pulled")
    pulled: Generated = workers.answer(decoder)
    console.lines(speed_text(pulled))

    console.title("The same model alone: monolithic")
    alone: Generated = workers.answer(
        workers.start("monolithic", f"{__package__}.monolithic", settings)
    )
    console.lines(speed_text(alone))
    console.lines("\n" + check_identical(pulled, alone, "pulled"))

    console.title("The other direction: decode empties its cache, prefill pushes into it")
    decoder.send(AwaitPush())
    target: PushTarget = workers.answer(decoder)
    prefiller.send(target)
    push: Moved = workers.answer(prefiller)
    console.lines(f"{push.explanation}\n\n{moved_text(push)}\n")
    decoder.send(Pushed())
    pushed: Generated = workers.answer(decoder)
    console.lines("\n" + check_identical(pushed, alone, "pushed"))

    console.title("Layer by layer: prefill computes again, and pushes each layer while it goes on")
    decoder.send(AwaitPush())
    target = workers.answer(decoder)
    prefiller.send(replace(target, by_layer=True))
    layers: MovedByLayer = workers.answer(prefiller)
    console.lines("\n" + hidden_text(layers, push) + "\n")
    decoder.send(Pushed())
    by_layer: Generated = workers.answer(decoder)
    console.lines("\n" + check_identical(by_layer, alone, "pushed layer by layer"))

    token = options.break_token
    if token is None:
        token = BREAK_TOKEN if options.prompt == PROMPT else len(handover.prompt) // 2
    if token >= len(handover.prompt):
        raise DemoError(f"--break-token {token} is not in [0, {len(handover.prompt) - 1}]")
    first = token - token % options.block_size
    console.title(
        f"One wrong block id: tokens {first}..{first + options.block_size - 1} from the block "
        "of those that follow"
    )
    decoder.send(WrongBlock(token))
    wrong: Moved = workers.answer(decoder)
    console.lines(wrong.difference + "\n")
    found: Located = workers.answer(decoder)
    tokens = first, first + options.block_size - 1
    console.lines(check_located(found, tokens=tokens) + "\n")
    broken: Generated = workers.answer(decoder)
    console.lines("\n" + check_changed(pulled, broken, "block"))

    console.title(
        f"Prefill as two processes, with a part of the KV heads each: HND, blocks of "
        f"{2 * options.block_size}"
    )
    ranks = [
        workers.start(
            f"prefill {rank}", f"{__package__}.shard", here, cluster_id, rank, host=here.host
        )
        for rank, cluster_id in enumerate(SHARD_CLUSTERS)
    ]
    offers: list[OfferedHeads] = [workers.answer(item) for item in ranks]
    console.title(
        f"Decode gathers the request from both, into its cache: NHD, blocks of "
        f"{options.block_size}, all heads"
    )
    decoder.send(Gather(offers))
    gather: Moved = workers.answer(decoder)
    console.lines(f"{gather.explanation}\n\n{moved_text(gather)}\n")
    gathered: Generated = workers.answer(decoder)
    console.lines("\n" + check_identical(gathered, alone, "gathered"))

    head = offers[-1].heads[0]
    console.title(f"One wrong head: head {head} is offered as head {head - 1}")
    decoder.send(PlantWrongHead())
    planted: WrongHead = workers.answer(decoder)
    console.lines(
        f"a gather refuses it:\n  {planted.refusal}\n\n"
        f"a pull from that process alone does not:\n{planted.difference}\n"
    )
    found = workers.answer(decoder)
    heads = head - 1, offers[-1].heads[1] - 2
    console.lines(check_located(found, heads=heads) + "\n")
    broken = workers.answer(decoder)
    console.lines("\n" + check_changed(gathered, broken, "head"))


def main() -> int:
    options = arguments()
    try:
        check_installed()
        prepare(options.device)
    except SetupError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 2
    console = Console()
    try:
        with (
            hosts(options.hosts) as places,
            Workers(console.progress, console.piece, options.timeout) as workers,
        ):
            demonstrate(options, console, workers, places)
    except SetupError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 2
    except (WorkerError, DemoError) as error:
        console.lines("")
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.lines("\nstopped")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
