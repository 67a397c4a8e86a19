"""Options of an engine: a typed value, or the reference's mapping of strings."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from kvplan.engine.option_kinds import check_resource_file, described
from kvplan.engine.option_rows import OPTION_LISTEN_IP_INFO, ROWS, SPELLINGS, OptionRows, ignored
from kvplan.engine.option_sources import (
    configured,
    from_environment,
    naming_sources,
    read_file,
    values_of,
)
from kvplan.status import invalid
from kvplan.validation import check_mapping, check_type, shown

_T = TypeVar("_T")


def _completed(cls: type[_T]) -> type[_T]:
    """Let the constructor take missing arguments from the environment and the file it names."""
    from_arguments = vars(cls)["__init__"]

    @wraps(from_arguments)
    def init(self: _T, **given: Any) -> None:
        found = {name: setting for name, setting in configured().items() if name not in given}
        with naming_sources(found):
            from_arguments(self, **given, **values_of(found))

    type.__setattr__(cls, "__init__", init)
    return cls


@_completed
@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Options(OptionRows):
    """Options of an engine; every field has a default that works.

    A missing field has the value of the environment variable KVPLAN_<FIELD>, such as
    KVPLAN_TRANSPORT, otherwise that of the file named by KVPLAN_OPTIONS_FILE (see `from_file`).

    Raises:
        TypeError: a field of the wrong type.
        ValueError: an integer that does not fit the reference's C type.
        LLMException: LLM_PARAM_INVALID: a value that breaks a rule.
    """

    def __post_init__(self) -> None:
        for row in ROWS:
            row.check(getattr(self, row.field))
        if self.heartbeat_timeout_ms <= self.heartbeat_interval_ms:
            raise invalid(
                f"heartbeat_timeout_ms={self.heartbeat_timeout_ms} must be more than "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}"
            )
        if not self.local_comm_res:  # otherwise the file has no effect
            check_resource_file("global_resource_config", self.global_resource_config)

    def differences(self, other: Options) -> str:
        """Return the options that differ from `other` as text, each with both values."""
        pairs = [
            (field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        ]
        return ", ".join(
            f"{name}={shown(mine)}, not {shown(theirs)}"
            for name, mine, theirs in pairs
            if mine != theirs
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **given: Any) -> Options:
        """Return the options in table [kvplan] of a TOML file.

        Arguments take precedence over environment variables, and these over the file.

        Args:
            path: the file. Its keys are those of a mapping, with or without prefix, or field names.
            given: values of fields.

        Raises:
            TypeError, ValueError: see the class.
            LLMException: LLM_PARAM_INVALID: an invalid option; a file that cannot be read, is not
                TOML, or lacks the table [kvplan]; an unknown key. Names the file and the key.
        """
        before = given.keys() | from_environment().keys()
        found = {name: value for name, value in read_file(path).items() if name not in before}
        with naming_sources(found):
            return cls(**given, **values_of(found))

    @classmethod
    def of(cls, options: Mapping[str, str] | Options | None) -> Options:
        """Return `options` as this type; a mapping has the keys of the reference and text values.

        Keys may omit their prefix, `llm.` or `kvplan.`. Options of the reference without an effect
        here are checked and ignored. An unknown key causes a warning with the nearest key; one
        similar to `llm.ListenIpInfo` is refused.

        Raises:
            TypeError: the wrong type, or a key or value that is not text.
            ValueError, LLMException: see the class.
        """
        if options is None:
            return cls()
        if isinstance(options, Options):
            return options
        check_mapping("options", options)
        values: dict[str, Any] = {}
        texts: dict[str, tuple[str, str]] = {}  # field -> key, text
        for key, text in options.items():
            check_type("options key", key, str)
            check_type(f"options[{key!r}]", text, str)
            row = SPELLINGS.get(key)
            if row is None:
                if not ignored(key, key, text):
                    warnings.warn(unknown_key(key), stacklevel=2)
                continue
            before = texts.setdefault(row.field, (key, text))
            if before[1] != text:
                raise invalid(
                    f"{key}={shown(text)} and {before[0]}={shown(before[1])} are the same option"
                )
            values[row.field] = row.kind.read(key, text)
        return cls(**values)


def unknown_key(key: str) -> str:
    """Return the warning of an unknown key; refuse one that is like that of the address."""
    plain = re.sub("[^a-z0-9]", "", key.lower().removeprefix("llm.").removeprefix("kvplan."))
    if plain.startswith("listen") or get_close_matches(plain, ["listenipinfo"], cutoff=0.8):
        raise invalid(
            f"option {key!r} is unknown; the address to listen at is option "
            f"{OPTION_LISTEN_IP_INFO!r}"
        )
    near = get_close_matches(key, SPELLINGS, n=1, cutoff=0.0)[0]
    return f"option {key!r} is unknown and ignored; the nearest is {near!r}"
