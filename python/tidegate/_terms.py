"""What a caller says of a call beside the call itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tidegate._call import Call

Sever = Literal["sockets", "off"]
"""What ends the work of a call whose waiter has left: its sockets are shut down and its retries refused, or nothing."""

Priority = Literal["high", "normal", "low"]

CLASSES: dict[Priority, int] = {"high": 1, "normal": 0, "low": -1}


@dataclass(frozen=True, slots=True)
class Terms:
    timeout: float | None = None
    label: str | None = None
    flow: Hashable = None
    priority: Priority = "normal"
    weight: int = 1
    sever: Sever | Callable[[Call[Any]], None] = "sockets"
    numbers: tuple[int, int, int] = (1, 0, 0)
    """Weight, flow and class as the ledger has them. Of no use to a caller."""

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if self.label is not None and not isinstance(self.label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"label must be text, not {self.label!r}")
        check_count("weight", self.weight, 1)
        if self.priority not in CLASSES:
            raise ValueError(f"priority must be 'high', 'normal' or 'low', not {self.priority!r}")
        if self.sever not in ("sockets", "off") and not callable(self.sever):
            raise ValueError(f"sever must be 'sockets', 'off' or a function of a call, not {self.sever!r}")
        flow = 0 if self.flow is None else hash(self.flow) & 0xFFFF_FFFF_FFFF_FFFF
        object.__setattr__(self, "numbers", (self.weight, flow, CLASSES[self.priority]))


def check_count(name: str, value: object, least: int) -> int:
    """A number of calls."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of calls, not {value!r}")
    if value < least:
        reason = ": a limit of 0 would never start anything" if name == "limit" else ""
        raise ValueError(f"{name} must be at least {least}, not {value}{reason}")
    if value > 1 << 24:
        raise ValueError(f"{name} must be at most {1 << 24}, not {value}")
    return value


def check_seconds(name: str, value: object) -> float:
    """A time in seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 <= value < 1e9:
        raise ValueError(f"{name} must be between 0 and 1e9 seconds, not {value}")
    return float(value)


def label_of(fn: object) -> str:
    """The name of a function, for reports."""
    while isinstance(fn, partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__qualname__
