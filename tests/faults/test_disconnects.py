"""Clients that leave, at any time and in any way: nothing of them stays."""

import asyncio
import contextlib
import os
import random
import socket
import struct

import pytest
from served import request, served, until

pytestmark = pytest.mark.slow

DISCONNECTS = int(os.environ.get("DISCONNECTS", 1000))
"""How many leave; `make disconnects` sends ten thousand."""
AT_ONCE = 64

# A client that resets its connection instead of closing it.
RESET = struct.pack("ii", 1, 0)

TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}


def wanted(dice: random.Random) -> tuple[str, dict[str, object]]:
    """A request of any kind: its path and its body."""
    text = "word " * dice.choice((1, 1, 1, 300))
    body: dict[str, object] = {"stream": dice.random() < 0.6, "temperature": 0}
    longest = {"max_tokens": dice.choice((1, 5, 50, 400))}
    if dice.random() < 0.1:
        body["deadline_ms"] = 5
    messages = [{"role": "user", "content": text}]
    match dice.randrange(20):
        case 0 | 1 | 2 | 3 | 4:
            return "/v1/completions", body | longest | {"prompt": [text] * dice.choice((1, 1, 3)), "n": dice.choice((1, 1, 2))}
        case 5 | 6 | 7 | 8 | 9:
            return "/v1/chat/completions", body | longest | {"messages": messages, "n": dice.choice((1, 1, 2))}
        case 10 | 11:
            return "/v1/chat/completions", body | longest | {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        case 12 | 13:
            tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
            return "/v1/messages", body | longest | {"messages": messages, "tools": [tool] * dice.choice((0, 1))}
        case 14 | 15:
            return "/v1/responses", body | {"input": text, "max_output_tokens": longest["max_tokens"]}
        case 16:  # its draws are kept until all have ended
            return "/v1/completions", body | longest | {"prompt": text, "stream": False, "best_of": 3}
        case 17:  # a grammar that has to be compiled, or that somebody else waits for
            return "/v1/completions", body | longest | {"prompt": text, "guided_regex": f"[ab]{{{dice.randrange(1, 100)}}}"}
        case 18:  # a text whose tokens take a while to find
            return "/v1/completions", body | longest | {"prompt": "many words " * 1000}
    return "/tokenize", {"prompt": "many words " * 3000}


async def leave(port: int, dice: random.Random) -> None:
    """Asks for something, or begins to, and leaves at some point."""
    data = request(port, *wanted(dice))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        match dice.randrange(6):
            case 0:  # in the middle of the request, head or body
                writer.write(data[: dice.randrange(len(data))])
            case 1:  # as soon as it is sent
                writer.write(data)
            case 2:  # a moment later: it waits, or its prompt is under way
                writer.write(data)
                await asyncio.sleep(dice.random() * 0.02)
            case 3 | 4:  # in the middle of the answer
                writer.write(data)
                await reader.read(dice.choice((1, 200, 3000)))
            case 5:  # half of the connection, and the rest a little later
                writer.write(data)
                writer.write_eof()
                await asyncio.sleep(dice.random() * 0.01)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        if dice.random() < 0.3:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()


@pytest.mark.timeout(1200)  # on a machine that does other things too
def test_nothing_stays_of_thousands_of_clients_that_left():
    dice = random.Random(20)

    async def storm(port: int, count: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                with contextlib.suppress(ConnectionError):
                    await leave(port, random.Random(dice.random()))

        await asyncio.gather(*(one() for _ in range(count)))

    with served("--max-num-seqs", "8", "--max-num-batched-tokens", "64") as server:
        golden, before = server.answer(), server.state()
        assert before["http"] == {"open": 0, "waiting": 0}
        asyncio.run(storm(server.port, DISCONNECTS // 4))  # caches and pools have their size now
        until(lambda: server.state() == before)
        memory = server.memory()
        asyncio.run(storm(server.port, DISCONNECTS - DISCONNECTS // 4))
        until(lambda: server.state() == before)
        assert server.answer() == golden
        assert server.log() == ""  # that somebody left is no news
        assert all(now < memory[process] + 50 for process, now in server.memory().items()), (memory, server.memory())
