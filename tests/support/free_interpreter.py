"""Whether other threads run while one works."""

import threading
import time
from collections.abc import Callable


def share_beside(work: Callable[[], object]) -> float:
    """CPU time that this thread gets while another one does `work`, as a share of what `work` takes.

    It is almost none if `work` holds the interpreter's lock.
    """
    cpu: list[float] = []

    def measured() -> None:
        start = time.thread_time()
        work()
        cpu.append(time.thread_time() - start)

    thread = threading.Thread(target=measured)
    start = time.thread_time()
    thread.start()
    while thread.is_alive():
        pass
    return (time.thread_time() - start) / cpu[0]
