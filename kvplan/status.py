"""Status codes of the LLM-DataDist interface, and the exception that carries them."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.planning.texts import Origin


class LLMStatusCode(IntEnum):
    """Outcome of an operation, with the names and values of LLM-DataDist.

    LLM_CANCELLED is kvplan's own.
    """

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_PARAM_INVALID = 0x5010B005
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1
    LLM_CANCELLED = -2

    @property
    def is_failure(self) -> bool:
        """True if an operation with this outcome has failed; a cancelled one has not."""
        return self not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_CANCELLED)

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"


class LLMException(RuntimeError):
    """An operation that was refused or failed.

    Args:
        *args: the message.
        status_code: the reason as a code. The default of LLM-DataDist is LLM_SUCCESS; here it is
            LLM_FAILED, because an exception is never a success.
        origin, unconfirmed: see below.

    Attributes:
        origin: the `Plan.origin` of the first descriptor known to have failed; None: unknown.
        unconfirmed: half-open spans of indices of descriptors whose bytes may not have arrived;
            empty if nothing was submitted.
    """

    def __init__(
        self,
        *args: object,
        status_code: LLMStatusCode = LLMStatusCode.LLM_FAILED,
        origin: Origin | None = None,
        unconfirmed: tuple[tuple[int, int], ...] = (),
    ) -> None:
        super().__init__(*args)
        self._status_code = status_code
        self.origin = origin
        self.unconfirmed = unconfirmed

    @property
    def status_code(self) -> LLMStatusCode:
        """The reason as a code."""
        return self._status_code

    def __str__(self) -> str:
        # Tests of programs also raise this with status codes of their own.
        name = getattr(self.status_code, "name", self.status_code)
        text, status = super().__str__(), f"({name})"
        # The message may be the text of another exception, which has the status.
        return text if text.endswith(status) else f"{text} {status}".lstrip()


def invalid(message: str) -> LLMException:
    """Return the refusal of an argument; the message says what is allowed."""
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def unsupported(message: str) -> LLMException:
    """Return the refusal of a feature that this machine, transport or peer lacks."""
    return LLMException(message, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def not_exist(message: str) -> LLMException:
    """Return the refusal of a cache, key, lease or registration that has ended or never existed."""
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


def link_failed(message: str) -> LLMException:
    """Return the error of a peer that cannot be reached; the message has the phase and reason."""
    return LLMException(message, status_code=LLMStatusCode.LLM_LINK_FAILED)


def timed_out(message: str) -> LLMException:
    """Return the error of a wait that took too long."""
    return LLMException(message, status_code=LLMStatusCode.LLM_TIMEOUT)


def busy(message: str) -> LLMException:
    """Return the refusal of a request because of a limit or another operation: try again later."""
    return LLMException(message, status_code=LLMStatusCode.LLM_LINK_BUSY)


def not_linked(message: str) -> LLMException:
    """Return the error of a peer with which this engine has no link, or no longer has one."""
    return LLMException(message, status_code=LLMStatusCode.LLM_NOT_YET_LINK)


def finalized() -> LLMException:
    """Return the error of a call after `finalize`."""
    return LLMException(
        "the engine is finalized; initialize it again",
        status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
    )


def without_frames(error: LLMException, status_code: LLMStatusCode | None = None) -> LLMException:
    """Return an error of equal type, arguments and fields, which keeps no frame alive.

    It has no cause, whose frames would stay, and a list of its own for notes.
    """
    # Not by the type's own __new__, which may take other arguments.
    equal = BaseException.__new__(type(error), *error.args)
    equal.__dict__.update(error.__dict__)
    if notes := getattr(error, "__notes__", None):
        equal.__notes__ = [*notes]
    if status_code is not None:
        equal._status_code = status_code
    return equal


def within(where: str, error: LLMException) -> LLMException:
    """Return an error of equal status, with the place or phase of the cause before its message."""
    return LLMException(f"{where}: {message_of(error)}", status_code=error.status_code)


def message_of(error: LLMException) -> str:
    """Return the message of an error, without its status; empty if the error has none."""
    return str(error.args[0]) if error.args else ""
