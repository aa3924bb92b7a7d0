"""Tools for models whose chat template has no tools: described in the first message, with calls and results as Hermes text."""

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


def add_tool_prompt(
    conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[dict[str, Any]]:
    """Describes `tools` and converts calls and results in the conversation to text.

    The description is in the system message or, where the template has no place for one (`has_system`), before the first user's text.
    """
    turns: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    before = ""
    for message in conversation:
        turn = _message_as_text(message)
        if turns and turns[-1]["role"] == turn["role"] == "user" and "tool" in (before, message["role"]):
            texts[-1].append(turn["content"])  # templates may require alternating roles
        else:
            turns.append(turn)
            texts.append([turn["content"]])
        before = message["role"]
    for turn, parts in zip(turns, texts, strict=True):
        turn["content"] = "\n".join(parts)
    if tools:
        text = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{text}"
        elif turns[0]["role"] == "user" and not has_system:
            turns[0]["content"] = f"{text}\n\n{turns[0]['content']}"
        else:
            turns.insert(0, {"role": "system" if has_system else "user", "content": text})
    return turns


def _message_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = dict(message)
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.pop("tool_calls", ())]
    if calls:
        written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        turn["content"] = f"{turn['content']}\n{written}".lstrip("\n")
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    return turn
