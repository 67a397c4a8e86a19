"""How the address that an engine listens at is read."""

from __future__ import annotations

from kvplan.llm_datadist.configs import trans_str_ip
from kvplan.llm_datadist.v2 import llm_utils


class EngineConfig:
    """Options of an engine that have several parts."""

    @staticmethod
    def parse_listen_ip_info(listen_ip_info: str) -> tuple[int, int]:
        """Return the little-endian integer of the address, and the port, of "ip:port".

        Raises:
            TypeError: not a text.
            RuntimeError: not an IPv4 address.
            LLMException: LLM_PARAM_INVALID: another form, or a port that is not a number.
        """
        ip, port = llm_utils.parse_listen_ip_info(listen_ip_info)
        return trans_str_ip(ip), port
