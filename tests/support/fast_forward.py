"""An event loop in virtual time."""

import asyncio


class FastForward(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self._jumped, select = 0.0, self._selector.select

        def jump(timeout=None):
            self._jumped += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        """Returns the virtual time in seconds."""
        return self._jumped
