"""What the gate asks an upstream at its start."""

import asyncio

from aiohttp import web

from chairlift.gate.upstream import Upstream


def test_limits_are_found_on_pages_that_come_in_parts():
    async def metrics(request):
        page = web.StreamResponse()
        await page.prepare(request)
        for part in ("# HELP other\n" * 10_000, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'):
            await page.write(part.encode())
            await asyncio.sleep(0.01)
        return page

    async def main():
        app = web.Application()
        app.router.add_get("/metrics", metrics)
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
