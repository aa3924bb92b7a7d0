"""`chairlift serve`: the HTTP server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.cli import flags, idle_flags
from chairlift.cli.access import Access
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import InvalidSetting, ModelNotFound, UnsupportedModel
from chairlift.server.config import ServerConfig

if TYPE_CHECKING:
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.engine.secret import Secret
    from chairlift.engine.spawned_process import Spawned
    from chairlift.server.model_specs import ModelSpec
    from chairlift.server.supervisor import Supervisor

log = logging.getLogger("chairlift")

THREADS_TIMEOUT = 1.0
"""Seconds after which a process that has shut down exits although threads of it still run."""

_EXAMPLES = """\
examples:
  chairlift serve                                    the default model, for this machine only
  chairlift serve ./my-model --port 9000             a checkpoint of your own
  chairlift serve model.gguf --max-model-len 8k      a GGUF file with a shorter context
  chairlift serve --host 0.0.0.0 --api-key SECRET    on the network: set a key
  chairlift serve --api-key-file keys.toml --max-num-queued-reqs 100
                                                     per-tenant keys and limits, and a bounded queue
  chairlift serve chat=./big small=./small.gguf --max-loaded-models 1
                                                     two models under these names, one of them loaded at a time
  chairlift serve --models models.toml               several models, each with settings of its own
  CHAIRLIFT_MAX_NUM_SEQS=16 chairlift serve          every flag has an environment variable; the flag wins

then:
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'

