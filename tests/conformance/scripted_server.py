"""Chairlift's server around a fake engine, for agents: it answers what the conversation last told it to say.

The answer is the text between the last `SAY:` of the prompt and the `|` after it. A tool's result may have the next one. There is no API
key, because clients of Ollama send none.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from fake_async_engine import FakeEngine, serving

CONTEXT = 400_000
"""Tokens, which are bytes here: enough for an agent's prompt of 100 kB."""


class ScriptedEngine(FakeEngine):
    """Says what it is told to say, `ok` by default, whatever else a prompt has in it."""

    def __init__(self):
        super().__init__()
        self.describe(max_model_len=CONTEXT)

    async def run(self, stream, **arguments):
        _, told, said = bytes(stream.prompt).decode().rpartition("SAY:")
        stream.prompt = list(f"SAY:{said.partition('|')[0] if told else 'ok'}".encode())
        async for output in super().run(stream, **arguments):
            yield output


with serving(ScriptedEngine(), max_body_size=16 << 20) as (base, _):
    print(f"listening on {base}/v1", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
