"""A lock that threads get in the order in which they wait."""

import threading
from typing import Any


class Turns:
    """Lock for a thread that takes it again and again beside others that take it at times.

    A plain lock may go to the former for ever: it is taken again before another thread has woken. Here whoever waits
    for the lock holds the door to it.
    """

    def __init__(self):
        self._door, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()
