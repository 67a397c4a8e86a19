"""What a user may set UCX to: the devices that it may use, and anything else by its own names."""

from __future__ import annotations

import json
import re
from typing import Final

from kvplan.status import invalid
from kvplan.validation import check_type, shown

DEVICES: Final = "UCX_NET_DEVICES"
TRANSPORTS: Final = "UCX_TLS"
_MAX_SETTINGS: Final = 256
_MAX_LENGTH: Final = 4096


def check_devices(name: str, value: object) -> str:
    """`value`, if it may be a list of devices as UCX takes them: "mlx5_0:1,mlx5_1:1", or empty.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    text = check_type(name, value, str)
    if text and not all(re.fullmatch(r"[\w.@:-]{1,64}", it) for it in text.split(",")):
        raise invalid(
            f"{name}={shown(text)} must be names of devices with commas between, such as "
            '"mlx5_0:1,mlx5_1:1", or empty'
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
    """The settings of UCX that a JSON object names, each with its prefix: {"UCX_TLS": "rc"}.

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
