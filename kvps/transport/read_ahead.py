"""Runs an iterator on a thread of its own, a few steps ahead of its consumer.

Receiving bytes and computing on them both release the interpreter lock, so a second thread uses a second processor.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue

_DONE = StopIteration()


def read_ahead(stream: Generator[None, None, None], slots: int, held: int) -> Generator[None, None, None]:
    """Yield as `stream` does, which fills `slots` buffers in turn and may be that many steps ahead.

    The consumer still uses the last `held` buffers when it asks for the next. Raises what `stream` raises.
    """
    room, filled = threading.Semaphore(slots), SimpleQueue[BaseException | None]()
    stopped = False

    def run() -> None:
        try:
            while True:
                room.acquire()
                if stopped:
                    return
                next(stream)
                filled.put(None)
        except StopIteration:
            filled.put(_DONE)
        except BaseException as error:
            filled.put(error)

    thread = threading.Thread(target=run, name="kvps-ahead", daemon=True)
    thread.start()
    used = 0
    try:
        while True:
            if used >= held:
                room.release()
            error = filled.get()
            if error is _DONE:
                return
            if error:
                raise error
            used += 1
            yield
    finally:
        stopped = True
        room.release()
        thread.join()
        stream.close()
