"""How a command ends: one line for an error, 130 for an interrupt, silence where nobody reads what it prints."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

FAILED = 2
INTERRUPTED = 128 + 2
"""After Ctrl-C (SIGINT), as shells count it."""
UNREAD = 128 + 13
"""The reader of the output has gone (SIGPIPE), as shells count it."""
TERMINATED = 128 + 15
"""After SIGTERM, as shells count it."""


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, as KeyboardInterrupt is not, so that nobody handles it by accident."""


def finish(name: str, work: Callable[[], int], errors: type[Exception] = Exception) -> int:
    """Carry out ``work`` and return the status to exit with: its own, or what the way it ended amounts to.

    ========================================  ======  ==========================================
    how it ended                              status  what is said on stderr
    ========================================  ======  ==========================================
    an exception that is one of ``errors``    2       one line: its type and message
    KeyboardInterrupt                         130     ``name: interrupted``
    SIGTERM                                   143     ``name: terminated``
    nobody reads stdout or stderr any more    141     nothing
    ========================================  ======  ==========================================

    Other exceptions pass. Output is flushed before, so that no error of a flush is left for the interpreter's end.
    Signal handlers are those of before in the end; off the main thread none is touched.
    """
    with _signals() as came:
        try:
            try:
                return work()
            finally:
                if sys.stdout is not None and not sys.stdout.closed:
                    sys.stdout.flush()
        except (KeyboardInterrupt, Terminated, Exception) as error:
            # Libraries turn an interrupt into errors of their own while they are imported.
            if isinstance(error, Terminated) or signal.SIGTERM in came:
                return _end(f"{name}: terminated", TERMINATED)
            if isinstance(error, KeyboardInterrupt) or came:
                # An interrupt that passed through exec("...") (dataclasses are made that way) is remembered by Python,
                # which would end itself by a signal instead of with our status. Any later exec makes it forget.
                exec("")
                return _end(f"{name}: interrupted", INTERRUPTED)
            if isinstance(error, BrokenPipeError) and _unread():
                return _end(None, UNREAD)
            if not isinstance(error, errors):
                raise
            return _end(f"{name}: {one_line(error)}", FAILED)


def one_line(error: BaseException) -> str:
    """The type and the message of an error, however many lines that had."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _end(line: str | None, status: int) -> int:
    """One line on stderr, if it can be written, and the status."""
    _drop(sys.stdout)
    with suppress(OSError, ValueError):
        if line:
            print(line, file=sys.stderr, flush=True)
    _drop(sys.stderr)
    return status


def _drop(stream: Any) -> None:
    """Let a stream that can no longer be written lead nowhere, or Python's end would report what it still holds."""
    with suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            stream.flush()


def _unread() -> bool:
    """Whether the reader of stdout or stderr has gone; True also where that cannot be found out.

    Other pipes break too: one to a compiler, or a connection to a hub.
    """
    try:
        poll = select.poll()
        for stream in (sys.stdout, sys.stderr):
            poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return True


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that came, in a list; SIGTERM raises Terminated, and a second signal ends the process at once."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def handle(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(128 + number)  # the first one is being obeyed, which takes too long for whoever waits
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def lost(unraisable: Any) -> None:
        # Raised within a destructor or a callback, where Python drops it: it has to be raised again, outside.
        if isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated) and len(came) == 1:
            main = threading.main_thread().ident
            threading.Timer(0.01, signal.pthread_kill, (main, came.pop())).start()
        else:
            hook(unraisable)

    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    # Handlers of the host program's own stay, and so does "ignored": a command in the background.
    before = {number: signal.getsignal(number) for number, stock in ours.items() if signal.getsignal(number) == stock}
    hook = sys.unraisablehook
    try:
        for number in before:
            signal.signal(number, handle)
        sys.unraisablehook = lost
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
