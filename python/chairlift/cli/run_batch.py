"""`chairlift run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.cli import flags
from chairlift.config import EngineConfig
from chairlift.engine.background import cancel
from chairlift.engine.local_processes import local_processes
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.errors import ChairliftError, InvalidRequest, InvalidSetting, writing
from chairlift.server.config import ServerConfig

if TYPE_CHECKING:
    from chairlift.server.storage.batches import Batch
    from chairlift.server.storage.storage import Storage

_EXAMPLES = """\
examples:
  chairlift run-batch -i requests.jsonl -o answers.jsonl
  chairlift run-batch -i requests.jsonl -o answers.jsonl --data-dir progress
                                                     the same command goes on after an interruption

A line of the input is a request in OpenAI's batch format:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}}

The output has one line for each request, also for those that failed.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "run-batch", summary, _EXAMPLES, run)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one JSON object in each line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, one JSON object in each line")
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig)
    settings = ("served_model_name", "tool_call_parser", "reasoning_parser", "max_body_size", "data_dir", "log_level")
    flags.add_fields(parser, ServerConfig, settings)


def run(args: argparse.Namespace) -> int:
    """Answers all requests of the input."""
    from chairlift.server.storage.storage import Storage

    source, target, server = args.input_file, args.output_file, args.server
    _check(source, target, server.max_body_size)
    with ExitStack() as stack:
        directory = server.data_dir or tempfile.mkdtemp(prefix="chairlift-")
        if server.data_dir is None:
            stack.callback(shutil.rmtree, directory)
        with closing(Storage(directory, sys.maxsize)) as storage:
            batch = asyncio.run(answer_file(args.engine, server, storage, source, args.started))
            ids = (batch.fields["output_file_id"], batch.fields["error_file_id"])
            answers = [storage.files.path(id) for id in ids if id is not None]
        try:
            with writing(f"-o {target}", f"; the answers are in {' and '.join(map(str, answers))}"), target.open("wb") as out:
                for path in answers:
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, out)
        except InvalidSetting:
            stack.pop_all()  # the directory stays
            raise
    if batch.failed:
        print(f"{batch.failed} requests failed: {target} has their errors", file=sys.stderr)
    return 1 if batch.failed else 0


def _check(source: Path, target: Path, max_line: int) -> None:
    """Checks the input and opens the output once, before a model is loaded for them. Raises InvalidSetting and InvalidRequest."""
    from chairlift.server.batch.input import read_input

    if not source.is_file():
        raise InvalidSetting(f"-i {source}: {'it is no regular file, and is read twice' if source.exists() else 'no such file'}")
    _, errors = read_input(source, None, max_line)
    if errors:
        where = "" if errors[0]["line"] is None else f", line {errors[0]['line']}"
        raise InvalidRequest(f"{source}{where}: {errors[0]['message']}")
    if target.exists() and target.samefile(source):
        raise InvalidSetting(f"-o {target} is the input: name another file")
    if not target.is_fifo():  # its reader would take this for the end
        with writing(f"-o {target}"):
            target.open("ab").close()


async def answer_file(config: EngineConfig, server: ServerConfig, storage: Storage, source: Path, started: float) -> Batch:
    """Runs a valid input as a batch, and returns that."""
    from chairlift.checkpoint.locate import public_name
    from chairlift.server.app import application
    from chairlift.server.batch.input import import_input
    from chairlift.server.batch.runner import BatchRunner
    from chairlift.server.model import ServedModel
    from chairlift.server.service import Service

    batch_id = await import_input(storage, source, config.model)
    engine = ReplicatedEngine(config, local_processes(config, 1, exclusive=True))
    await engine.start(started)
    try:
        model = server.served_model_name or public_name(config.model)
        served = ServedModel(model, engine, (), server.tool_call_parser, server.reasoning_parser)
        service = Service([served], storage=storage)
        service.loader.serve_started(served)
        running = asyncio.create_task(
            BatchRunner(application(service, server.max_body_size), service, storage, server.max_body_size).run_until_idle()
        )
        ended = asyncio.create_task(engine.replicas[0].engine.ended())
        try:
            await asyncio.wait((running, ended), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ChairliftError("the engine died; with --data-dir the same command goes on")
        finally:
            await cancel((ended, running))  # before the engine closes: a request that loses its engine would be answered with an error
        running.result()
    finally:
        await engine.close()
    return await storage.batches.get("", batch_id)
