"""`chairlift gate`: schedules requests in front of other inference servers."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from chairlift.cli import flags, values
from chairlift.cli.access import Access
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, pip_install
from chairlift.server.config import ServerConfig
from chairlift.settings import LARGEST_SIZE

if TYPE_CHECKING:
    from chairlift.gate.limits import Limits
    from chairlift.gate.upstream import Upstream

log = logging.getLogger("chairlift")

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
"""Requests that an upstream runs at a time, if it does not say: vLLM's default."""
PROMPT_TOKENS = 256
"""Tokens of prompts in a step of the upstream, as estimated. Few, because most requests are admitted at a step's end."""
MAX_KV_TOKENS = 1 << 25
"""The most of an upstream's KV that we count on: the engine takes 32 bytes of memory for each token."""
DEFAULT_CONTEXT = 1 << 17
"""Longest sequence of an upstream that does not say it."""
MAX_BODY_SIZE = 32 << 20
"""Images and sounds are long, and upstreams have no limit or a higher one. Anthropic's API takes as much."""

_ENGINE_FLAGS = (
    *("tokenizer", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "scheduling_policy", "tenant_weights", "tier_weights"),
    *("max_num_queued_reqs", "max_num_queued_tokens", "queue_ageing_ms", "session_turns", "max_session_wait_ms", "journal"),
)
_SERVER_FLAGS = (
    *("host", "port", "uds", "served_model_name", "api_key", "operator_key", "public_metrics", "api_key_file", "cors_allow_origins"),
    *("ssl_certfile", "ssl_keyfile", "admin_socket", "routing", "tiers", "max_body_size", "shutdown_timeout", "usage_log"),
    *("log_level", "log_format"),
)
_TEXTS = {
    "served_model_name": "name of the model in metrics and the usage log (default: the host and port of the first upstream)",
    "tokenizer": "directory or file of the upstreams' tokenizer, to count prompts' tokens with (default: they are estimated by bytes)",
    "max_num_seqs": f"requests that each upstream runs at once (default: what the upstream reports, else {MAX_NUM_SEQS})",
    "max_model_len": f"longest prompt plus output, in tokens (default: what the upstream reports, else {DEFAULT_CONTEXT})",
    "max_body_size": f"largest body of a request, like 64M; larger ones are refused (default: {MAX_BODY_SIZE >> 20}M)",
    "max_num_batched_tokens": f"tokens in one step of an upstream, as estimated (default: {PROMPT_TOKENS} more than --max-num-seqs)",
}
"""Help of flags whose default or meaning differs from that of 'chairlift serve'."""

