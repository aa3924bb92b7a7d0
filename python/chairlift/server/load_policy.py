"""Decides which of several models are loaded, which is loaded next, and which is unloaded for it. Without clock, tasks or engines."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

MAX_WAIT = 10.0
"""Seconds that requests wait for a model while other models are busy. Then no new request of those others begins until there is room."""

FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
"""Seconds after a failed load until the next attempt: the first, doubled by each failure in a row, up to the longest."""


class Stage(Enum):
    """Whether a model is loaded."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    """Loaded. New requests wait, because a model that waited too long gets its room as soon as the running ones end."""
    UNLOADING = "unloading"


class Action(NamedTuple):
    """What the owner of the policy must do now: load or unload a model, or let the waiting requests `admitted` begin."""

    kind: Literal["load", "unload", "admit"]
    model: str
    admitted: tuple[Hashable, ...] = ()


@dataclass(slots=True)
class _Model:
    keep_alive: float
    priority: int
    num_bytes: int
    current_keep_alive: float
    shared_bytes: int = 0
    """The part of `num_bytes` that all loaded models use together."""
    stage: Stage = Stage.UNLOADED
    uses: int = 0
    """Requests that need the model."""
    waiting: dict[Hashable, float] = field(default_factory=dict)
    """Requests that wait for the model, with their time of arrival, oldest first."""
    used_at: float = -math.inf
    load_seconds: float = 0.0
    """Duration of the last load."""
    failures: int = 0
    """Failed loads in a row."""
    retry_at: float = -math.inf
    wanted: bool = False
    """Whether the model is to be loaded without a request."""

    @property
    def oldest(self) -> float:
        return next(iter(self.waiting.values()), math.inf)

    @property
    def idle(self) -> bool:
        return not self.uses and not self.waiting

    @property
    def reload_cost(self) -> tuple[int, int, float]:
        """Orders idle models: the least important first, then the quickest to reload, then the longest unused."""
        return -self.priority, round(self.load_seconds), self.used_at


class LoadPolicy:
    """The state of all models. Times are seconds of one clock.

    Requests of loaded models begin at once, so that "A B A A C" is served as A, A, A, B, C by a server with room for one model. A model
    that is in use is never unloaded. After MAX_WAIT no new request of the models in its way begins, so every model gets its turn.
    """

    def __init__(self, max_loaded: int | None = None, max_bytes: int | None = None) -> None:
        """At most `max_loaded` models with `max_bytes` in all are loaded. A larger model may be loaded alone."""
        self._max_loaded = math.inf if max_loaded is None else max_loaded
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._models: dict[str, _Model] = {}

    def add(self, name: str, *, keep_alive: float = math.inf, priority: int = 0, num_bytes: int = 0) -> None:
        """Adds a model, which is unloaded. It stays loaded for `keep_alive` seconds after its last use."""
        self._models[name] = _Model(keep_alive, priority, num_bytes, keep_alive)

    def stage(self, name: str) -> Stage:
        """Whether the model is loaded."""
        return self._models[name].stage

    def uses(self, name: str) -> int:
        """Requests that need the model, those that wait for it included."""
        return self._models[name].uses + len(self._models[name].waiting)

    def num_bytes(self, name: str) -> int:
        """The memory of the model, as added or measured."""
        return self._models[name].num_bytes

    def expires_at(self, name: str) -> float:
        """When the model is unloaded if no request comes; infinite if it stays, or is in use."""
        model = self._models[name]
        return math.inf if model.uses or model.waiting else model.used_at + model.current_keep_alive

    def retry_in(self, name: str, now: float) -> float:
        """Seconds until a model that could not be loaded is tried again; 0 if nothing is in the way."""
        return max(0.0, self._models[name].retry_at - now)

    def want(self, name: str) -> None:
        """Asks for the model to be loaded without a request."""
        model = self._models[name]
        model.wanted, model.current_keep_alive = model.stage is Stage.UNLOADED, model.keep_alive

    def stop(self, name: str) -> None:
        """Asks for the model to be unloaded as soon as no request needs it. A new request cancels that."""
        self._models[name].wanted = False
        self._models[name].current_keep_alive = -math.inf

    def arrive(self, name: str, request: Hashable, now: float, keep_alive: float | None = None) -> bool:
        """Called for a request of the model. Returns whether it begins now: else it waits for an `admit`, or gives up.

        `keep_alive` replaces the model's own until the next request.
        """
        model = self._models[name]
        model.current_keep_alive = model.keep_alive if keep_alive is None else keep_alive
        if model.stage is Stage.LOADED:
            model.uses += 1
            return True
        model.waiting[request] = now
        return False

    def give_up(self, name: str, request: Hashable) -> None:
        """Called for a request that waits no longer."""
        self._models[name].waiting.pop(request, None)

    def release(self, name: str, now: float) -> None:
        """Called when a use has ended."""
        model = self._models[name]
        model.uses -= 1
        model.used_at = now

    def loaded(self, name: str, now: float, seconds: float, num_bytes: int | None = None, shared_bytes: int = 0) -> None:
        """Called when the model is ready, after `seconds`, and takes `num_bytes`; None if that is not known.

        `shared_bytes` of them are shared: all loaded models together take as many as the model with the most of them.
        """
        model = self._models[name]
        model.stage, model.used_at, model.load_seconds = Stage.LOADED, now, seconds
        model.failures, model.retry_at, model.wanted = 0, -math.inf, False
        if num_bytes is not None:
            model.num_bytes, model.shared_bytes = num_bytes, shared_bytes

    def load_failed(self, name: str, now: float) -> tuple[Hashable, ...]:
        """Called when a load failed. Returns the requests that waited for it, which are forgotten."""
        model = self._models[name]
        waited, model.waiting = tuple(model.waiting), {}
        model.stage, model.wanted = Stage.UNLOADED, False
        model.retry_at = now + min(FIRST_RETRY * 2**model.failures, LONGEST_RETRY)
        model.failures += 1
        return waited

    def unloaded(self, name: str) -> None:
        """Called when the model's memory is free."""
        self._models[name].stage = Stage.UNLOADED

    def decide(self, now: float) -> list[Action]:
        """Returns what to do now and takes it as begun. Called after every change, and at `wake_at`."""
        actions: list[Action] = []
        self._admit(actions)  # a model that has just been loaded serves those who waited for it
        for model in self._in_stage(Stage.DRAINING):
            model.stage = Stage.LOADED  # unless a model still waits for its room
        draining = self._make_room(now, actions)
        for name in draining:
            self._models[name].stage = Stage.DRAINING
        self._admit(actions)
        idle = sorted((model.reload_cost, name) for name, model in self._models.items() if model.stage is Stage.LOADED and model.idle)
        for _, name in idle:
            model = self._models[name]
            kept = [one for one in self._occupying() if one.stage is not Stage.UNLOADING]
            too_much = len(kept) > 1 and _total_bytes(kept) > self._max_bytes
            if too_much or now >= model.used_at + model.current_keep_alive:
                self._unload(name, actions)
        return actions

    def wake_at(self, now: float) -> float:
        """When `decide`, which was called at `now`, may have something to do although nothing has changed; infinite if never."""
        expiries = [self.expires_at(name) for name, model in self._models.items() if model.stage is Stage.LOADED]
        overdue = [model.oldest + MAX_WAIT for model in self._in_stage(Stage.UNLOADED)]
        return min((at for at in (*expiries, *overdue) if at > now), default=math.inf)

    def _admit(self, actions: list[Action]) -> None:
        """Lets requests of loaded models begin."""
        for name, model in self._models.items():
            if model.stage is Stage.LOADED and model.waiting:
                actions.append(Action("admit", name, tuple(model.waiting)))
                model.uses += len(model.waiting)
                model.waiting = {}

    def _make_room(self, now: float, actions: list[Action]) -> set[str]:
        """Loads the models that are asked for where there is room, else unloads idle ones. Returns models to drain."""
        asked = [(name, model) for name, model in self._models.items() if model.stage is Stage.UNLOADED and (model.waiting or model.wanted)]
        overdue_names = {name for name, model in asked if now >= model.oldest + MAX_WAIT}
        asked.sort(key=lambda one: (0, 0, one[1].oldest) if one[0] in overdue_names else (1, one[1].priority, one[1].oldest))
        for name, model in asked:
            if self._fits(model, self._occupying()):
                model.stage = Stage.LOADING
                actions.append(Action("load", name))
                continue
            overdue = name in overdue_names
            victims = self._victims(model, idle_only=not overdue)
            for victim in victims:
                if not self._models[victim].uses:
                    self._unload(victim, actions)
            if victims or overdue:
                # Nothing else gets the room that is being made.
                return {victim for victim in victims if self._models[victim].stage is Stage.LOADED}
        return set()

    def _victims(self, model: _Model, *, idle_only: bool) -> list[str]:
        """Returns the loaded models whose room the model needs beside what is being freed; none if that would not suffice.

        Idle ones go first, by the cost of loading them again.
        """
        kept = [other for other in self._occupying() if other.stage is not Stage.UNLOADING]
        candidates = [(name, one) for name, one in self._models.items() if one.stage is Stage.LOADED and (one.idle or not idle_only)]
        candidates.sort(key=lambda one: (not one[1].idle, *one[1].reload_cost))
        victims: list[str] = []
        for name, victim in candidates:
            if self._fits(model, kept):
                break
            kept.remove(victim)
            victims.append(name)
        return victims if self._fits(model, kept) else []

    def _fits(self, model: _Model, beside: list[_Model]) -> bool:
        if not beside:
            return True
        return len(beside) < self._max_loaded and _total_bytes([model, *beside]) <= self._max_bytes

    def _occupying(self) -> list[_Model]:
        return [model for model in self._models.values() if model.stage is not Stage.UNLOADED]

    def _in_stage(self, stage: Stage) -> list[_Model]:
        return [model for model in self._models.values() if model.stage is stage]

    def _unload(self, name: str, actions: list[Action]) -> None:
        self._models[name].stage = Stage.UNLOADING
        actions.append(Action("unload", name))


def _total_bytes(models: list[_Model]) -> int:
    """The memory of loaded models: each one's own, and what they share once."""
    return sum(one.num_bytes - one.shared_bytes for one in models) + max((one.shared_bytes for one in models), default=0)