Sizes may be written 4096, 32k (32,768) or 2G. Ctrl-C or SIGTERM lets running requests finish; a second one exits at once.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "serve", summary, _EXAMPLES, run)
    parser.add_argument(
        "model_args",
        nargs="*",
        action=flags.Models,
        default=argparse.SUPPRESS,
        metavar="[NAME=]MODEL",
        help=f"{flags.MODEL_SOURCES} (default: {DEFAULT_MODEL}); several are loaded when requests name them [CHAIRLIFT_MODEL]",
    )
    flags.add_model(parser, "MODEL as a flag, for one model", positional=False)
    flags.add_fields(parser, ServerConfig)
    flags.add_fields(parser, EngineConfig)
    parser.add_argument("--enable-auto-tool-choice", action="store_true", help="vLLM's flag, without effect: tool calls are always read")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal."""
    from chairlift.server.http.sockets import open_path

    server = args.server
    access = Access.read(server)
    specs = _specs(args, access.weighted(args.engine))
    if server.engine_listen is not None and len(specs) > 1:
        raise InvalidSetting("--engine-listen needs a server with one model: engines of other machines run one")
    if server.otlp_traces_endpoint is not None:
        from chairlift.server.observability.traces import check_installed

        check_installed()
    if server.ray_address is None:  # otherwise the engines' machines have the files
        for spec in specs:
            with _located(spec, server.models):
                _check(spec.config, looks=len(specs) == 1 or spec.preload)  # others are looked for when they are loaded
    shadow = _shadow_command(specs, server)
    if idle := idle_flags.find(args.engine, server, [spec.config for spec in specs]):
        log.warning("these settings have no effect: %s", "; ".join(idle))
    # Each text is tokenized on one thread, whose priority may be low: that of the package's own threads is not.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Pydantic would read the metadata of all installed packages for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with ExitStack() as sockets:
        listener = sockets.enter_context(access.listen(server, "this server"))
        admin = None if server.admin_socket is None else sockets.enter_context(open_path(server.admin_socket, 0o600))
        joining = _Joining.open(server, sockets)
        spawned = _spawn(specs, server)
        # This and all else is imported while the engine's process imports.
        import asyncio

        return asyncio.run(_serve(specs, server, access, listener, admin, joining, shadow, args.started, spawned))


def _specs(args: argparse.Namespace, engine: EngineConfig) -> list[ModelSpec]:
    """Returns the models to serve. Raises InvalidSetting, also for settings of several models where there is one."""
    from chairlift.server.model_specs import named_models, read_models, single_model

    server, models, model = args.server, getattr(args, "model_args", []), getattr(args, "model", None)
    if server.models is not None and (models or model):
        raise InvalidSetting(f"--models {server.models}: a model is named on the command line too, {model or models[0]}")
    if len(models) > 1 and model is not None:
        raise InvalidSetting(f"the model is named twice: {models[0]} and {model}")
    if server.models is not None:
        specs = read_models(server.models, engine, server)
    elif len(models) > 1:
        specs = named_models(models, engine, server)
    else:
        return [single_model(engine.model, engine, server)]
    if server.served_model_name is not None:
        raise InvalidSetting("--served-model-name names one model: write NAME=MODEL, or name it in the file of --models")
    return specs


@contextmanager
def _located(spec: ModelSpec, file: str | None) -> Iterator[None]:
    """Raises errors of a model in the file of `--models` with the place of its table."""
    from chairlift.server.model_specs import place_of

    try:
        yield
    except (InvalidSetting, ModelNotFound, UnsupportedModel) as error:
        if file is None:
            raise
        raise InvalidSetting(f"{place_of(spec.name, str(error), file)}: {error}") from None


def _spawn(specs: list[ModelSpec], server: ServerConfig) -> Spawned | None:
    """Starts the process for the first engine of an only model on this machine; it imports meanwhile. None for other engines."""
    if len(specs) > 1 or server.ray_address is not None:
        return None
    from chairlift.engine.local_processes import environments
    from chairlift.engine.spawned_process import COMMAND, SpawnedProcess

    config = specs[0].config
    return SpawnedProcess.start(COMMAND, config.load_format, environments(config, server.replicas)[0])


def _engine_processes(specs: list[ModelSpec], server: ServerConfig, spawned: Spawned | None) -> list[EngineProcess]:
    """Returns the processes of the engines, of which the first may be `spawned`."""
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.engine.local_processes import local_processes

    # The processes import what loads models unless none of them is loaded.
    loading = next((spec.config for spec in specs if spec.config.load_format != "none"), specs[0].config)
    if server.ray_address is not None:
        return [EngineProcess(loading.load_format, exclusive=True, awaits_join=True)]
    processes = local_processes(loading, server.replicas, exclusive=len(specs) == 1)
    if spawned is not None:
        processes[0].start_early(spawned)
    return processes


async def start_engine(engine: ReplicatedEngine, spec: ModelSpec, file: str | None, started: float) -> None:
    """Starts the engine of an only model."""
    with _located(spec, file):
        await engine.start(started)


def _check(config: EngineConfig, *, looks: bool) -> None:
    """Raises ChairliftError for what a model's settings name and is not here, before anything is started. `looks` for the model too."""
    from chairlift.checkpoint.locate import check_name
    from chairlift.engine.file_checks import check_files
    from chairlift.runner.cuda import check_device

    if looks:
        check_name(config.model, config.revision)
    check_device(config.device, config.runner, config.tensor_parallel_size)
    check_files(config)
    if config.chat_template is not None:
        from chairlift.chat_template import ChatTemplate  # imports jinja2

        ChatTemplate.from_file(Path(config.chat_template), {})


def _shadow_command(specs: list[ModelSpec], server: ServerConfig) -> list[str]:
    """The command that simulates other settings beside the server; empty without them. Raises InvalidSetting.

    A policy in a file is loaded by that process only.
    """
    policy, settings = server.shadow_policy, server.shadow_set
    if policy is None and not settings:
        return []
    from chairlift.cli import policy_files, replay_settings
    from chairlift.cli.shadow import changes_of

    if (journal := specs[0].config.journal) is None:
        raise InvalidSetting("--shadow-policy and --shadow-set need --journal FILE: they simulate the requests that it records")
    if policy is not None and policy_files.is_file(policy):
        if not Path(policy.rpartition(":")[0]).expanduser().is_file():
            raise InvalidSetting(f"--shadow-policy {policy}: there is no such file")
    elif policy is not None:
        settings = (f"scheduling_policy={policy}", *settings)
    pairs = []
    for setting in settings:
        try:
            pairs.append(replay_settings.parse(setting))
        except argparse.ArgumentTypeError as error:
            raise InvalidSetting(f"--shadow-set {setting}: {error}") from None
    if pairs:  # there are none if only a policy in a file differs
        changes_of(pairs)
    sets = [part for setting in server.shadow_set for part in ("--set", setting)]
    return [sys.executable, "-m", "chairlift", "shadow", journal, "--json", *sets, *(["--policy", policy] if policy else [])]


