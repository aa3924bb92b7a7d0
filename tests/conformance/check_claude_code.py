"""Claude Code, through the Claude Agent SDK, which brings it: an answer, a tool's loop, a prompt that is too long, a conversation."""

import asyncio

import pytest
from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, ClaudeSDKClient, ResultError, ResultMessage, ToolUseBlock, query

MODEL = "org/fake-model"


@pytest.fixture
def options(scripted, key, alone, project):
    """Claude Code in the project, with the scripted server."""
    model = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), MODEL)
    off = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
    environ = {**alone, **model, **dict.fromkeys(off, "1"), "ANTHROPIC_BASE_URL": scripted, "ANTHROPIC_API_KEY": key}
    preset = {"type": "preset", "preset": "claude_code"}
    return ClaudeAgentOptions(env=environ, cwd=project, model=MODEL, max_turns=8, system_prompt=preset)


def used(messages):
    """The tools that were used, and the result."""
    blocks = [block for message in messages if isinstance(message, AssistantMessage) for block in message.content]
    [result] = [message for message in messages if isinstance(message, ResultMessage)]
    return [block.name for block in blocks if isinstance(block, ToolUseBlock)], result


@pytest.fixture
def ask(options):
    """Runs Claude Code with a prompt; returns the tools that it used, and its result."""

    async def collect(prompt):
        return used([message async for message in query(prompt=prompt, options=options)])

    return lambda prompt: asyncio.run(collect(prompt))


def test_an_answer(ask):
    tools, result = ask("SAY:Hello there.|")
    assert (tools, result.result, result.is_error) == ([], "Hello there.", False)
    usage = result.usage
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] > 10_000


def test_a_tool_and_its_result(ask, project):
    call = f'{{"name": "Read", "arguments": {{"file_path": "{project}/note.txt"}}}}'
    tools, result = ask(f"SAY:<tool_call>{call}</tool_call>|")
    assert (tools, result.result, result.is_error) == (["Read"], "All is well.", False)


def test_it_knows_that_a_prompt_is_too_long(ask):
    with pytest.raises(ResultError, match=r"Prompt is too long .*limit 400000"):
        ask("word " * 90_000)


def test_a_conversation_stays_in_the_cache(options, notes, project, cache_use):
    first = notes(lambda name: f'<tool_call>{{"name": "Read", "arguments": {{"file_path": "{project}/{name}"}}}}</tool_call>')

    async def converse():
        async with ClaudeSDKClient(options) as client:
            for prompt in (f"SAY:{first}|", "SAY:Well done.|", f"Once more. SAY:I look. {first}|"):
                await client.query(prompt)
                yield used([message async for message in client.receive_response()])

    async def results():
        return [(tools, result.result) async for tools, result in converse()]

    assert asyncio.run(results()) == [(["Read"] * 4, "All read."), ([], "Well done."), (["Read"] * 4, "All read.")]
    assert min(cache_use()) >= 0.95
