"""Tools for models whose chat template has no tools: described in the system message, with calls and results as Hermes text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOOL_PROMPT = """You may call functions to help the user. These are the functions, each with the JSON schema of its parameters:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON, like this, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>"""


def add_tool_prompt(conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describes `tools` in the system message and converts calls and results in the conversation to text."""
    turns: list[dict[str, Any]] = []
    for message in conversation:
        turn = _message_as_text(message)
        if message["role"] == "tool" and turns and turns[-1].get("results"):
            turns[-1]["results"] += turn["results"]  # templates may require alternating roles
        else:
            turns.append(turn)
    for turn in turns:
        if results := turn.pop("results", None):
            turn["content"] = "\n".join(results)
    if tools:
        text = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{text}"
        else:
            turns.insert(0, {"role": "system", "content": text})
    return turns


def _message_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = dict(message)
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.pop("tool_calls", ())]
    if calls:
        written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        turn["content"] = f"{turn['content']}\n{written}".lstrip("\n")
    if turn["role"] == "tool":
        result = f"<tool_response>\n{turn['content']}\n</tool_response>"
        turn = {"role": "user", "results": [result]}
    return turn
