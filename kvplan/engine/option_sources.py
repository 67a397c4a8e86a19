"""Environment variables and files as sources of options that the program does not give."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from kvplan.engine.option_kinds import FLAG, Row
from kvplan.engine.option_rows import ROWS, SPELLINGS, ignored
from kvplan.status import LLMException, invalid
from kvplan.validation import open_regular, shown

OPTIONS_FILE: Final = "KVPLAN_OPTIONS_FILE"
"""The environment variable that names a file of options."""

VARIABLES: Final = {row.variable: row for row in ROWS}
"""The option of each environment variable."""

TABLE: Final = "kvplan"
"""The table with the options in a file; other tables are ignored."""

_KEYS: Final = SPELLINGS | {row.field: row for row in ROWS}
_MAX_FILE_NBYTES: Final = 1 << 20


class Setting(NamedTuple):
    """The value of an option from a source other than the program.

    Attributes:
        value: value of the field.
        source: the variable, or the file and the key, as errors name it.
    """

    value: Any
    source: str


def configured() -> dict[str, Setting]:
    """Return the options of the environment and of the file that it names, by field.

    Variables take precedence over the file. An empty variable counts as not set.
    """
    path = os.environ.get(OPTIONS_FILE)
    return (read_file(path) if path else {}) | from_environment()


def from_environment() -> dict[str, Setting]:
    """Return the options of environment variables, by field."""
    return {
        row.field: Setting(_read(row, variable, text), f"environment variable {variable}")
        for variable, row in VARIABLES.items()
        if (text := os.environ.get(variable))
    }


def read_file(path: str | os.PathLike[str]) -> dict[str, Setting]:
    """Return the options of a TOML file, by field."""
    name = os.fspath(path)
    found: dict[str, Setting] = {}
    for key, value in _flat(_table_of(name)):
        source = f"{name}: {key}"
        row = _KEYS.get(key)
        if row is None:
            if not ignored(key, source, _text(source, value)):
                near = get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
                raise invalid(f"{source} is not an option; the nearest is {near!r}")
        elif row.field in found:
            raise invalid(f"{source} and {found[row.field].source} are the same option")
        elif isinstance(value, bool) is not (row.kind is FLAG) and not isinstance(value, str):
            kind = "true or false" if row.kind is FLAG else "text, a whole number or a table"
            raise invalid(f"{source}={shown(value)} must be {kind}")
        else:
            found[row.field] = Setting(_read(row, source, _text(source, value)), source)
    return found


def values_of(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of settings, by field."""
    return {name: setting.value for name, setting in settings.items()}


@contextmanager
def naming_sources(settings: Mapping[str, Setting]) -> Iterator[None]:
    """Add the sources of options to errors that name the options."""
    try:
        yield
    except (LLMException, TypeError, ValueError) as error:
        text = str(error.args[0]) if error.args else ""
        sources = [
            f"{name} is from {setting.source}"
            for name, setting in settings.items()
            if re.search(rf"\b{name}( \(|=)", text)
        ]
        if not sources:
            raise
        text = "; ".join([text, *sources])
        if isinstance(error, LLMException):
            raise LLMException(text, status_code=error.status_code) from None
        raise type(error)(text) from None


def _table_of(name: str) -> Mapping[str, Any]:
    try:
        with os.fdopen(open_regular(name), "rb") as file:
            blob = file.read(_MAX_FILE_NBYTES + 1)
        if len(blob) > _MAX_FILE_NBYTES:
            raise invalid(f"{name} has more than {_MAX_FILE_NBYTES} bytes")
        table = tomllib.loads(blob.decode()).get(TABLE)
    except OSError as error:
        raise invalid(f"{name}: the file of options cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not TOML: {error}") from None
    if not isinstance(table, dict):
        raise invalid(f"{name} has no table [{TABLE}] with the options")
    return table


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values; TOML reads an unquoted `llm.DeviceId` as a table in a table."""
    for name, value in table.items():
        key = before + name
        if isinstance(value, dict) and key not in _KEYS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _text(source: str, value: object) -> str:
    """Return a value of a file in the text form of a mapping of options."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, dict):
        import json  # here, because only pools and settings of UCX need it

        return json.dumps(value, default=str)
    raise invalid(f"{source}={shown(value)} must be text, a whole number, true, false or a table")


def _read(row: Row, source: str, text: str) -> Any:
    try:
        return row.kind.read(source, text)
    except LLMException as error:
        if source in error.args[0]:
            raise
        raise invalid(f"{source}={shown(text)}: {error.args[0]}") from None
