"""A KeyboardInterrupt at a chosen place of a call, among those where Python checks for signals.

Built in place, only for tests. Python would handle the signal inside of a trace function that is
written in Python. Under this one, Python raises where it does without a trace function.
"""

import dis
import sys

__all__ = ["Interrupts"]

from libc.signal cimport SIGINT, raise_

cdef extern from *:
    int PyErr_CheckSignals() except -1

CHECKING = frozenset(
    number for name, number in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD"))
)


cdef class Interrupts:
    """Interrupts the first call at its first place, the next call at its second, and so on.

    Places are calls, loops and starts of functions in files whose path contains `inside`.

    Args:
        inside: part of a path.
        step: number of places from one call to the next.
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
        """The number of the last call's place."""
        return self.at

    def call(self, function):
        """Call `function`, interrupted at the next place; return False after the last place.

        An exception other than KeyboardInterrupt is raised to the caller.
        """
        self.at += self.step
        self.seen = 0
        try:
            sys.settrace(self)
            try:
                function()
            finally:
                sys.settrace(None)
            PyErr_CheckSignals()  # otherwise raised in the caller, if no check followed the place
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
