"""The gate: passes requests on to upstreams, those that generate when the scheduler lets them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from chairlift.engine.frames import Estimate, ServerRestarted
from chairlift.errors import brief
from chairlift.gate.admission import Admitted, Outcome, admitted
from chairlift.gate.answer import Answer, UpstreamUsage
from chairlift.gate.conversations import Conversations
from chairlift.gate.estimates import Estimates
from chairlift.gate.held_bodies import HeldBodies
from chairlift.gate.paths import CLOSES_SESSION, GENERATES, is_of_clients, plain
from chairlift.gate.prompt import Prompt, read_body, read_prompt
from chairlift.gate.token_counter import TokenCounter
from chairlift.gate.upstream import (
    FAILURES,
    NOT_READY,
    RawHeaders,
    Upstream,
    UpstreamFailed,
    check_head,
    failure,
    passed_on,
    prepare_body,
    without_secrets,
)
from chairlift.gate.whole_events import WholeEvents
from chairlift.server.errors import ApiError, for_route
from chairlift.server.http.body import LARGE, beside, read_raw
from chairlift.server.model import ServedModel
from chairlift.server.routes.sessions import CloseSessionRequest
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream, JsonLines
from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

TELL_SECONDS = 1.0
"""Interval at which the engines get the newest estimates."""
VIA = b"x-chairlift-gate"
"""Header by which a gate recognizes a request that it has passed on itself."""


class Gate:
    """An ASGI application for all paths that are not the gate's own. `estimates` belong to the `upstreams`, in the same order."""

    def __init__(
        self,
        model: ServedModel,
        upstreams: Sequence[Upstream],
        estimates: Sequence[Estimates],
        *,
        keyed: bool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """With keys of its own (`keyed`) the gate passes none of its clients' on. Without the upstreams' tokenizer bytes are counted."""
        self._model, self._upstreams, self._estimates, self._keyed = model, upstreams, estimates, keyed
        self._counter = None if tokenizer is None else TokenCounter(tokenizer, model.tokenizing)
        self._name = secrets.token_hex(8).encode()
        self._told: dict[int, tuple[int, Estimate]] = {}
        self._bodies, self._conversations = HeldBodies(), Conversations()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request on."""
        request = Request(scope, receive)
        if (VIA, self._name) in scope["headers"]:
            raise ApiError(508, "this gate is its own upstream: check --upstream", code="loop")
        if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]):
            raise ApiError(501, "the gate passes no WebSockets on: connect to the upstream itself", code="websocket_unsupported")
        if not scope["raw_path"].startswith(b"/"):  # after the upstream's address, %2F@host would name another server
            raise ApiError(400, "the path must begin with a slash that is not encoded", code="invalid_http")
        path = plain(scope["path"])
        if self._keyed and request.state.reader is not None and not is_of_clients(path):
            message = f"a tenant's key does not reach {brief(path)} of the upstream: use the operator's (--operator-key)"
            raise ApiError(403, message, code="operator_only", headers={"connection": "close"})  # the body stays unread
        raw = await read_raw(request, request.app.state.max_body_size)
        request.state.context.body_received()
        generates = request.method == "POST" and path in GENERATES
        request.state.ticket.admit(queued=generates)
        try:
            with self._bodies.holding(request.state.ticket.tenant.group, raw):
                if generates:
                    await self._generate(request, raw, send)
                else:
                    await self._forward(request, raw, send, path)
        except UpstreamFailed as error:
            raise _refusal(error) from None

    async def tell(self) -> None:
        """Tells the engines what was learned, as long as the task runs."""
        while True:
            for replica in self._model.engine.replicas:
                estimate = self._estimates[replica.number].frame()
                news = replica.restarts, estimate  # a new engine knows nothing
                if replica.engine.ready and self._told.get(replica.number) != news:
                    self._told[replica.number] = news
                    replica.engine.tell(estimate)
            await asyncio.sleep(TELL_SECONDS)

    async def watch(self) -> None:
        """Asks the upstreams whether they are ready, as long as the task runs."""
        await asyncio.gather(*map(self._watch, range(len(self._upstreams))))

    def drain(self, url: str, *, drained: bool) -> None:
        """Takes an upstream out, so that it gets no new requests as long as another one is usable, or back in. Raises ApiError 404."""
        try:
            named = without_secrets(url)
        except ValueError:
            named = url
        upstream = next((one for one in self._upstreams if one.url == named), None)
        if upstream is None:
            raise ApiError(
                404, f"there is no upstream {brief(url)}: GET /upstreams lists them", param="upstream", code="upstream_not_found"
            )
        upstream.drained = drained
        self._choose_usable()

    def describe(self) -> list[dict[str, object]]:
        """The upstreams, for the operator: address, whether drained, whether ready, and the sequences that run or wait there."""
        replicas = self._model.engine.replicas
        return [
            {
                "url": one.url,
                "drained": one.drained,
                "ready": one.healthy,
                "sequences": replica.engine.open_sequences,
            }
            for one, replica in zip(self._upstreams, replicas, strict=True)
        ]

    async def _forward(self, request: Request, raw: bytearray, send: Send, path: str) -> None:
        """Passes a request on that generates nothing; to another usable upstream if one fails, unless it is the operator's."""
        numbers = [number for number, upstream in enumerate(self._upstreams) if upstream.usable and is_of_clients(path)] or [0]
        if request.method == "POST" and path == CLOSES_SESSION:
            ran_at = self._close_session(request, raw)
            if ran_at is not None and self._upstreams[ran_at].healthy:
                numbers = [ran_at]
        for number in numbers:
            try:
                return await self._pass(request, raw, send, number, None, retries=number != numbers[-1])
            except UpstreamFailed as error:
                if number == numbers[-1] or not error.retry:
                    raise
                self._leave_out(number, error)

    async def _generate(self, request: Request, raw: bytearray, send: Send) -> None:
        """Waits for the request's turn and passes it on; to another upstream if the first cannot be reached or is not ready."""
        service_of(request).check_admission()
        service_of(request).registry.add_preparing(request.state.tenant, request.state.context)
        prompt = await self._read_prompt(request, raw)
        tried: set[int] = set()
        for left in reversed(range(len(self._upstreams))):
            async with admitted(request, prompt, tried) as held:
                tried.add(held.upstream)
                estimates = self._estimates[held.upstream]
                held.on_first_token = partial(_first_token, held, held.on_first_token, estimates)
                try:
                    with estimates.running(held) if prompt.streamed else contextlib.nullcontext():
                        await self._pass(request, raw, send, held.upstream, held, retries=left > 0)
                except UpstreamFailed as error:  # nothing was sent to the client
                    moves = left > 0 and error.retry
                    held.outcome = Outcome.MOVES if moves else Outcome.REFUSED
                    if error.retry:
                        self._leave_out(held.upstream, error)
                    if not moves:
                        raise
                    continue
                if held.answer is not None:
                    estimates.observe(held.answer, held.prompt_tokens, held.cached_tokens)
                    self._keep_turn(request, prompt, held, held.answer.usage)
                if held.session is not None and held.session.final:
                    self._conversations.end(request.state.tenant, held.session.name)
                return

    async def _read_prompt(self, request: Request, raw: bytearray) -> Prompt:
        request.state.large = len(raw) > LARGE
        if self._counter is None:
            return await beside(request, read_prompt, raw)
        body = await beside(request, read_body, raw)
        return body.prompt(await self._counter.tokens(request.state.ticket.tenant.group, body.parts))

    async def _pass(
        self, request: Request, raw: bytearray, send: Send, number: int, held: Admitted | None, *, retries: bool = False
    ) -> None:
        """Sends a request to an upstream and its answer to the client. Raises UpstreamFailed as long as the client has got nothing.

        With `retries` a status of NOT_READY is such a failure, if `/health` has one too: the upstream loads its model, or is about to end.
        """
        upstream, scope, begun = self._upstreams[number], request.scope, False
        target = scope["raw_path"].decode("latin-1") + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        sent = time.monotonic()
        try:
            async with upstream.request(request.method, target, self._headers(scope["headers"], request), raw) as response:
                if retries and response.status in NOT_READY:
                    await upstream.check_ready()
                check_head(response)
                prepare_body(response)
                answer = Answer(response.content_type, sent=sent)
                if held is not None and response.status == 200:
                    held.answer = answer
                elif held is not None:
                    held.outcome = Outcome.REFUSED
                begun = True
                raw.clear()  # it is not read again
                await send({"type": "http.response.start", "status": response.status, "headers": _answer_headers(response)})
                # Each event would wake all coroutines between the server and this one. A task of its own is woken alone.
                await asyncio.create_task(_pass_body(scope, response, answer, held, upstream))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except FAILURES as error:
            upstream.ask_now()
            if not begun:
                raise failure(upstream.url, error) from None
            # The connection is closed in the middle of the answer, as the upstream's was.
            log.warning("%s in the middle of an answer", failure(upstream.url, error))

    def _close_session(self, request: Request, raw: bytearray) -> int | None:
        """Ends a session of the tenant here too. Returns the number of the upstream that it ran at, None if it is not known.

        A body that names none, or is long, is left to the upstream.
        """
        if len(raw) > LARGE:
            return None
        try:
            name = CloseSessionRequest.model_validate_json(bytes(raw)).session_id
        except ValidationError:
            return None
        service_of(request).end_session(request.state.tenant, name)
        upstream = self._conversations.upstream_of(request.state.tenant, name)
        self._conversations.end(request.state.tenant, name)
        return upstream

    def _keep_turn(self, request: Request, prompt: Prompt, held: Admitted, usage: UpstreamUsage) -> None:
        """Keeps an answered turn of a session for the next one, and explains why it missed the upstream's cache if it did."""
        if held.session is None:
            return
        tenant, name = request.state.tenant, held.session.name
        token_seconds = self._estimates[held.upstream].token_seconds
        miss = self._conversations.add(tenant, name, prompt, usage, token_seconds, held.upstream)
        if miss is not None:
            service_of(request).turns.add_miss(held.id, request.state.reader, miss)
            self._model.metrics.count_cache_miss(miss, tenant, None)

    def _headers(self, headers: RawHeaders, request: Request) -> RawHeaders:
        """The headers for the upstream: the client's, without its key if that is the gate's, and the id under which the gate knows it."""
        dropped = {b"x-request-id", *((b"authorization", b"x-api-key") if self._keyed else ())}
        kept = [(name, value) for name, value in headers if name not in dropped]
        return [*kept, (b"x-request-id", request.state.context.request_id.encode()), (VIA, self._name)]

    async def _watch(self, number: int) -> None:
        upstream = self._upstreams[number]
        while True:
            await upstream.until_next_probe()
            try:
                await upstream.check_ready()
            except UpstreamFailed as error:
                if error.down:  # a server that is busy may take long to answer
                    self._leave_out(number, error)
            else:
                if not upstream.healthy:
                    log.info("the upstream %s is ready again", upstream.url)
                if upstream.was_down:
                    self._model.engine.replicas[number].engine.tell(ServerRestarted())
                upstream.healthy, upstream.was_down = True, False
                self._choose_usable()

    def _leave_out(self, number: int, failed: UpstreamFailed) -> None:
        """Gives an upstream no more requests until it is ready again, as long as another one is."""
        upstream = self._upstreams[number]
        upstream.was_down |= failed.down
        if upstream.healthy:
            log.warning("%s", failed)
            upstream.healthy = False
            self._choose_usable()

    def _choose_usable(self) -> None:
        """Has requests go to the usable upstreams. If there is none they go to all, and get their errors."""
        any_usable = any(upstream.usable for upstream in self._upstreams)
        for replica in self._model.engine.replicas:
            replica.left_out = any_usable and not self._upstreams[replica.number].usable


def _first_token(held: Admitted, tell: Callable[[], None], estimates: Estimates) -> None:
    """Tells the engine, and learns the speed of prompts, when a stream begins."""
    asyncio.get_running_loop().call_soon(tell)  # the first event goes to the client before
    if (answer := held.answer) is not None and answer.ttft is not None:
        estimates.observe_first(answer.sent, answer.sent + answer.ttft, held.prompt_tokens - held.cached_tokens)


async def _pass_body(scope: Scope, response: Any, answer: Answer, held: Admitted | None, upstream: Upstream) -> None:
    """Sends an answer's body to the client, but not its end. A stream that breaks off ends with an error; other answers raise it."""
    # Middleware only needs the start and the end of the response.
    raw_send: Send = scope["state"]["raw_send"]
    # One that is compressed or has a length cannot end with an event of the gate's.
    opaque = "content-length" in response.headers or "content-encoding" in response.headers
    events, passed = WholeEvents("" if opaque else response.content_type), b"\n"
    on_first_token = None if held is None else held.on_first_token
    try:
        while data := await response.content.readany():
            answer.feed(data)
            if on_first_token is not None and answer.ttft is not None:
                on_first_token()
                on_first_token = None
            if whole := events.feed(data):
                passed = whole
                await raw_send({"type": "http.response.body", "body": whole, "more_body": True})
    except FAILURES as error:
        if opaque or not answer.streamed:
            raise
        upstream.ask_now()
        envelope = for_route(_refusal(failure(upstream.url, error)), scope).envelope
        await raw_send({"type": "http.response.body", "body": _last_event(response.content_type, passed, envelope), "more_body": True})
    else:
        if events.begun:
            await raw_send({"type": "http.response.body", "body": events.begun, "more_body": True})
        if held is not None:
            held.complete = held.answer is not None


def _last_event(content_type: str, before: bytes, envelope: dict[str, Any]) -> bytes:
    """The event that ends a stream with an error. What was passed on `before` may have ended within a long event."""
    if content_type == JsonLines.media_type:
        return (b"" if before.endswith(b"\n") else b"\n") + JsonLines.error_event(envelope)
    return b"\n\n" + EventStream.error_event(envelope)


def _answer_headers(response: Any) -> RawHeaders:
    """The headers for the client. The upstream's own id of the request has another name, because the gate's is what `explain` knows.

    Which web pages may read the answer is the gate's decision.
    """
    renamed = {b"x-request-id": b"x-upstream-request-id", b"request-id": b"x-upstream-request-id"}
    named = [(name.lower(), value) for name, value in passed_on(response.raw_headers) if name.lower() != b"date"]  # the gate sends its own
    kept = [(renamed.get(name, name), value) for name, value in named if not name.startswith(b"access-control-")]
    length = response.headers.get("content-length")
    return kept if length is None else [*kept, (b"content-length", length.encode())]


def _refusal(error: UpstreamFailed) -> ApiError:
    return ApiError(502, f"{error}: try again, or look at its log", type="server_error", code="upstream_failed", admitted=True)
