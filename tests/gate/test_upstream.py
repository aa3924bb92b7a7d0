"""What the gate asks an upstream at its start, and the end of a connection."""

import asyncio
import gc
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import http_writer, web

from chairlift.cli import gate as command
from chairlift.config import EngineConfig
from chairlift.engine.estimated_engine import HEADROOM
from chairlift.errors import InvalidSetting
from chairlift.gate.limits import Limits
from chairlift.gate.upstream import Upstream, prepare_body
from chairlift.sim.devices import device
from chairlift.sim.steps import Load

PAGE = Path(__file__).parents[2] / "docs/gate.md"


def test_the_upstream_on_the_page_can_be_planned_for(tmp_path):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "upstream.json"
    file.write_text(text)
    profile = device(str(file))
    assert profile.step(Load(0, 1, 1000, 0)) == 20_000
    assert profile.step(Load(2048, 0, 0, 0)) == 430_000
    assert profile.sizes["num_kv_blocks"] == 4097


def test_limits_are_found_on_pages_that_come_in_parts():
    async def metrics(request):
        page = web.StreamResponse()
        await page.prepare(request)
        for part in ("# HELP other\n" * 10_000, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'):
            await page.write(part.encode())
            await asyncio.sleep(0.01)
        return page

    async def nested(request):
        return web.Response(text="[" * 100_000)

    async def main():
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/props", nested)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        upstream = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            return await upstream.limits_when_ready()
        finally:
            await upstream.close()
            await runner.cleanup()

    assert asyncio.run(main()).kv_tokens == 1600


def test_the_engine_gets_no_more_kv_than_there_is_memory_for(tmp_path):
    config = command._engine_config(EngineConfig(), [Limits(1 << 40), Limits(1600)], tmp_path)  # noqa: SLF001
    assert config.num_kv_blocks * config.block_size == HEADROOM * command.MAX_KV_TOKENS


def test_a_key_with_a_line_break_is_refused():
    with pytest.raises(InvalidSetting, match="--upstream-api-key must be one line"):
        Upstream("http://127.0.0.1:1", "sk-1\n")


def test_a_connection_that_fails_after_its_answer_is_no_error(caplog):
    async def main():
        closed = asyncio.get_running_loop().create_future()
        connection = SimpleNamespace(transport=None, protocol=SimpleNamespace(closed=closed))
        prepare_body(SimpleNamespace(connection=connection, content=SimpleNamespace(is_eof=lambda: True)))
        closed.set_exception(ConnectionResetError())
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("value", ["a\nb: c", "a\rb", "a\0b"])
def test_no_header_value_ends_the_head_of_a_request(value):
    with pytest.raises(ValueError, match="line break"):
        http_writer._serialize_headers("GET / HTTP/1.1", {"a": value})  # noqa: SLF001 (the gate replaces it)
