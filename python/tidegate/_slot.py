"""A slot for a block of code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate._call import Held
from tidegate._waits import settled

if TYPE_CHECKING:
    from types import TracebackType

    from tidegate._limiter import Limiter
    from tidegate._terms import Terms


class SlotContext:
    """`with limiter.slot():` or `async with`. May be entered again once it has been left."""

    def __init__(self, limiter: Limiter, terms: Terms, label: str) -> None:
        self._limiter = limiter
        self._terms = terms
        self._label = label
        self._held: Held | None = None

    def __enter__(self) -> Held:
        held = self._offer()
        timeout = self._terms.timeout
        try:
            if not held.ready.done():
                try:
                    held.ready.exception(timeout)
                except BaseException:
                    if timeout is None or held.ready.done():
                        raise
                    raise held.timed_out(timeout) from None
            held.enter()
        except BaseException:
            self._drop(held)
            raise
        return held

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close(error)

    async def __aenter__(self) -> Held:
        held = self._offer()
        timeout = self._terms.timeout
        try:
            if not await settled(held.ready, timeout):
                raise held.timed_out(timeout or 0.0)
            held.enter()
        except BaseException:
            self._drop(held)
            raise
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close(error)

    def __del__(self) -> None:
        # Entered, and nobody can leave it any more: in a generator whose event loop was closed before it, for example.
        if getattr(self, "_held", None) is not None:
            self._close(None)

    def _offer(self) -> Held:
        if self._held is not None:
            raise RuntimeError("this slot is held already: ask for another with slot()")
        held = self._held = Held(self._limiter, self._terms, self._label)
        try:
            self._limiter.admit(held)
        except BaseException:
            self._drop(held)
            raise
        return held

    def _drop(self, held: Held) -> None:
        held.leave()
        held.exit(None)
        self._held = None

    def _close(self, error: BaseException | None) -> None:
        if (held := self._held) is not None:
            held.exit(error)
            self._held = None  # last: what interrupts this is made up for by `__del__`
