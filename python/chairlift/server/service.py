"""State that all models share: who may use the server, recent requests, files, logs and traces."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from starlette.requests import Request

from chairlift.engine.frames import NoteSession
from chairlift.engine.stats import Stats
from chairlift.errors import brief
from chairlift.machine import core_time
from chairlift.server.admission import Admission
from chairlift.server.errors import ApiError
from chairlift.server.keys import Reader
from chairlift.server.lifecycle import ModelState
from chairlift.server.load_policy import LoadPolicy
from chairlift.server.model import ServedModel
from chairlift.server.model_loader import ModelLoader
from chairlift.server.observability.loop_monitor import LoopMonitor
from chairlift.server.observability.metrics_page import MetricsPage
from chairlift.server.observability.shadow import Shadow
from chairlift.server.observability.usage_log import UsageLabels
from chairlift.server.pacing import Pacing
from chairlift.server.registry import RequestRegistry
from chairlift.server.sequences import Sequences, ServedSequence
from chairlift.server.tiers import ServiceTiers
from chairlift.server.turns import Turns

if TYPE_CHECKING:
    from chairlift.outputs import Timeline
    from chairlift.server.observability.traces import Traces
    from chairlift.server.observability.usage_log import UsageLog
    from chairlift.server.storage.storage import Storage


class Service:
    """The models of one server, and what they share."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        tiers: ServiceTiers | None = None,
        *,
        policy: LoadPolicy | None = None,
        storage: Storage | None = None,
        traces: Traces | None = None,
        usage_log: UsageLog | None = None,
        exact_history: bool = True,
        shadow_command: Sequence[str] = (),
    ) -> None:
        """The first of `models` serves requests that name none. `policy` says how many of them may be loaded; any number by default."""
        self.models = tuple(models)
        self.tiers = ServiceTiers() if tiers is None else tiers
        """The service tiers and who may use them."""
        self.storage = storage
        """Files and batches, with `--data-dir`."""
        self.traces = traces
        """Exports OpenTelemetry traces, if configured."""
        self.usage_log = usage_log
        """Records what each request used, if configured."""
        self.exact_history = exact_history
        """Whether returned answers get the tokens that were generated."""
        self.turns = Turns()
        """The latest turns of conversations."""
        self.loop_monitor = LoopMonitor({"model_name": self.default.name, "engine": "0"})
        """Measures the event loop once it is started."""
        self.default.metrics.registry.register(self.loop_monitor)
        self.shadow = Shadow(shadow_command, {"model_name": self.default.name, "engine": "0"}) if shadow_command else None
        """Simulates other settings, if configured."""
        if self.shadow is not None:
            self.default.metrics.registry.register(self.shadow)
        self.metrics_page = MetricsPage([model.metrics for model in self.models])
        self.loader = ModelLoader(self.models, policy)
        self.open = 0
        """Requests being answered."""
        self.registry = RequestRegistry()
        """Recent requests, for explanations."""
        self._explaining: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self.sequences = Sequences(self._bill)
        """Clients' live sequences."""
        limits = [model.engine.config.max_num_queued_reqs for model in self.models]
        queued = None if None in limits else sum(limit for limit in limits if limit is not None)
        self.admission = Admission(queued, self._busiest_stats, lambda: min(model.lifecycle.seconds_until_ready for model in self.models))
        """Counts waiting requests."""
        self.pacing = Pacing(core_time())
        """Shares the server's own time among groups of tenants."""
        self._by_name = {name: model for model in self.models for name in model.names}

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def draining(self) -> bool:
        """Whether the server shuts down."""
        return self.default.lifecycle.state is ModelState.DRAINING

    def drain(self) -> None:
        """Refuses new requests from now on."""
        for model in self.models:
            model.lifecycle.drain()
        self.loader.drain(self.default.lifecycle.refusal(admitted=True))

    @property
    def data(self) -> Storage:
        """The storage; raises ApiError 400 on a server without one."""
        if self.storage is None:
            message = "this server stores no files and runs no batches: start it with --data-dir DIR"
            raise ApiError(400, message, code="unsupported")
        return self.storage

    def find(self, name: str | None, *, adapters: bool = True) -> ServedModel:
        """Returns the model of that name or, with `adapters`, of the LoRA adapter of that name; the first for None.

        Raises ApiError 404 with the names that there are.
        """
        if name is None:
            return self.default
        if (model := self._by_name.get(name)) is not None:
            return model
        adapted = {one: model for model in reversed(self.models) for one in model.engine.adapters} if adapters else {}
        if name not in adapted:
            names = (*self._by_name, *sorted(adapted.keys() - self._by_name.keys()))
            message = f"the model {brief(name)} does not exist; this server has {', '.join(map(repr, names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return adapted[name]

    async def use(self, request: Request, name: str | None, keep_alive: float | None = None, *, adapters: bool = True) -> ServedModel:
        """Chooses the model of a request and waits until it is loaded; it stays so until the request ends.

        `keep_alive` are the seconds for which the client wants it to stay loaded afterwards; a tenant can only lengthen the server's own. A
        second call for the same model does nothing.
        Raises ApiError 404 for an unknown name, and 503 if the model cannot be loaded.
        """
        model = self.find(name, adapters=adapters)
        if getattr(request.state, "model", None) is not model:
            if keep_alive is not None and not request.state.may_unload:
                keep_alive = max(keep_alive, model.keep_alive or 0.0)
            ready, began = model.lifecycle.state is ModelState.READY, time.monotonic()
            request.state.ticket.on_release(await self.loader.acquire(model, keep_alive))
            request.state.model = model
            if not ready:
                request.state.context.waited_for_model = time.monotonic() - began
        return model

    def let_unload(self, request: Request, model: ServedModel) -> bool:
        """Unloads a model when it is idle because a client asks for it. Returns False if it stays loaded for ever, or others may use it."""
        if model.keep_alive is None or not request.state.may_unload:
            return False
        self.loader.unload(model)
        return True

    def describe(self, model: ServedModel, reader: Reader = None) -> dict[str, object]:
        """Describes a model for the operator and the dashboard.

        `num_bytes` are those of weights, KV cache and recurrent states, 0 if they are not known. `unload_in_seconds` is None for a model
        that is in use, stays loaded, or is not loaded. A tenant sees only its own requests among those that run and wait.
        """
        uses, ready = self.loader.uses(model), model.engine.ready
        stats = model.engine.stats() if ready else Stats()
        running, waiting = stats.running, stats.waiting + stats.swapped
        seconds = self.loader.seconds_until_unload(model) if ready else math.inf
        if reader is not None:
            usage, seconds = stats.tenants.get(reader, {}), math.inf
            running, waiting = int(usage.get("running", 0)), int(usage.get("waiting", 0))
            uses = running + waiting
        return {
            "name": model.name,
            "aliases": list(model.aliases),
            "status": model.status,
            "requests": uses,
            "running": running,
            "waiting": waiting if ready else uses,
            "num_bytes": self.loader.num_bytes(model),
            "unload_in_seconds": None if math.isinf(seconds) else round(max(0.0, seconds), 1),
        }

    def check_admission(self) -> None:
        """Raises ApiError 503 if no model serves or holds new requests."""
        if not any(model.lifecycle.accepts for model in self.models):
            raise self.default.lifecycle.refusal()

    def count_rejected(self, reason: str, model: ServedModel | None = None) -> None:
        """Counts a rejected request, one whose model is not known yet for the first model."""
        (model or self.default).metrics.count_rejected(reason)

    def explaining(self, group: str | None) -> asyncio.Lock:
        """Returns what a group, or the operator, holds while a request is explained: those of a group are explained one after the other.

        Each of them may have a thousand sequences, which take time of the engine.
        """
        return self._explaining.setdefault(group, asyncio.Lock())

    async def explain(self, reader: Reader, name: str) -> tuple[str, list[Timeline], ServedModel]:
        """Returns the answer's id, the timelines of a request's sequences, none if the request is unknown, and its model.

        Raises ApiError 503 while there is no engine.
        """
        answer_id, ids = self.registry.resolve(reader, name)
        available = [model for model in self.models if model.lifecycle.engine_available]
        if not available and not any(model.lifecycle.state is ModelState.UNLOADED for model in self.models):
            raise self.default.lifecycle.refusal()
        for model in available:
            if timelines := [timeline for engine_id in ids for timeline in await model.engine.explain(engine_id)]:
                return answer_id, timelines, model
        return answer_id, [], self.default

    @contextmanager
    def track_open(self) -> Iterator[None]:
        """Counts a request as open for the duration of the block."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def end_session(self, tenant: str, name: str) -> None:
        """Ends a session of a tenant; a session that is not known has no effect."""
        self.turns.end_thread(tenant, name)
        for model in self.models:
            model.engine.tell(NoteSession(tenant, name, "ended"))

    def _bill(self, served: ServedSequence) -> None:
        """Records what a live sequence has held, from one token for a second on: a search drops thousands of sequences at once."""
        held = served.sequence.idle_token_seconds
        if self.usage_log is not None and held >= 1:
            labels = UsageLabels.of(served.id, "", served.model.name, served.sequence.scheduling, 0)
            self.usage_log.write_held(labels, held, time.monotonic() - served.opened)

    def _busiest_stats(self) -> Stats:
        """Returns the newest counters of the engine with the longest expected wait."""
        return max((model.engine.stats() for model in self.models), key=lambda stats: stats.predicted_wait_us)


def service_of(request: Request) -> Service:
    """Returns the service that handles `request`."""
    service: Service = request.app.state.service
    return service