_EXAMPLES = """\
examples:
  chairlift gate --upstream http://127.0.0.1:8001                  in front of a vLLM, SGLang or llama.cpp server of this machine
  chairlift gate --upstream http://gpu1:8000 --upstream http://gpu2:8000 --scheduling-policy fair
                                                                   two servers of one model, and tenants that share them fairly
  chairlift gate --upstream http://host:8000 --upstream-kv-tokens 400k --api-key-file keys.toml
                                                                   a server that does not report its KV cache; keys for each tenant

Point clients at the gate instead of the server: every request passes unchanged, when it is its turn. The gate's own pages are /metrics,
/dashboard, /live, /ready and /v1/requests/ID/explain; all other paths are the upstream's.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "gate", summary, _EXAMPLES, run)
    parser.add_argument(
        "--upstream",
        action="append",
        type=_address,
        metavar="URL",
        default=[],
        help="required: a server to pass requests on to; several if repeated",
    )
    parser.add_argument(
        "--upstream-kv-tokens",
        type=values.size(1, LARGEST_SIZE),
        metavar="N",
        help="tokens that each upstream's KV cache holds, like 400k (default: what the upstream reports)",
    )
    parser.add_argument(
        "--upstream-api-key",
        default=os.environ.get("CHAIRLIFT_UPSTREAM_API_KEY"),
        metavar="KEY",
        help="sent to the upstreams instead of the clients' keys [CHAIRLIFT_UPSTREAM_API_KEY]",
    )
    parser.set_defaults(defaults={"max_body_size": MAX_BODY_SIZE})
    flags.add_fields(parser, ServerConfig, _SERVER_FLAGS, texts=_TEXTS)
    flags.add_fields(parser, EngineConfig, _ENGINE_FLAGS, texts=_TEXTS)


def run(args: argparse.Namespace) -> int:
    """Passes requests on until a signal."""
    if not args.upstream:
        raise InvalidSetting("name the server to pass requests on to: chairlift gate --upstream http://127.0.0.1:8001")
    try:
        import chairlift.gate.gate  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidSetting(f"the gate needs an HTTP client: {pip_install('gate')}") from None
    access = Access.read(args.server)
    with access.listen(args.server, "the upstreams") as listener:
        return asyncio.run(_serve(args, access, listener))


async def _serve(args: argparse.Namespace, access: Access, listener: socket.socket) -> int:
    from chairlift.engine.background import in_background
    from chairlift.engine.estimated_engine import EstimatedEngine
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.engine.same_process import SameProcess
    from chairlift.gate.app import admin_routes, gate_routes
    from chairlift.gate.estimates import Estimates
    from chairlift.gate.gate import Gate
    from chairlift.gate.model_files import write_model_files
    from chairlift.gate.upstream import Upstream
    from chairlift.server.admin import serve_admin
    from chairlift.server.http.sockets import open_path
    from chairlift.server.model import ServedModel
    from chairlift.server.supervisor import Supervisor
    from chairlift.server.work import WorkThreads
    from chairlift.tokenizer import Tokenizer

    asyncio.get_running_loop().set_default_executor(WorkThreads(thread_name_prefix="asyncio"))
    server, began = args.server, time.monotonic()
    source = args.engine.tokenizer
    tokenizer = None if source is None else Tokenizer(Path(source).expanduser(), source)
    upstreams = [Upstream(url, args.upstream_api_key) for url in args.upstream]
    async with AsyncExitStack() as stack:
        for upstream in upstreams:
            stack.push_async_callback(upstream.close)
        limits = [await _limits(upstream, args.upstream_kv_tokens) for upstream in upstreams]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chairlift-gate-")))
        config = _engine_config(access.weighted(args.engine), limits, directory)
        write_model_files(directory, config.max_model_len or DEFAULT_CONTEXT)
        processes = [SameProcess(EstimatedEngine) for _ in upstreams]
        routing = server.routing if len(upstreams) > 1 else None
        engine = ReplicatedEngine(config, processes, equal_numerics=False, routing=routing)
        name = server.served_model_name or urlsplit(upstreams[0].url).netloc
        model = ServedModel(name, engine, resume="any")
        blocks = config.num_kv_blocks or 0
        estimates = [Estimates(limit.kv_tokens or 0, BLOCK_SIZE, blocks) for limit in limits]
        gate = Gate(model, upstreams, estimates, keyed=bool(access.keys), tokenizer=tokenizer)
        supervisor = Supervisor([model], server, access.keys, access.tiers, processes, gate_routes(gate))
        gc.freeze()  # the garbage collector need not examine these lasting objects again
        for process in processes:
            await stack.enter_async_context(process)
        if server.admin_socket is not None:
            admin = stack.enter_context(open_path(server.admin_socket, 0o600))
            await stack.enter_async_context(serve_admin(admin, supervisor.admin(admin_routes(gate))))
        await stack.enter_async_context(in_background(gate.tell()))
        await stack.enter_async_context(in_background(gate.watch()))
        return await supervisor.run(listener, asyncio.create_task(_start(engine, began)))


async def _start(engine: Any, began: float) -> None:
    """Starts the engines of all upstreams."""
    await asyncio.gather(*(replica.start(began) for replica in engine.replicas))


async def _limits(upstream: Upstream, kv_tokens: int | None) -> Limits:
    """What is known of an upstream. Raises InvalidSetting if its KV cache is not."""
    from chairlift.gate.limits import Limits
    from chairlift.gate.upstream import UpstreamFailed

    try:
        limits = await upstream.limits_when_ready()
    except UpstreamFailed as error:
        if kv_tokens is None:
            raise InvalidSetting(f"{error}: start it first, or say how many tokens it holds with --upstream-kv-tokens") from None
        log.warning("%s; the gate waits for it", error)
        limits = Limits()
    if (kv_tokens := kv_tokens or limits.kv_tokens) is None:
        raise InvalidSetting(f"{upstream.url} does not tell the size of its KV cache: set --upstream-kv-tokens")
    log.info("upstream %s: KV for %d tokens", upstream.url, kv_tokens)
    return replace(limits, kv_tokens=kv_tokens)


def _engine_config(config: EngineConfig, limits: Sequence[Limits], directory: Path) -> EngineConfig:
    """The settings of the engines: those of the command line, and where it has none the upstreams' own."""
    from chairlift.engine.estimated_engine import HEADROOM

    kv_tokens = min(MAX_KV_TOKENS, max(limit.kv_tokens or 0 for limit in limits))
    seqs = config.max_num_seqs or min((limit.max_num_seqs for limit in limits if limit.max_num_seqs), default=MAX_NUM_SEQS)
    context = config.max_model_len or min((limit.max_model_len for limit in limits if limit.max_model_len), default=DEFAULT_CONTEXT)
    return replace(
        config,
        model=str(directory),
        tokenizer=None,
        load_format="none",
        speculative_config={"method": "off"},
        block_size=BLOCK_SIZE,
        num_kv_blocks=HEADROOM * max(1, kv_tokens // BLOCK_SIZE),
        max_num_seqs=seqs,
        # Bytes stand for tokens: a prompt may have more of them here than at the upstream. The engine never counts on fewer blocks than
        # those of the longest sequence, so that must not be longer than the upstream's whole KV.
        max_model_len=min(HEADROOM * context, max(BLOCK_SIZE, kv_tokens)),
        max_num_batched_tokens=config.max_num_batched_tokens or PROMPT_TOKENS + seqs,
    )


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port or an IPv6 address that is none
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"expected an address like http://127.0.0.1:8001, got {text!r:.100}")
    return text.rstrip("/").removesuffix("/v1")