class _Joining(NamedTuple):
    """Where engines of other machines may join, and what they must know."""

    listener: socket.socket
    secret: Secret

    @staticmethod
    def open(server: ServerConfig, sockets: ExitStack) -> _Joining | None:
        """Reads the secret and listens, if engines may join. Raises InvalidSetting and PortTaken."""
        from chairlift.engine.secret import read_secret
        from chairlift.server.http.sockets import open_port

        if server.engine_listen is None or server.engine_secret_file is None:
            return None
        secret = read_secret(server.engine_secret_file)
        return _Joining(sockets.enter_context(open_port(*server.engine_listen)), secret)


async def _serve(
    specs: list[ModelSpec],
    server: ServerConfig,
    access: Access,
    listener: socket.socket,
    admin: socket.socket | None,
    joining: _Joining | None,
    shadow: list[str],
    started: float,
    spawned: Spawned | None,
) -> int:
    import asyncio

    from chairlift.engine.local_processes import share_cores
    from chairlift.server.work import WorkThreads

    asyncio.get_running_loop().set_default_executor(WorkThreads(thread_name_prefix="asyncio"))
    gc.disable()  # until everything is imported: what is imported lasts
    processes = _engine_processes(specs, server, spawned)
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.engine.service_exchange import exchanging

    engines = [
        ReplicatedEngine(
            share_cores(spec.config, len(processes)),
            processes,
            weight=spec.weight,
            equal_numerics=server.resume == "exact",
            routing=server.routing if server.replicas > 1 or server.engine_listen is not None else None,
        )
        for spec in specs
    ]
    starting = asyncio.create_task(start_engine(engines[0], specs[0], server.models, started)) if len(specs) == 1 else None
    # The web framework is imported while the engine's process loads the model.
    module = await asyncio.to_thread(import_module, "chairlift.server.supervisor")
    from chairlift.server.admin import serve_admin  # the supervisor has imported it

    served = module.served_models(specs, engines, server)
    supervisor = module.Supervisor(served, server, access.keys, access.tiers, processes, shadow_command=shadow)
    gc.freeze()  # the garbage collector need not examine these lasting objects again
    gc.enable()
    async with AsyncExitStack() as stack:
        for process in processes:
            await stack.enter_async_context(process)
        await stack.enter_async_context(exchanging(lambda: [replica.engine.process for replica in engines[0].replicas]))
        if admin is not None:
            await stack.enter_async_context(serve_admin(admin, supervisor.admin()))
        if joining is not None:
            await _accept_engines(stack, joining, supervisor, server, specs[0].config)
        status: int = await supervisor.run(listener, starting)
    # asyncio and Python wait for all threads at exit, and a thread may be downloading a model for an hour.
    exit_timer = threading.Timer(THREADS_TIMEOUT, os._exit, (status,))
    exit_timer.daemon = True
    exit_timer.start()
    return status


async def _accept_engines(
    stack: AsyncExitStack, joining: _Joining, supervisor: Supervisor, server: ServerConfig, config: EngineConfig
) -> None:
    """Lets engines of other machines join, and starts those on Ray, until `stack` is closed."""
    from chairlift.server.engine_listener import accepting

    await stack.enter_async_context(accepting(joining.listener, joining.secret, partial(supervisor.join, config=config)))
    host, port = joining.listener.getsockname()[:2]
    log.info("listening for engines on %s:%d", host, port)
    if server.ray_address is not None:
        from chairlift.engine.background import in_background
        from chairlift.server.ray_engines import RayEngines

        await stack.enter_async_context(in_background(RayEngines(server, config, port).keep()))
