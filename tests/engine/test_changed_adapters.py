"""Adapters of several engines that are changed while some of them restart or refuse, and engines that are closed while they start."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from chairlift import AsyncEngine, SamplingParams, Scheduling
from chairlift.config import EngineConfig
from chairlift.engine import client
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_process import Client, EngineProcess
from chairlift.engine.frames import AdapterChanged, Frame, Load, LoadAdapter, Ready, StepOutputs, UnloadAdapter
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.errors import EngineClosed, InvalidRequest, InvalidSetting


class AdapterProcess(EngineProcess):
    """An engine without a process, which has adapters and no model. It refuses to load `/bad`."""

    def __init__(self) -> None:
        super().__init__("none", exclusive=True)
        self.loaded: dict[str, str] = {}
        self.used: set[str] = set()
        self.attaching = asyncio.Event()
        self.attaching.set()
        self.client: Client | None = None
        self.before: Callable[[Frame], Awaitable[None]] | None = None
        """Called before a frame is handled."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stuck(self) -> None:
        """It never is."""

    async def attach(self, client: Client) -> int:
        self.client, self.loaded = client, {}
        await self.attaching.wait()
        return 0

    def write(self, number: int, frame: Frame) -> None:
        self._tasks.add(asyncio.create_task(self._handle(frame)))

    async def close(self) -> None:
        if self.client is not None:
            self.client.on_death(EngineClosed("the engine was closed"))
        self.client = None

    async def _handle(self, frame: Frame) -> None:
        if self.before is not None:
            await self.before(frame)
        for answer in self._answers(frame):
            if self.client is not None:
                self.client.on_frame(answer)

    def _answers(self, frame: Frame) -> list[Frame]:
        match frame:
            case Load():
                return [Ready(EngineInfo(model="a model", vocab_size=9, max_model_len=99).pack()), StepOutputs()]
            case LoadAdapter(ask, name, path):
                if name in self.loaded or path == "/bad":
                    return [AdapterChanged(ask, "InvalidRequest" if name in self.loaded else "InvalidSetting", f"{name} is refused")]
                self.loaded[name] = path
                return [AdapterChanged(ask)]
            case UnloadAdapter(ask, name):
                if name in self.used:
                    return [AdapterChanged(ask, "InvalidRequest", f"{name} is used")]
                if self.loaded.pop(name, None) is None:
                    return [AdapterChanged(ask, "InvalidRequest", f"{name} is unknown", "adapter_not_found")]
                return [AdapterChanged(ask)]
        return []


def run(model: Path, test: Callable[[ReplicatedEngine, AdapterProcess, AdapterProcess], Awaitable[None]]) -> None:
    """Runs a test with two engines that are ready, and their processes."""

    async def main() -> None:
        first, second = AdapterProcess(), AdapterProcess()
        engine = ReplicatedEngine(EngineConfig(model=str(model), enable_lora=True), [first, second])
        for replica in engine.replicas:
            await replica.start()
        await test(engine, first, second)
        await engine.close()

    asyncio.run(main())


def test_an_adapter_that_one_engine_still_uses_can_be_unloaded_later(byte_model: Path) -> None:
    async def test(engine: ReplicatedEngine, first: AdapterProcess, second: AdapterProcess) -> None:
        for busy, other in ((first, second), (second, first)):
            await engine.load_lora_adapter("x", "/x")
            busy.used = {"x"}
            with pytest.raises(InvalidRequest, match="x is used"):
                await engine.unload_lora_adapter("x")
            assert (engine.adapters, busy.loaded, other.loaded) == ({"x": "/x"}, {"x": "/x"}, {})
            busy.used = set()
            await engine.unload_lora_adapter("x")
            assert engine.adapters == first.loaded == second.loaded == {}
        with pytest.raises(InvalidRequest, match="x is unknown"):
            await engine.unload_lora_adapter("x")

    run(byte_model, test)


