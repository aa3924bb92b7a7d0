"""One served model: its engine, its names, its settings and its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from chairlift.chat.model import ChatModel
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.observability.metrics import Metrics
from chairlift.server.tokenizing import Tokenizing

if TYPE_CHECKING:
    from chairlift.engine.replicated_engine import ReplicatedEngine

_STATUS = {
    **dict.fromkeys((ModelState.READY, ModelState.DRAINING), "loaded"),
    **dict.fromkeys((ModelState.STARTING, ModelState.LOADING, ModelState.RESTARTING), "loading"),
    **dict.fromkeys((ModelState.FAILED, ModelState.LOAD_FAILED), "failed"),
    ModelState.UNLOADED: "not loaded",
}


@dataclass(slots=True)
class ServedModel:
    """One model and the engines that run it."""

    name: str
    engine: ReplicatedEngine
    aliases: tuple[str, ...] = ()
    """More names that clients may use."""
    tool_call_parser: str = "auto"
    """Name of a tool-call parser, or `auto` to choose one by the chat template."""
    reasoning_parser: str = "auto"
    """Name of a reasoning format, `auto` to choose one by the chat template, or `none`."""
    resume: str = "exact"
    """Which engines may go on with the answers of one that ended: see `--resume`."""
    keep_alive: float | None = None
    """Seconds that the model stays loaded after its last use; None: for ever, whatever clients ask for."""
    priority: int = 0
    """The model with the lowest number is loaded first and unloaded last."""
    num_bytes: int = 0
    """Bytes of weights and KV cache, as far as that is known before the model is loaded."""
    checkpoint: CheckpointInfo = field(default_factory=CheckpointInfo)
    """What is known of the checkpoint before the model is loaded."""
    metrics_alias: bool = False
    """Whether metrics are also shown under vLLM's names."""
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    """Tokenizes what requests send; one for all models of a server."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    """Whether requests are served, held or refused."""
    probation: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request that runs although it may be the cause of the engine's deaths."""
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        """Connects the engine with the state and the metrics."""
        engine, lifecycle = self.engine, self.lifecycle
        engine.on_end = lambda: lifecycle.engine_ended(serving=engine.ready)
        self.metrics = Metrics(self.name, lambda: engine.replicas, alias=self.metrics_alias)
        engine.new_counters = self.metrics.new_counters

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (self.name, *self.aliases)

    @property
    def chat_model(self) -> ChatModel:
        """How the model writes conversations. Raises EngineDead before the first start is complete."""
        return ChatModel(self.engine.tokenizer, self.engine.info.vocab_size, self.tool_call_parser, self.reasoning_parser)

    @property
    def status(self) -> str:
        """The state in the words of /v1/models: loaded, loading, not loaded or failed."""
        return _STATUS[self.lifecycle.state]

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling parameters for requests that do not set them."""
        settings: Mapping[str, Any] = self.engine.info.default_sampling
        return settings

    def adapter(self, name: str | None) -> str | None:
        """Returns `name` if a LoRA adapter of this model has it, else None."""
        return name if name in self.engine.adapters and name not in self.names else None

    def resumes(self, fingerprint: object) -> bool:
        """Whether another engine may go on with an answer of an engine with this fingerprint."""
        return self.resume == "any" or (self.resume == "exact" and fingerprint is not None)

    def tasks(self) -> list[str]:
        """What the loaded model does: `generate`, `embed`, or both; or `score`."""
        info = self.engine.info
        if info.score is not None:
            return ["score"]
        return ["generate"] * info.generates + ["embed"] * (info.max_text_len is not None)

    async def encode(self, request: Request, text: str, *, must_fit: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; raises InvalidRequest. With `must_fit` a text that exceeds the context is not tokenized."""
        tokenizer, limit = self.engine.tokenizer, self.engine.info.max_model_len
        group = request.state.ticket.tenant.group
        encoded = await self.tokenizing.encode(group, tokenizer, [text], limit, must_fit=must_fit, add_special_tokens=add_special_tokens)
        return encoded[0]

    async def render(
        self,
        request: Request,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        must_fit: bool = True,
        kept: bool = True,
    ) -> list[int]:
        """Applies the chat template and returns the prompt's tokens; raises InvalidRequest. See `encode` and `Tokenizing.chat`."""
        limit, group = self.engine.info.max_model_len, request.state.ticket.tenant.group
        return await self.tokenizing.chat(group, self.engine.tokenizer, conversation, variables, limit, must_fit=must_fit, kept=kept)


def model_of(request: Request) -> ServedModel:
    """Returns the model that `Service.use` chose for the request."""
    model: ServedModel = request.state.model
    return model
