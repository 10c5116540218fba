"""Ends work that nobody waits for: the sockets under it are shut down, and what it begins anew is refused.

A blocked thread cannot be stopped, but the socket that it is blocked on can be: the read ends at once, with the
client library's own error. What the library tries next, sleeping before a retry, connecting, sending, raises
`Severed`, which is no `Exception`. Where a thread is on no socket it is looked at again and again until the call is
over, as it may come to one."""

from __future__ import annotations

import heapq
import logging
import sys
import sysconfig
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from tidegate import _gateway
from tidegate._errors import Severed

if TYPE_CHECKING:
    from tidegate._call import Call

FIRST, LAST = 0.001, 0.25
"""How long until a call is looked at again, in seconds: at first, and at most."""

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

log = logging.getLogger("tidegate")
_sleep = time.sleep
installed = False
_lock = threading.RLock()


class _Sleep:
    """Takes the place of `time.sleep`, for the sake of retries: in the work of a call the sleep ends when the waiter
    leaves. An object and no function, so that it does not become a method where it is a class's attribute."""

    __name__ = __qualname__ = "sleep"
    __doc__ = _sleep.__doc__

    def __call__(self, seconds: float, /) -> None:
        from tidegate._call import current

        call = current.get()
        if call is not None and call.sever == "sockets" and not call.done() and _is_positive(seconds):
            call.sleep(seconds)
        else:
            _sleep(seconds)

    def __repr__(self) -> str:
        return "<built-in function sleep, ended by tidegate when nobody waits>"


def _is_positive(seconds: object) -> bool:
    return isinstance(seconds, (int, float)) and seconds > 0


def install() -> None:
    """Once, when the first call asks for it."""
    global installed
    if installed:
        return
    with _lock:
        if installed:
            return
        from tidegate._call import current
        from tidegate._core import install_audit

        install_audit(current, Severed)
        if time.sleep is _sleep:
            time.sleep = _Sleep()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        installed = True


class _Severer:
    """Looks again at the calls whose thread was on no socket when their waiter left."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, float, Call[Any]]] = []
        self._changed = threading.Condition()
        self._running = False

    def add(self, call: Call[Any], gap: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + gap, call.number, gap, call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="tidegate-severer", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, gap, call = heapq.heappop(self._due)
            try:
                if not call.done() and attempt(call) != "over":
                    self.add(call, min(gap * 2, LAST))
            except Exception:
                log.exception("could not sever %r", call)
            del call


_severer = _Severer()


def forked() -> None:
    """In the child of a fork, where neither the thread nor its calls are."""
    global _severer, _lock
    _severer, _lock = _Severer(), threading.RLock()


def begin(call: Call[Any]) -> None:
    """The waiter has left for good."""
    if call.sever != "off":
        _gateway.left(call)
    if callable(sever := call.sever):
        try:
            sever(call)
        except Exception:
            log.exception("the function that severs %r failed", call)
    elif sever == "sockets" and not FREE_THREADED and attempt(call) != "over":
        _severer.add(call, FIRST)


def attempt(call: Call[Any]) -> Literal["severed", "shared", "elsewhere", "over"]:
    """Severs what the call's thread is on at this instant."""
    entry, thread = call.entry, call.thread
    if entry is None or thread is None or thread == threading.get_ident():
        return "elsewhere" if entry is not None and entry.holds else "over"
    found = entry.sever(thread)
    if found == "severed":
        call.limiter.severed()
    elif found == "elsewhere" and "grpc" in sys.modules:
        _cancel_grpc(call, thread)
    return found


def _cancel_grpc(call: Call[Any], thread: int) -> None:
    """A call of grpc is blocked outside Python, and is found in the frame that waits for it."""
    grpc: Any = sys.modules["grpc"]
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    for _ in range(8):
        if frame is None:
            return
        if frame.f_code.co_filename.replace("\\", "/").endswith("grpc/_channel.py"):
            for name in ("call", "self"):
                found: Any = frame.f_locals.get(name)
                if isinstance(found, grpc.Call):
                    found.cancel()
                elif type(found).__name__ in ("SegregatedCall", "IntegratedCall"):
                    found.cancel(grpc.StatusCode.CANCELLED.value[0], "nobody waits for it")
                else:
                    continue
                call.limiter.severed()
                return
        frame = frame.f_back
