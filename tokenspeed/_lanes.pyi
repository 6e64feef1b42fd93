"""The plain tokens of a step to the sockets of their streams (tokenspeed/runtime/csrc/lanes.cpp)."""

from collections.abc import Callable, Sequence

from tokenspeed.runtime.messages import TokenDelta

class Lanes:
    """The open lanes, by request. Used by one thread."""

    def __init__(self, texts: Sequence[bytes | None]) -> None:
        """`texts`: each token's text as a JSON string without its quotes; None for one that is not plain."""

    def open(
        self,
        request: int,
        *,
        fd: int,
        head: bytes,
        middle: bytes,
        end: bytes,
        number: int | None,
        last: float,
        marks: bytes | None = None,
    ) -> None:
        """Events are head "text" middle [number] end; `last`: when the last token came, seconds; `marks`: bytes that no plain
        token has, nor does it then end in white space (None: no such rule). ValueError for a second lane."""

    def close(self, request: int) -> tuple[list[int], int, float]:
        """(tokens that were written, events that they were, when the last one came). ValueError without a lane."""

    def step(
        self, deltas: list[TokenDelta], now: float
    ) -> tuple[list[TokenDelta], dict[float, int], list[tuple[int, bytes]]]:
        """Write what can be written. (deltas that are the caller's, seconds between two tokens -> how often it was so,
        (request, bytes that its socket did not take) in order)."""

    def step_plain(
        self, pairs: bytes, now: float, make: Callable[[int, list[int]], TokenDelta]
    ) -> tuple[list[TokenDelta], dict[float, int], list[tuple[int, bytes]]]:
        """`step` of deltas of one token and no more: pairs of int64, request and token."""
