"""What UCX is set to in this process: the devices it may use, and the user's last word."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Final

from kvplan.status import invalid
from kvplan.transport.ucx.interfaces import usable_interfaces
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.transport.ucx.modes import Mode

_DEVICES: Final = "UCX_NET_DEVICES"
_MAX_SETTINGS: Final = 256
_MAX_LENGTH: Final = 4096


def check_devices(name: str, value: object) -> str:
    """`value`, if it may be a list of devices as UCX takes them: "eth0,mlx5_0:1", or empty.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    text = check_type(name, value, str)
    if text and not all(re.fullmatch(r"[\w.@:-]{1,64}", it) for it in text.split(",")):
        raise invalid(
            f"{name}={shown(text)} must be names of devices with commas between, such as "
            '"eth0,mlx5_0:1", or empty'
        )
    return text


def check_settings(name: str, value: object) -> str:
    """`value`, if it is what `read_settings` reads.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    text = check_type(name, value, str)
    read_settings(name, text)
    return text


def read_settings(name: str, text: str) -> dict[str, str]:
    """The settings of UCX that a JSON object names, each with its prefix: {"UCX_TLS": "tcp"}.

    Whether UCX knows them, it says when it is loaded.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if not text:
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name}={shown(text)} is no JSON: {error}") from None
    if not isinstance(document, dict) or len(document) > _MAX_SETTINGS:
        raise invalid(
            f"{name}={shown(text)} must be a JSON object of at most {_MAX_SETTINGS} settings"
        )
    for key, value in document.items():
        if not re.fullmatch("UCX_[A-Z0-9_]{1,64}", key):
            raise invalid(f'{name} has the key {shown(key)}; it must be like "UCX_TLS"')
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_LENGTH:
            raise invalid(
                f"{name} has {key}={shown(value)}; it must be text of at most {_MAX_LENGTH} "
                'printable characters, such as "16"'
            )
    return document


def settings_of(mode: Mode, devices: str, given: Mapping[str, str]) -> dict[str, str]:
    """What UCX is set to, without its prefix; the mode's own settings are the native layer's.

    Args:
        mode: how bytes move. Over TCP nothing goes by the loopback, unless there is nothing else:
            two network namespaces of one host look like one to UCX, and each has a loopback.
        devices: of the user; empty: those of UCX_NET_DEVICES, or all.
        given: of the user, with the prefix; what it says counts.
    """
    chosen: dict[str, str] = {}
    if devices:
        chosen[_DEVICES] = devices
    elif mode == "gathered" and _DEVICES not in os.environ and (found := usable_interfaces()):
        chosen[_DEVICES] = ",".join(found)
    chosen |= given
    return {key.removeprefix("UCX_"): value for key, value in chosen.items()}
