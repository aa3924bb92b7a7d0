"""The scripted engine over a tokenizer whose answers do not re-tokenise to the same tokens."""

import json

from scripted_engine import END, ScriptedEngine, WordTokenizer

from chairlift.chat_template import ChatTemplate

PAIRS = {"th": 1, "he": 2, "in": 3, "er": 4, "an": 5, ": ": 6, ", ": 7}
"""Tokens of two characters."""
_TEXTS = {token: pair for pair, token in PAIRS.items()}


class PairTokenizer(WordTokenizer):
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


class CachingEngine(ScriptedEngine):
    """Says `answers` one after the other, each a text of which every character is a token; then END."""

    def __init__(self, *answers, **settings):
        super().__init__(**settings)
        self.tokenizer = PairTokenizer()
        self.answers = list(answers)
        self.hits: list[int] = []

    def said(self, text):
        said = self.answers.pop(0) if self.answers else "ok"
        return [*said.encode(), END]

    def _show(self, output):
        super()._show(output)
        lost = self.shown.get("timeline", {}).get("lost_hit_tokens", 0)
        output.cached_tokens, output.own_cached_tokens = output.cached_tokens - lost, output.own_cached_tokens - lost
        if output.finish_reason is not None:
            self.hits.append(output.cached_tokens)
