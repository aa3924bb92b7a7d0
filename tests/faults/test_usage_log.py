"""The usage log of a whole server: its records sum to the engine's totals, and none is lost when the server is killed."""

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest
from served import served, until

TENANTS = ("alice", "bob")
KEYS = ",".join(f"{tenant}=key-{tenant}" for tenant in TENANTS)


def records(directory):
    return [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]


async def mixed(port, count):
    """Requests of all kinds: several answers, ranked ones, stop strings, streams, clients that leave."""
    randomness = random.Random(1)

    async def ask(http, number):
        tenant = TENANTS[number % 2]
        body = {"prompt": [randomness.randrange(1, 200) for _ in range(randomness.randrange(1, 60))], "max_tokens": 20}
        body |= randomness.choice([{}, {"n": 3}, {"n": 1, "best_of": 3}, {"stop": ["a", "e"]}, {"service_tier": "flex"}])
        headers = {"authorization": f"Bearer key-{tenant}"}
        if number % 5:
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            return
        body = {"prompt": body["prompt"], "max_tokens": 400, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            async for _ in reply.aiter_lines():
                break

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
        await asyncio.gather(*(ask(http, number) for number in range(count)))


def test_the_records_sum_to_the_engines_totals(tmp_path):
    logs = tmp_path / "logs"
    flags = ["--num-kv-blocks", "40", "--max-model-len", "512", "--max-num-seqs", "12"]
    with served("--usage-log", str(logs), "--api-key", KEYS, *flags) as server:
        asyncio.run(mixed(server.port, 100))
        until(lambda: server.admin_state()["running"] == server.admin_state()["waiting"] == 0 and len(records(logs)) == 100)
        totals = server.admin_state()["tenants"]
    summed = {tenant: Counter() for tenant in TENANTS}
    for record in records(logs):
        summed[record["tenant"]].update({name: record[name] for name in NAMES})
    for tenant in TENANTS:
        assert summed[tenant]["preemptions"] > 0, "the pool is too large for this test"
        for name in NAMES:
            key, unit = UNITS.get(name, (name, 1))
            total = totals[tenant][key] / unit
            assert abs(summed[tenant][name] - total) < 1e-3, (tenant, name)


NAMES = ("cached_tokens", "output_tokens", "computed_tokens", "preemptions", "block_seconds", "compute_seconds")
UNITS = {"block_seconds": ("block_us", 1e6), "compute_seconds": ("compute_ns", 1e9)}


@pytest.mark.slow
def test_every_answered_request_has_a_record_after_the_server_is_killed(tmp_path):
    answered = []

    async def ask(http):
        while True:
            try:
                reply = await http.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 3, "stop": ["q"]})
            except httpx.TransportError:
                return
            answered.append(reply.json()["id"])
            if len(answered) == 300:
                server.process.kill()

    async def ask_until_killed():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=None) as http:
            await asyncio.gather(*(ask(http) for _ in range(16)))

    logs = tmp_path / "logs"
    with served("--usage-log", str(logs)) as server:
        asyncio.run(ask_until_killed())
    assert len(answered) >= 300
    assert set(answered) <= {record["id"] for record in records(logs)}
