"""An engine with a tiny model that ends as ordered: by a signal, at a given step and in a given part of it.

Run as a script, this is `chairlift` with such an engine, which restarts without a pause; `python -m dying_engine FD FORMAT` runs the
engine's own process. The order is JSON in the file that `GATE` of `paced_engine` names.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from paced_engine import GATE

from chairlift.engine import frames, heartbeat, parent, process

POISON = (7, 8, 9) * 3
"""A prompt that kills every engine that begins to compute it."""
STEP_SECONDS = 0.004
"""Added to a step while there is an order, so that requests that are sent together run together."""
FOREIGN = "foreign"
"""The name of the file, beside the order, that gives the next engines other numerics."""


class Doom:
    """Counts the steps since there is an order, and executes it.

    The order has `step`, `signal` and `where`: before the step is computed (`launch`), when its tokens are known (`send`), when half of
    them were sent (`half`), or when they were sent with a flipped bit (`flip`).
    """

    def __init__(self) -> None:
        self._file = Path(os.environ[GATE])
        self._steps = self._signal = 0

    @property
    def ordered(self) -> bool:
        """Whether there is an order."""
        return self._file.exists()

    def now(self, where: str) -> bool:
        """Whether this is where the process ends. Of several engines that come there, it is one."""
        try:
            order = json.loads(self._file.read_text())
            self._steps += where == "launch"
            if self._steps < order["step"] or where != order["where"]:
                return False
            self._file.rename(self._file.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:  # there is no order, or another engine has just taken it
            self._steps = 0
            return False
        self._signal = order["signal"]  # 0 is none
        return True

    def strike(self) -> None:
        """Sends the signal to this process."""
        os.kill(os.getpid(), self._signal)


def doom() -> None:
    """Makes an engine in this process end as ordered, and of POISON."""
    from chairlift.engine import engine_info
    from chairlift.runner.runner import ModelRunner

    one, add_request, launch, send, known = Doom(), ModelRunner.add_request, ModelRunner.launch, parent.send, engine_info.fingerprint

    def adding(self: Any, slot: int, sequence: Any) -> None:
        if tuple(sequence.tokens[: len(POISON)]) == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        add_request(self, slot, sequence)

    def launching(self: Any, buffer_index: int, sizes: Any) -> Any:
        if one.now("launch"):
            one.strike()
        if one.ordered:
            time.sleep(STEP_SECONDS)
        return launch(self, buffer_index, sizes)

    def sending(sock: Any, frame: Any, engine: int, seal: Any) -> None:
        if isinstance(frame, frames.StepOutputs) and frame.tokens:
            if one.now("send"):
                one.strike()
            if one.now("half"):
                whole = frames.encode(frame, engine, seal)
                sock.sendall(whole[: len(whole) // 2])
                one.strike()
            if one.now("flip"):
                whole = frames.encode(frame, engine, seal)
                at = whole.index(frame.tokens)
                one.strike()
                sock.sendall(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                return
        send(sock, frame, engine, seal)

    def fingerprint(*arguments: Any) -> str:
        return known(*arguments) + str((Path(os.environ[GATE]).parent / FOREIGN).exists())

    ModelRunner.add_request = adding  # type: ignore[method-assign]
    ModelRunner.launch = launching  # type: ignore[method-assign]
    parent.send = sending
    engine_info.fingerprint = fingerprint


def serve() -> int:
    """Runs the command line with the dying engine."""
    from chairlift.cli.main import main
    from chairlift.engine import spawned_process
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.server import engine_keeper

    engine_keeper.STABLE_SECONDS = 0  # type: ignore[misc]
    heartbeat.SILENT_AFTER = 2.0  # type: ignore[misc]
    spawned_process.COMMAND = EngineProcess.command = ("-m", "dying_engine")
    return main()


if __name__ == "__main__":
    if sys.argv[1] in ("serve", "join"):
        sys.exit(serve())
    doom()
    status = process.main(int(sys.argv[1]), partial(process.load, sys.argv[2]), *process.more_arguments(sys.argv[3:]))
    sys.stdout.flush()
    os._exit(status)
