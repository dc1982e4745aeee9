"""Work that keeps a thread busy."""

import threading
import time


def compute(seconds: float) -> None:
    """Computes for so long, and until a thread that slept meanwhile is awake: a virtual core may be away for longer than that, with
    whoever waits for it, and nobody could have looked then."""
    awake = threading.Event()

    def sleep() -> None:
        time.sleep(seconds)
        awake.set()

    threading.Thread(target=sleep).start()
    end = time.thread_time() + seconds
    while time.thread_time() < end or not awake.is_set():
        pass
