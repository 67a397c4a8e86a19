from typing import Final, Never, final

__all__ = ["Report"]

@final
class Report:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    status: Final[int]
    code: Final[int]
    failed: Final[int | None]
    bytes_done: Final[int]
    descriptors_done: Final[int]
    unconfirmed: Final[tuple[tuple[int, int], ...]]
    message: Final[str]
