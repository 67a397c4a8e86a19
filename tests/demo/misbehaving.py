"""A worker that behaves as a test requests."""

import os
import signal
import sys

from examples.disaggregated.workers import Channel


def run(channel: Channel, conduct: str) -> None:
    match conduct:
        case "answers":
            channel.progress("a line")
            channel.piece("a piece")
            channel.answer(channel.receive() + 1)
            channel.receive()
        case "raises":
            raise ValueError("the reason")
        case "is killed":
            channel.progress("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            sys.exit(7)
        case "just returns":
            return
        case "falls silent":
            channel.receive()
        case "does not stop":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            channel.answer("ready")
            while True:
                signal.pause()
