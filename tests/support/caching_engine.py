"""An engine without a model that has a prefix cache, over a tokenizer whose answers do not re-tokenise to the same tokens."""

import asyncio
import json

from fake_async_engine import FakeEngine, FakeTokenizer, timeline

from chairlift.chat_template import ChatTemplate
from chairlift.engine.engine_request import shared_salt
from chairlift.outputs import RequestOutput, Timing

END = 0
"""The control token that begins and ends messages."""
PAIRS = {"th": 1, "he": 2, "in": 3, "er": 4, "an": 5, ": ": 6, ", ": 7}
"""Tokens of two characters."""
_TEXTS = {token: pair for pair, token in PAIRS.items()}


class PairTokenizer(FakeTokenizer):
    """Bytes and pairs are tokens. The template writes the tools, then each message between control tokens."""

    thinks = False
    """Whether the template keeps the reasoning of the last answer."""
    cut = None
    """A text that the template leaves out of all messages but the last."""

    def __init__(self):
        super().__init__()
        self.template = ChatTemplate({"default": "{{ messages }}{{ tools }}<tool_call></think>"}, {})

    def encode(self, text, *, add_special_tokens=True):
        ids, at = [], 0
        while at < len(text):
            if (pair := PAIRS.get(text[at : at + 2])) is not None:
                ids.append(pair)
                at += 2
            else:
                ids += text[at].encode()
                at += 1
        return ids

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(self.piece(token) for token in ids if token or not skip_special_tokens).decode(errors="replace")

    def piece(self, token):
        return _TEXTS[token].encode() if token in _TEXTS else bytes([token])

    def render(self, messages, **variables):
        self.rendered.append((messages, variables))
        head = "".join(f"{name}={value}\n" for name, value in variables.items() if name in ("date", "enable_thinking"))
        head += "".join(f"tool {tool['function']}\n" for tool in variables.get("tools") or ())
        turns = [self._turn(message, index + 1 == len(messages)) for index, message in enumerate(messages)]
        begun = "" if variables.get("add_generation_prompt") is False else "\0assistant\n"
        return [(head + "".join(turns) + begun, False)]

    def _turn(self, message, last):
        text = message["content"] if last or self.cut is None else message["content"].replace(self.cut, "")
        if self.thinks and message.get("reasoning_content"):
            text = f"<think>{message['reasoning_content']}</think>{text}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {_json(function["arguments"])}}}\n</tool_call>'
        name = message.get("tool_call_id", "")
        return f"\0{message['role']}{name}\n{text}\0"


def _json(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class CachingEngine(FakeEngine):
    """Says `answers` one after the other, each a text of which every character is a token; then END. Keeps what it computed.

    The first stop string of a request ends an answer that has it.
    """

    def __init__(self, *answers):
        super().__init__()
        self.tokenizer = PairTokenizer()
        self.answers = list(answers)
        self.cached: dict[bytes, list[list[int]]] = {}
        """The computed prompts and answers, by salt."""
        self.lost_hits = 0
        """Tokens of each prompt whose KV is there, without a recurrent state after them."""
        self.evicted_for: dict[str, int] = {}
        """Tokens in each timeline, by whom their blocks were for."""
        self.prompts: list[list[int]] = []
        self.hits: list[int] = []

    async def run(self, stream, *, request_id, on_start, spent, session=None, **rest):
        prompt, params = stream.prompt, stream.params
        adapter = None if params.lora is None else params.lora.encode()
        kept = self.cached.setdefault(shared_salt(stream.scheduling.cache_salt, adapter), [])
        block = self.config.block_size
        hit = max((min(shared(prompt, one), len(prompt) - 1) // block * block for one in kept), default=0)
        hit = max(0, hit - self.lost_hits)
        self.prompts.append(prompt)
        self.scheduled.append(stream.scheduling)
        self.hits.append(hit)
        on_start()
        said = self.answers.pop(0) if self.answers else "ok"
        stop = next((stop for stop in params.stop if stop in said), None)
        shown = len(said) if stop is None else said.index(stop)
        tokens = [*said.encode(), END] if stop is None else list(said[:shown].encode() + stop.encode())
        computed = []
        try:
            for index, token in enumerate(tokens[: params.max_tokens]):
                await asyncio.sleep(0)
                final = index + 1 == min(len(tokens), params.max_tokens)
                reason = None if not final else "stop" if index + 1 == len(tokens) else "length"
                text = chr(token) if index < shown else ""
                output = RequestOutput(text, [token], prompt, reason, queued=0.001, cached_tokens=hit, own_cached_tokens=hit)
                computed = tokens[:index]
                if final:
                    output.stop_reason = stop if reason == "stop" else None
                    output.timing = Timing(0.001, 0.001, 0.101, 0.2)
                    output.timeline = timeline(lost_hit_tokens=self.lost_hits, evicted_for=self.evicted_for)
                yield output
        finally:
            kept.append([*prompt, *computed])
            self.timelines[request_id] = [timeline(tenant=stream.scheduling.tenant)]


def shared(one, other):
    """The length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
