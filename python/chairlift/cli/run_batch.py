"""`chairlift run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.cli import flags
from chairlift.config import EngineConfig
from chairlift.engine.background import cancel
from chairlift.engine.local_processes import local_processes
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.errors import ChairliftError, InvalidRequest, InvalidSetting
from chairlift.server.config import ServerConfig

if TYPE_CHECKING:
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

    if not args.input_file.is_file():
        raise InvalidSetting(f"-i {args.input_file}: no such file")
    server = args.server
    with ExitStack() as stack:
        directory = server.data_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="chairlift-"))
        storage = Storage(directory, sys.maxsize)
        stack.callback(storage.close)
        failed = asyncio.run(answer_file(args.engine, server, storage, args.input_file, args.output_file, args.started))
    if failed:
        print(f"{failed} requests failed: {args.output_file} has their errors", file=sys.stderr)
    return 1 if failed else 0


async def answer_file(config: EngineConfig, server: ServerConfig, storage: Storage, source: Path, target: Path, started: float) -> int:
    """Runs the input as a batch and writes the output; returns the number of failed requests. Raises InvalidRequest for invalid input."""
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
    batch = await storage.batches.get("", batch_id)
    if errors := batch.fields["errors"]:
        first = errors["data"][0]
        where = "" if first["line"] is None else f", line {first['line']}"
        raise InvalidRequest(f"{source}{where}: {first['message']}")
    with target.open("wb") as out:
        for name in ("output_file_id", "error_file_id"):
            if (id := batch.fields[name]) is not None:
                with storage.files.path(id).open("rb") as answers:
                    shutil.copyfileobj(answers, out)
    return batch.failed
