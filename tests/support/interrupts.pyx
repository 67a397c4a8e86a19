"""A KeyboardInterrupt at a chosen place of a call, of those where Python itself looks for signals.

Built in place, for the tests alone. A trace function in Python would have the signal handled inside
of itself; under this one SIGINT arrives, and Python raises where it always does.
"""

import dis
import sys

__all__ = ["Interrupts"]

from libc.signal cimport SIGINT, raise_

CHECKING = frozenset(
    number for name, number in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD"))
)


cdef class Interrupts:
    """Interrupts a call at its first place, the next call at its second, and so on.

    Places are the calls, beginnings and loops in files whose path has `inside`.

    Args:
        inside: part of a path.
        step: how many places from one call to the next.
    """

    cdef str inside
    cdef Py_ssize_t step, at, seen
    cdef dict codes

    def __init__(self, str inside, Py_ssize_t step=1):
        self.inside = inside
        self.step = step
        self.at = 0
        self.codes = {}

    @property
    def place(self):
        """The number of the place of the last call."""
        return self.at

    def call(self, function):
        """Call it, interrupted at the next place; returns False where it has no such place.

        What is raised after the interrupt goes to the caller, if it is no KeyboardInterrupt.
        """
        self.at += self.step
        self.seen = 0
        try:
            sys.settrace(self)
            try:
                function()
            finally:
                sys.settrace(None)
        except KeyboardInterrupt:
            pass
        return self.seen >= self.at

    def __call__(self, frame, str event, argument):
        if self.seen >= self.at:
            return None
        code = frame.f_code
        if event == "call":
            if self.inside not in code.co_filename:
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self._reach()
        elif event == "opcode":
            if (text := self.codes.get(code)) is None:
                text = self.codes[code] = code.co_code
            if text[frame.f_lasti] in CHECKING:
                self._reach()
        return self

    cdef _reach(self):
        self.seen += 1
        if self.seen == self.at:
            raise_(SIGINT)
