"""The ledger of the Rust crate tidegate-limiter. Nothing here runs Python code, waits or blocks."""

from contextvars import ContextVar
from typing import Any, Literal, TypedDict, final

class Snapshot(TypedDict):
    limit: int
    hard_limit: int
    queue_limit: int
    queued: int
    running: int
    attended: int
    abandoned: int
    lingering: int
    closed: bool
    over_limit: bool
    overloaded: bool
    leftovers_block: bool
    oldest_queued: float | None
    oldest_running: float | None
    oldest_abandoned: float | None
    offered: int
    rejected: int
    started: int
    finished: int
    finished_abandoned: int
    cancelled_before_start: int
    abandoned_total: int
    reattached_total: int
    unclaimed_total: int
    queued_seconds: float
    running_seconds: float
    abandoned_seconds: float
    rejected_by_reason: dict[str, int]
    left_by_reason: dict[str, int]
    ended_by_outcome: dict[str, tuple[int, int]]
    broken_identity: str | None

@final
class Refusal:
    reason: str
    message: str
    retry_after: float

@final
class Entry:
    @property
    def holds(self) -> bool: ...
    @property
    def begun(self) -> bool: ...
    @property
    def abandoned(self) -> bool: ...
    @property
    def severed(self) -> bool: ...
    def start(self) -> bool | Refusal: ...
    def begin(self) -> bool: ...
    def leave(self, keep: bool) -> tuple[Literal["left", "abandoned", "over"], list[int]]: ...
    def come_back(self) -> bool: ...
    def expire(self) -> tuple[Literal["left", "granted", "late"], list[int]]: ...
    def finish(self, outcome: int) -> list[int]: ...
    def lend(self, number: int) -> Entry | None: ...
    def sever(self, thread: int) -> Literal["severed", "shared", "elsewhere", "over"]: ...

@final
class Ledger:
    def __new__(
        cls,
        bounds: tuple[int, int, int],
        queue_timeout: float | None,
        target_delay: float | None,
        flow_limit: int | None,
    ) -> Ledger: ...
    def offer(
        self, number: int, terms: tuple[int, int, int], deadline: float | None, /
    ) -> tuple[Entry, bool] | Refusal: ...
    def resize(self, limit: int, hard_limit: int, queue: int) -> list[int]: ...
    def close(self) -> list[int]: ...
    def seal(self) -> None: ...
    def is_idle(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...

@final
class Crew:
    def __new__(cls) -> Crew: ...
    def add(self) -> bool: ...
    def done(self) -> None: ...
    def retire(self) -> bool: ...
    def failed(self) -> bool: ...
    @property
    def threads(self) -> int: ...

def install_audit(current: ContextVar[Any], severed: type[BaseException]) -> None: ...