def test_an_adapter_that_one_engine_refuses_is_in_none_and_the_first_error_is_raised(byte_model: Path) -> None:
    async def test(engine: ReplicatedEngine, first: AdapterProcess, second: AdapterProcess) -> None:
        second.loaded, first.used = {"x": "/other"}, {"x"}
        with pytest.raises(InvalidRequest, match="x is refused"):
            await engine.load_lora_adapter("x", "/x")
        assert engine.adapters == first.loaded == {"x": "/x"}, "used already"
        first.used = set()
        await engine.unload_lora_adapter("x")
        second.loaded = {"x": "/other"}
        with pytest.raises(InvalidRequest, match="x is refused"):
            await engine.load_lora_adapter("x", "/x")
        assert engine.adapters == first.loaded == second.loaded == {}
        with pytest.raises(InvalidSetting, match="y is refused"):
            await engine.load_lora_adapter("y", "/bad")

    run(byte_model, test)


def test_an_engine_that_restarts_meanwhile_has_the_adapters_of_the_others(byte_model: Path) -> None:
    async def test(engine: ReplicatedEngine, first: AdapterProcess, second: AdapterProcess) -> None:
        for name in "bcd":
            await engine.load_lora_adapter(name, f"/{name}")
        changes = {
            "b": lambda: engine.unload_lora_adapter("c"),  # one that it has not loaded yet
            "d": lambda: engine.unload_lora_adapter("b"),  # one that it has
            "a": lambda: engine.load_lora_adapter("b", "/new"),
        }

        async def before(frame: Frame) -> None:
            if isinstance(frame, LoadAdapter) and (change := changes.pop(frame.name, None)):
                await change()
                if frame.name == "d":
                    await engine.load_lora_adapter("a", "/a")

        await engine.replicas[1].engine.close()
        second.before = before
        await engine.replicas[1].start()
        assert not changes
        assert engine.adapters == first.loaded == second.loaded == {"a": "/a", "b": "/new", "d": "/d"}

    run(byte_model, test)


def test_a_restarted_engine_serves_without_an_adapter_that_cannot_be_read_any_more(byte_model: Path) -> None:
    async def test(engine: ReplicatedEngine, first: AdapterProcess, second: AdapterProcess) -> None:
        await engine.load_lora_adapter("x", "/x")
        engine.adapters["y"] = "/bad"
        await engine.replicas[1].engine.close()
        await engine.replicas[1].start()
        assert engine.adapters == second.loaded == {"x": "/x"}

    run(byte_model, test)


def test_a_sequence_that_is_dropped_before_its_request_runs_leaves_no_home(byte_model: Path) -> None:
    async def test(engine: ReplicatedEngine, first: AdapterProcess, second: AdapterProcess) -> None:
        sequence = engine.hold([5, 6, 7], Scheduling())
        stream = await engine.prepare_tokens([5, 6, 7], SamplingParams(max_tokens=1), sequence=sequence)
        sequence.drop()
        engine.run(stream)
        assert engine._homes == {}  # noqa: SLF001

    run(byte_model, test)


@pytest.mark.parametrize("moment", ["attach", "locate", "load", "adapters", "tokenizer"])
def test_an_engine_that_is_closed_while_it_starts_stays_closed(byte_model: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    async def main() -> None:
        process = AdapterProcess()
        engine = AsyncEngine(EngineConfig(model=str(byte_model), enable_lora=True), process=process)
        engine.adapters["x"] = "/x"
        loop = asyncio.get_running_loop()

        async def before(frame: Frame) -> None:
            if isinstance(frame, {"load": Load, "adapters": LoadAdapter}.get(moment, ())):
                await engine.close()

        def close_first(function: Callable[..., object]) -> Callable[..., object]:
            def closing(*args: object) -> object:
                asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
                return function(*args)

            return closing

        process.before = before
        if moment == "locate":
            monkeypatch.setattr(client, "locate", close_first(client.locate))
        elif moment == "tokenizer":
            monkeypatch.setattr(engine, "_read_tokenizer", close_first(engine._read_tokenizer))  # noqa: SLF001
        elif moment == "attach":
            process.attaching.clear()
        starting = asyncio.create_task(engine.start())
        if moment == "attach":
            while process.client is None:
                await asyncio.sleep(0)
            await engine.close()
            process.attaching.set()
        with pytest.raises(EngineClosed):
            await starting
        assert (engine.alive, engine.ready, process.client) == (False, False, None)
        process.before = None
        monkeypatch.undo()
        await engine.start()
        assert process.loaded == {"x": "/x"}
        await engine.close()

    asyncio.run(main())
