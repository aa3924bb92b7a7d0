"""Chairlift's server around a scripted engine with a prefix cache, for agents: it answers what the conversation last told it to say.

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

from caching_engine import CachingEngine
from server_here import serving

CONTEXT = 400_000
"""Tokens, which are bytes here: enough for an agent's prompt of 100 kB."""


class ToldEngine(CachingEngine):
    """Says what it is told to say, `ok` by default, whatever else a prompt has in it."""

    steered = False

    def __init__(self, log):
        super().__init__(max_model_len=CONTEXT, num_kv_blocks=4 * CONTEXT // 16)
        self._log = log
        self._earlier = []
        """Each prompt with its answer."""

    def text(self, prompt):
        return self.tokenizer.decode(prompt, skip_special_tokens=False)

    def said(self, text):
        self.answers = [self._answer_to(text)]
        return super().said(text)

    def _answer_to(self, text):
        _, found, answer = text.rpartition("SAY:")
        return answer.partition("|")[0] if found else "ok"

    async def _noted(self, stream, outputs):
        text, logged = self.text(stream.prompt_token_ids), False
        answer = self._answer_to(text)
        repeated = max((shared(text, one) for one in self._earlier), default=0)
        self._earlier.append(text + answer)
        async for output in super()._noted(stream, outputs):
            if not logged:
                found = len(self.text(stream.prompt_token_ids[: output.cached_tokens]))
                line = {"prompt": len(text), "answer": len(answer), "repeated": repeated, "found": found}
                print(json.dumps(line), file=self._log, flush=True)
                logged = True
            yield output


def shared(one, other):
    """The length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


with open(sys.argv[1], "w") as log, serving(ToldEngine(log), max_body_size=16 << 20) as (base, _):
    print(f"listening on {base}/v1", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
