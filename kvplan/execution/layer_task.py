"""The handle of a transfer that moves each layer once the program says that it is ready."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod, ref

from kvnative._backend import KVN_OK, NativeError
from kvnative._layered import LAYER_DONE, LAYER_FAILED, LAYER_MOVING, LAYER_WAITING
from kvplan.execution.completion import tracker
from kvplan.execution.compute_events import GateOf, no_accelerator
from kvplan.execution.gather_task import GatherTask
from kvplan.execution.memory import HostMemory
from kvplan.execution.task import TransferTask
from kvplan.planning.contents import model_note
from kvplan.planning.texts import span
from kvplan.status import LLMException, LLMStatusCode, invalid, unsupported
from kvplan.validation import as_int, shown

if TYPE_CHECKING:
    from kvnative._layered import LayeredTask
    from kvnative._task import Gate
    from kvplan.execution.compute_events import ComputeEvent, ComputeStream
    from kvplan.execution.memory import TensorMemory
    from kvplan.planning.plan import Plan


class LayerProgress(NamedTuple):
    """The source layers of a plan by progress: each layer is in one tuple, ascending.

    Attributes:
        waiting: not ready yet.
        moving: submitted, but not complete.
        done: moved. Only the outcome of the task confirms them; see `wait`.
        failed: submitted, but not completely confirmed.
    """

    waiting: tuple[int, ...]
    moving: tuple[int, ...]
    done: tuple[int, ...]
    failed: tuple[int, ...]


class LayerTask(TransferTask):
    """The handle of a plan whose layers move one by one, each when `ready` is called for it.

    It cannot succeed before every layer is ready. So dropping the last handle earlier cancels the
    transfer, with a ResourceWarning. Bytes of layers that were never ready are not confirmed; the
    error of a timeout or of `cancel` names these layers.

    Args:
        gate_of: returns the gate of a layer's event; None: the engine has no accelerator.
        on_outcome: as for `TransferTask`.
        on_last: called once with this task, by the thread that makes the last layer ready or finds
            that the task has ended early; never after the handle was dropped.
    """

    def __init__(
        self,
        plan: Plan,
        task: LayeredTask,
        memories: tuple[TensorMemory, TensorMemory],
        on_outcome: Callable[[LLMException | None], None] | None = None,
        on_last: Callable[[LayerTask], None] | None = None,
        gate_of: GateOf | None = None,
    ) -> None:
        super().__init__(plan, task, memories, on_outcome)
        self._part = plan.part
        self._layers = self._part.src_layers
        _ = plan.nbytes  # computed now, to keep the last layer from waiting for the sum
        self._on_last: list[Callable[[LayerTask], object]] = [] if on_last is None else [on_last]
        self._gate_of = gate_of
        self._layered = task  # last: `__del__` cancels it

    @property
    def layers(self) -> range:
        """The source layers of the plan, all of which must become ready."""
        return self._layers

    def ready(self, layer: int, event: ComputeEvent | None = None) -> None:
        """Submit source layer `layer`, which holds its final values.

        Small layers have moved when this returns. Idempotent; in any order, from any thread. After
        the task has ended, this has no effect, and `wait` raises the reason. If registered memory
        was replaced, the task ends here and moves nothing more.

        Args:
            layer: the number of the layer in the source.
            event: an event or a stream of the model's compute, see `ComputeEvent`. The layer holds
                its final values when that work is done, and none of its bytes moves before. On
                return the event can be recorded again, or destroyed. None: the layer is final now.

        Raises:
            TypeError: not an integer (NumPy's are accepted), or not an event.
            LLMException: LLM_PARAM_INVALID: not a source layer of the plan, or an event that was
                never recorded; LLM_FEATURE_NOT_ENABLED: an event, but the engine has no
                accelerator; an error of the accelerator. The layer is not ready then.
        """
        layers = self._layers
        if type(layer) is not int:
            layer = as_int("layer", layer)
        if layer not in layers:
            raise invalid(
                f"layer={layer} is not one of the plan's source layers; they are "
                f"[{layers.start}, {layers.stop}){model_note(self._part)}"
            )
        index = layer - layers.start
        gate = None if event is None else self._gate(event)
        if self.plan.nbytes:  # otherwise the task has ended
            memories = self._memories  # None after the outcome, which may come at any moment
            if memories is not None and not self._layered.sealed:
                try:
                    pieces = self._part.tensors_by_layer[index]
                    for memory, tensors in zip(memories, pieces, strict=True):
                        if type(memory) is not HostMemory or not memory.held:
                            memory.check(tensors)  # other memory may be mapped there now
                except LLMException as error:
                    error.__traceback__ = None  # its frames hold the memories
                    self._lost = error  # first: the thread that finds the end raises it
                    self.cancel()
            self._layered.open(index, gate)
        if self._on_last and self._layered.sealed:
            self._notify_last()

    def _gate(self, event: ComputeEvent) -> Gate:
        if self._gate_of is None:
            raise no_accelerator("event", event)
        return self._gate_of("event", event)

    def block_stream(self, stream: ComputeStream) -> None:
        """Refuse every stream: none can wait for layers that are not ready yet.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED, always.
        """
        raise unsupported(
            f"{self.plan.operation} {self.plan.kind}: stream={shown(stream)} cannot wait for "
            "layers that move when they are ready; wait for them on the host"
        )

    def progress(self) -> LayerProgress:
        """Return the layers by progress."""
        found = self._layered.states() if self.plan.nbytes else [LAYER_DONE] * len(self._layers)
        states = list(zip(self._layers, found, strict=True))
        kinds = (LAYER_WAITING, LAYER_MOVING, LAYER_DONE, LAYER_FAILED)
        return LayerProgress(
            *(tuple(layer for layer, state in states if state == kind) for kind in kinds)
        )

    @property
    def done(self) -> bool:
        """True if the transfer has an outcome, good or bad; never blocks."""
        is_done = self._layered.done
        if is_done and self._on_last:
            self._notify_last()
        return is_done

    def cancel(self, reason: LLMException | None = None) -> None:
        """See `TransferTask.cancel`; no further layer is submitted."""
        super().cancel(reason)
        self._notify_last()

    def explain(self) -> str:
        """Return the progress of each layer as text: its state, or its confirmed descriptors."""
        if self.done:
            return super().explain()
        lines = [
            f"{name:<8} {_numbers(layers)}"
            for name, layers in self.progress()._asdict().items()
            if layers
        ]
        return "\n".join([f"{self.plan!r} in flight", *lines])

    def _track(self) -> None:
        tracker().watch(self)

    def _conclude(self) -> None:
        if self._on_last:
            self._notify_last()
        super()._conclude()

    def _when_last(self, call: Callable[[LayerTask], object]) -> None:
        """Call `call` with this task once no further layer can become ready."""
        self._on_last.append(call)
        if self._layered.sealed:
            self._notify_last()

    def _notify_last(self) -> None:
        if os.getpid() != self._pid:  # a forked child: the task is its parent's
            return
        while self._on_last:
            try:
                call = self._on_last.pop()
            except IndexError:  # another thread was first
                return
            call(self)

    def _missing(self) -> str:
        waiting = self.progress().waiting
        return f"; {_were(waiting)} never ready" if waiting else ""

    def __del__(self) -> None:
        try:
            if self._layered.sealed:
                return
            self._on_last.clear()  # first: the completion thread finds the end at once
            self._layered.cancel()
        except (AttributeError, NativeError):  # never begun, or the parent's in a forked child
            return
        missing = self._missing()
        with suppress(LLMException):
            self._conclude()
        warnings.warn(
            f"a {type(self).__name__} was dropped and so cancelled{missing}: {self.plan!r}",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )


class LayerGatherTask(GatherTask):
    """The handle of a transfer of several caches or peers that moves layer by layer.

    Each pair of caches has a `LayerTask` in `tasks`. Layers have the numbers of this process's
    cache: the source or, for a pull, the destination.
    """

    tasks: dict[int, LayerTask]  # type: ignore[assignment]

    def __init__(
        self, operation: str, on_outcome: Callable[[BaseException | None], None] | None = None
    ) -> None:
        super().__init__(operation, on_outcome)
        self._to_track: list[Callable[[GatherTask], None]] = []  # while layers are not ready

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that must become ready, in ascending order."""
        return tuple(sorted({layer for task in self.tasks.values() for layer in _own_layers(task)}))

    def ready(self, layer: int, event: ComputeEvent | None = None) -> None:
        """Submit a layer that holds its final values; see `LayerTask.ready`.

        Raises:
            TypeError, LLMException: see `LayerTask.ready`.
        """
        if type(layer) is not int:
            layer = as_int("layer", layer)
        tasks = [task for task in self.tasks.values() if layer in _own_layers(task)]
        if not tasks:
            raise invalid(f"layer={shown(layer)} is not one of the layers {self.layers}")
        for task in tasks:
            task.ready(task.layers[_own_layers(task).index(layer)], event)

    @property
    def settled(self) -> bool:
        """See `GatherTask.settled`. After this, too, dropping the handle cancels its tasks."""
        return super().settled if self._is_decided() else self._is_settled

    def settle_by(self, track: Callable[[GatherTask], None]) -> None:
        """See `GatherTask.settle_by`. Until the last layer, `track` does not keep the handle."""
        self._to_track.append(track)
        call = partial(_call_living, WeakMethod(self._track))
        for task in list(self.tasks.values()):
            task._when_last(call)
            with suppress(LLMException):  # no thread is left: `wait` finds a failure
                task.when_settled(call)
        self._track()

    def drop(self) -> None:
        """See `GatherTask.drop`: no caller has this task, so no queue takes it."""
        self._to_track.clear()
        super().drop()

    def _is_decided(self) -> bool:
        """Return True once every layer is ready, or one task has failed."""
        natives = [task._layered for task in self.tasks.values()]
        return all(native.sealed for native in natives) or any(
            native.done and native.report.status != KVN_OK for native in natives
        )

    def _track(self) -> None:
        if self._is_decided():
            try:
                track = self._to_track.pop()
            except IndexError:  # another thread was first
                return
            track(self)

    def __del__(self) -> None:
        if not self._to_track or any(task._pid != os.getpid() for task in self.tasks.values()):
            return
        self._to_track.clear()  # first: a weak reference still finds this task
        held = [ref(task) for task in self.tasks.values()]
        self.tasks = {}  # each one is cancelled, with a warning
        for task in [living for each in held if (living := each()) is not None]:
            task.cancel()  # the program has it
        if self._on_outcome is not None:
            why = f"{self._operation}: the handle was dropped before every layer was ready"
            self._on_outcome(LLMException(why, status_code=LLMStatusCode.LLM_CANCELLED))


def _call_living(method: WeakMethod[Callable[[], object]], _: object = None) -> None:
    """Call a method unless its object is gone."""
    if (living := method()) is not None:
        living()


def _own_layers(task: LayerTask) -> range:
    """Return the layers of a task in the numbers of this process's cache."""
    part = task.plan.part
    return part.dst_layers if part.local == "dst" else part.src_layers


def _were(layers: Sequence[int]) -> str:
    """Return "layer 3 was", or "layers 0-3, 7 were"."""
    one = len(layers) == 1
    return f"layer{'' if one else 's'} {_numbers(layers)} {'was' if one else 'were'}"


def _numbers(layers: Sequence[int]) -> str:
    """Return ascending numbers, at least one, as runs: "0-3, 7"."""
    gaps = [(a, b) for a, b in pairwise(layers) if b != a + 1]
    firsts = [layers[0], *(b for _, b in gaps)]
    lasts = [*(a for a, _ in gaps), layers[-1]]
    return ", ".join(map(span, zip(firsts, lasts, strict=True)))
