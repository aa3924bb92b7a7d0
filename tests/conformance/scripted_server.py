"""Chairlift's server around a fake engine with a prefix cache, for agents: it answers what the conversation last told it to say.

python scripted_server.py FILE. The answer is the text between the last `SAY:` of the prompt and the `|` after it. A tool's result may have
the next one. There is no API key, because clients of Ollama send none.

FILE gets a line of JSON for each request: the characters of its `prompt` and its `answer`, those of the prompt that it has `repeated` from
an earlier prompt and its answer, and those that were `found` in the prefix cache.
"""

import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from caching_engine import CachingEngine, shared
from fake_async_engine import serving

CONTEXT = 400_000
"""Tokens, which are bytes here: enough for an agent's prompt of 100 kB."""


class ScriptedEngine(CachingEngine):
    """Says what it is told to say, `ok` by default, whatever else a prompt has in it."""

    def __init__(self, log):
        super().__init__()
        self.describe(max_model_len=CONTEXT)
        self._log = log

    async def run(self, stream, **arguments):
        text = self._text(stream.prompt)
        earlier = [self._text(tokens) for kept in self.cached.values() for tokens in kept]
        repeated = max((shared(text, one) for one in earlier), default=0)
        _, told, said = text.rpartition("SAY:")
        answer = said.partition("|")[0] if told else "ok"
        self.answers, logged = [answer], False
        async for output in super().run(stream, **arguments):
            if not logged:
                found = len(self._text(stream.prompt[: output.cached_tokens]))
                line = {"prompt": len(text), "answer": len(answer), "repeated": repeated, "found": found}
                print(json.dumps(line), file=self._log, flush=True)
                logged = True
            yield output

    def _text(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


with open(sys.argv[1], "w") as log, serving(ScriptedEngine(log), max_body_size=16 << 20) as (base, _):
    print(f"listening on {base}/v1", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
