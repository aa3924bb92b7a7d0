"""`chairlift join`: an engine of this machine for a server on another one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from typing import Any

from chairlift.cli import flags, values
from chairlift.config import EngineConfig
from chairlift.engine.machine_files import OWN, MachineFiles
from chairlift.engine.secret import Secret
from chairlift.errors import InvalidSetting
from chairlift.server.config import ServerConfig
from chairlift.settings import parse_host_and_port

log = logging.getLogger("chairlift")

SETTINGS = ("engine_secret_file", "log_level", "log_format")

_EXAMPLES = """\
examples:
  chairlift serve MODEL --engine-listen 10.0.0.1:7000 --engine-secret-file secret     on the server's machine
  chairlift join 10.0.0.1:7000 --engine-secret-file secret                            on this one
  chairlift join 10.0.0.1:7000 --engine-secret-file secret --model /models/llama      a model of this machine's disk

The server cannot name a file of this machine: the engine reads those that these flags name. Without --model it downloads the
model by the name that the server has for it, from the Hugging Face hub for example. Ctrl-C ends the engine after its requests;
those that take longer than the server's --shutdown-timeout go on in another engine. A second Ctrl-C ends it at once.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "join", summary, _EXAMPLES, run)
    parser.add_argument(
        "address",
        type=values.reader(parse_host_and_port),
        metavar="HOST:PORT",
        help="where the server listens for engines (--engine-listen)",
    )
    secret = {"engine_secret_file": "required: file with the server's secret, readable only by its owner"}
    flags.add_fields(parser, ServerConfig, SETTINGS, shown=SETTINGS, texts=secret)
    parser.add_argument("--model", metavar="MODEL", help=f"the server's model on this machine: {flags.MODEL_SOURCES}")
    flags.add_fields(parser, EngineConfig, {*OWN, "enable_lora"} - {"chat_template"})  # the server renders chats


def run(args: argparse.Namespace) -> int:
    """Runs an engine until a signal; the second one ends it at once. Raises JoinRefused if the server has another version."""
    from chairlift.engine.secret import read_secret

    if args.server.engine_secret_file is None:
        raise InvalidSetting("join needs --engine-secret-file FILE, with the secret of the server")
    with asyncio.Runner() as runner:
        return runner.run(_join(args.address, read_secret(args.server.engine_secret_file), _files(args)))


def _files(args: argparse.Namespace) -> MachineFiles:
    settings = {name: getattr(args.engine, name) for name in OWN}
    return MachineFiles(settings if args.model is None else {**settings, "model": args.model})


async def _join(address: tuple[str, int], secret: Secret, files: MachineFiles) -> int:
    from chairlift.engine.joining import join

    leaving = asyncio.Event()
    joining = asyncio.create_task(join(*address, secret, files, leaving))

    def leave(name: str) -> None:
        if leaving.is_set():
            joining.cancel()
            return
        log.info("%s: leaving the server as soon as the engine's requests have ended or moved; a second signal ends it at once", name)
        leaving.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave, number.name)
    try:
        await joining
    except asyncio.CancelledError:
        return 1
    return 0
