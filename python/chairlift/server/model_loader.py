"""Loads and unloads models as the load policy decides, and lets requests wait for a model that is being loaded."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from chairlift.engine.background import cancel
from chairlift.server.engine_keeper import EngineKeeper
from chairlift.server.errors import ApiError, unavailable
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.load_policy import Action, LoadPolicy, Stage
from chairlift.server.model import ServedModel

logger = logging.getLogger(__name__)


class ModelLoader:
    """The owner of which models are loaded. All methods run in one event loop."""

    def __init__(self, models: Iterable[ServedModel], policy: LoadPolicy | None = None) -> None:
        """No model is loaded. Without `policy` any number of them may be."""
        self._policy = LoadPolicy() if policy is None else policy
        self._models = {model.name: model for model in models}
        self._keepers = {name: EngineKeeper(model, self._crash) for name, model in self._models.items()}
        for name, model in self._models.items():
            keep_alive = math.inf if model.keep_alive is None else model.keep_alive
            self._policy.add(name, keep_alive=keep_alive, priority=model.priority, num_bytes=model.num_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._crashed: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._closed = False

    def started(self, model: ServedModel) -> None:
        """Takes over a model whose engine has been started."""
        self._keepers[model.name].watch()
        seconds = model.lifecycle.start_seconds or 0.0
        self._loaded(model, time.monotonic(), seconds)

    def serve_started(self, model: ServedModel) -> None:
        """Takes over a model whose engine somebody else keeps."""
        model.lifecycle.ready()
        self._policy.loaded(model.name, time.monotonic(), 0.0)

    def load(self, model: ServedModel) -> None:
        """Begins to load a model as soon as there is room."""
        self._policy.want(model.name)
        self._advance()

    def unload(self, model: ServedModel) -> None:
        """Unloads a model as soon as no request needs it. The next request loads it again."""
        self._policy.stop(model.name)
        self._advance()

    def keeper(self, model: ServedModel) -> EngineKeeper:
        """The owner of a model's engines."""
        return self._keepers[model.name]

    def uses(self, model: ServedModel) -> int:
        """Requests that need the model."""
        return self._policy.uses(model.name)

    def num_bytes(self, model: ServedModel) -> int:
        """Bytes of the model's weights and KV cache, as far as they are known; 0 if not."""
        return self._policy.num_bytes(model.name)

    def seconds_until_unload(self, model: ServedModel) -> float:
        """Seconds until an idle model is unloaded; infinite if it stays, or is in use."""
        return self._policy.expires_at(model.name) - time.monotonic()

    async def acquire(self, model: ServedModel, keep_alive: float | None = None) -> Callable[[], None]:
        """Waits until the model is loaded. Returns what ends this use of it, to be called once; until then the model stays loaded.

        `keep_alive` is the client's, in seconds; it has no effect on a model that stays loaded anyway. Raises ApiError 503 if the model
        cannot be loaded, or not in time.
        """
        name, lifecycle, now = model.name, model.lifecycle, time.monotonic()
        if self._policy.stage(name) is Stage.UNLOADED and (seconds := self._policy.retry_in(name, now)):
            raise _load_failure(name, seconds)
        lifecycle.check_admission()
        request: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keep_alive = None if model.keep_alive is None else keep_alive
        if self._policy.arrive(name, request, now, keep_alive):
            return partial(self._release, name)
        self._advance()
        self._waiting.add(request)
        try:
            async with asyncio.timeout(lifecycle.hold_seconds):
                await request
        except BaseException as error:
            self._policy.give_up(name, request)
            if request.done() and not request.cancelled() and request.exception() is None:
                self._release(name)  # it was let in, and ended at the same moment
            self._advance()
            if isinstance(error, TimeoutError):
                raise _loads_too_long(name, lifecycle) from None
            raise
        finally:
            self._waiting.discard(request)
        return partial(self._release, name)

    async def crashed(self) -> None:
        """Waits for a failure of the server's own code that keeps engines running, and raises it."""
        self._crashed = asyncio.get_running_loop().create_future()
        if self._error is not None:
            raise self._error
        await self._crashed

    def drain(self, refusal: ApiError) -> None:
        """Loads and restarts nothing any more, and refuses the requests that wait for a model."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for keeper in self._keepers.values():
            keeper.unwatch()
        for request in self._waiting:
            if not request.done():
                request.set_exception(refusal)

    async def close(self) -> None:
        """Closes all engines; nothing is loaded any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await cancel(self._tasks)
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def _advance(self) -> None:
        """Does what the policy decides."""
        if self._closed:
            return
        now = time.monotonic()
        for action in self._policy.decide(now):
            self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._policy.wake_at(now)) < math.inf:
            self._timer = asyncio.get_running_loop().call_later(at - now, self._advance)

    def _do(self, action: Action) -> None:
        model = self._models[action.model]
        if action.kind == "load":
            if model.lifecycle.state is not ModelState.STARTING:
                model.lifecycle.loading()
            self._start(self._load(model))
        elif action.kind == "unload":
            model.lifecycle.unloaded()
            self._start(self._unload(model))
        else:
            for request in action.admitted:
                assert isinstance(request, asyncio.Future)
                if request.done():
                    self._release(model.name)  # it was cancelled meanwhile
                else:
                    request.set_result(None)

    async def _load(self, model: ServedModel) -> None:
        began = time.monotonic()
        logger.info("loading %s", model.name)
        try:
            await self._keepers[model.name].start()
        except Exception as error:
            if self._closed:
                return  # the server has ended the engine
            logger.error("%s could not be loaded: %s: %s", model.name, type(error).__name__, error)
            now = time.monotonic()
            model.lifecycle.load_failed()
            for request in self._policy.load_failed(model.name, now):
                assert isinstance(request, asyncio.Future)
                if not request.done():
                    request.set_exception(_load_failure(model.name, self._policy.retry_in(model.name, now)))
        else:
            now = time.monotonic()
            self._loaded(model, now, now - began)
        self._advance()

    def _loaded(self, model: ServedModel, now: float, seconds: float) -> None:
        info = model.engine.info
        self._policy.loaded(model.name, now, seconds, info.num_bytes, info.shared_bytes)

    async def _unload(self, model: ServedModel) -> None:
        logger.info("unloading %s", model.name)
        await self._keepers[model.name].stop()
        self._policy.unloaded(model.name)
        self._advance()

    def _release(self, name: str) -> None:
        self._policy.release(name, time.monotonic())
        self._advance()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        self._error = error
        if self._crashed is not None and not self._crashed.done():
            self._crashed.set_exception(error)


def _load_failure(name: str, seconds: float) -> ApiError:
    message = f"the model {name} could not be loaded; the server's log has the reason"
    return unavailable(message, "model_load_failed", seconds)


def _loads_too_long(name: str, lifecycle: Lifecycle) -> ApiError:
    message = f"the model {name} was not loaded in time: try again later"
    return unavailable(message, "not_ready", lifecycle.seconds_until_ready, admitted=True)
