"""Layer events: a number written to a file descriptor makes layers ready."""

from __future__ import annotations

import json
import os
import warnings
from typing import Self

from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.telemetry import logger
from kvplan.execution import LayerTask
from kvplan.execution.completion import completion_thread
from kvplan.planning.texts import plural
from kvplan.status import LLMException, invalid
from kvplan.system.limits import check_process, system_error
from kvplan.validation import UINT32_MAX, check_type, check_width


class LayerEvent:
    """An event handle: writing n makes the next n layers ready.

    The layers are those of the first task, in order; each becomes ready in every task that has it.
    The writer may be C code without the GIL, such as a callback of a stream: `write(fileno, &n, 8)`
    with a uint64 n in host order. The completion thread of the process reads the descriptor.

    Close the event, or leave its `with` block, after the last write. Until then it owns the
    descriptor and holds the tasks. Thread-safe, but not usable in a forked child.

    Args:
        tasks: `LayerTask` handles that `layered` returned.

    Raises:
        TypeError: an argument is not a LayerTask.
        LLMException: LLM_PARAM_INVALID: no task, or a task with a layer that the first does not
            have; LLM_OUT_OF_MEMORY: out of descriptors or threads.
    """

    def __init__(self, *tasks: LayerTask) -> None:
        self._fd = -1
        if not tasks:
            raise invalid("tasks is empty; at least one is needed")
        for position, task in enumerate(tasks):
            check_type(f"tasks[{position}]", task, LayerTask)
            if extra := set(task.layers) - set(tasks[0].layers):
                raise invalid(
                    f"tasks[{position}] has layer {min(extra)}, which is not one of the layers "
                    f"{tasks[0].layers} of tasks[0]"
                )
        self._tasks = tasks
        self._layers = tasks[0].layers
        self._num_ready = self._num_signalled = 0
        self._pid = os.getpid()
        self._ready_mutex = Mutex()  # held while layers are made ready, which may be slow
        self._mutex = Mutex()  # guards the descriptor
        try:
            with signals_deferred:
                self._thread = completion_thread()
                self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread.add_reader(self)
        except OSError as error:
            self._release()
            raise system_error("could not create event", error) from error
        except LLMException:
            self._release()
            raise

    def fileno(self) -> int:
        """Return the descriptor to write to, an eventfd; -1: the event is closed."""
        return self._fd

    def signal(self, n: int = 1) -> None:
        """Make the next `n` layers ready; does not wait for a copy.

        Raises:
            TypeError, ValueError: n is not a positive uint32.
            LLMException: LLM_PARAM_INVALID: the event is closed; LLM_FAILED: in a forked child.
        """
        check_width("n", n, 1, UINT32_MAX)
        check_process(self._pid, "the event")
        with self._mutex:
            if self._fd < 0:
                raise invalid("the event is closed")
            os.eventfd_write(self._fd, n)

    def close(self) -> None:
        """Make the layers of all earlier writes ready, and close the descriptor. Idempotent."""
        if os.getpid() != self._pid:  # the locks of a forked child may never be released
            self._release()
            return
        with self._ready_mutex:
            self.on_readable()
            with self._mutex:
                self._release()

    def on_readable(self) -> None:
        """Make ready the layers that were signalled since the last call."""
        with self._ready_mutex:
            with signals_deferred:
                count = self._read()
                left = len(self._layers) - self._num_signalled
                self._num_signalled += min(count, left)
            if count > left:
                _warn(
                    f"{plural(count, 'layer')} signalled; only {left} of {self._layers} "
                    "were not ready yet"
                )
            for number in range(self._num_ready, self._num_signalled):
                layer = self._layers[number]
                for task in self._tasks:
                    if layer in task.layers:
                        _make_ready(task, layer)
                self._num_ready = number + 1  # only now: an interrupt must lose no layer

    def _read(self) -> int:
        with self._mutex:
            if self._fd < 0:
                return 0
            try:
                return os.eventfd_read(self._fd)
            except BlockingIOError:  # another thread was first
                return 0

    def _release(self) -> None:
        with signals_deferred:
            fd, self._fd = self._fd, -1
            self._tasks = ()
            if fd < 0:
                return
            # A forked child's descriptor refers to the same event, which the parent still reads.
            if os.getpid() == self._pid:
                self._thread.remove_reader(fd)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd >= 0 and os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._release()

    def __repr__(self) -> str:
        if self._fd < 0:
            return "<LayerEvent, closed>"
        return f"<LayerEvent {self._fd}: {self._num_ready} of {plural(len(self._layers), 'layer')}>"


def _make_ready(task: LayerTask, layer: int) -> None:
    try:
        task.ready(layer)
    except Exception as error:  # no caller to raise it to
        _warn(f"layer {layer}: {error}")


def _warn(error: str) -> None:
    logger.warning("operation=layer_event error=%s", json.dumps(error))
