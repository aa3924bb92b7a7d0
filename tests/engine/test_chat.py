"""Chats in Python: the parts of answers, tools and further inputs of the template, in `LLM` and `AsyncEngine`."""

import asyncio
import types

import counting_engine
import pytest
from counting_engine import CharacterTokenizer

from chairlift.engine.arguments import ChatOptions
from chairlift.engine.chat import Chat
from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.llm import LLM
from chairlift.errors import InvalidRequest
from chairlift.outputs import ToolCall
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

ANSWER = """<think>
It depends on the place.
</think>

One moment.
<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HELLO = [{"role": "user", "content": "a"}]


class ScriptedTokenizer(CharacterTokenizer):
    """The first answer to the prompt `a` is ANSWER, the second one a later part of it."""

    template = types.SimpleNamespace(source="</think>{{ tools }}<tool_call>", uses=lambda variable: variable == "tools")

    def piece(self, token):
        return ANSWER[token - 97].encode() if 97 <= token < 97 + len(ANSWER) else super().piece(token)

    def chat(self, messages, **variables):
        self.rendered = messages, variables
        return super().chat(messages)


@pytest.fixture
def counting(monkeypatch):
    counting_engine.install(monkeypatch.setattr)
    for module in ("client", "llm"):
        monkeypatch.setattr(f"chairlift.engine.{module}.Tokenizer", ScriptedTokenizer)


def check(text, reasoning, calls):
    assert (text.strip(), reasoning) == ("One moment.", "It depends on the place.")
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Ulm"}')]
    assert isinstance(calls[0], ToolCall)


class TurnsTokenizer(CharacterTokenizer):
    """Each message ends with an end token, and a role begins the answer."""

    template = ScriptedTokenizer.template

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        turns = [token for message in messages for token in (*self.encode(message["content"]), counting_engine.EOS)]
        return turns + self.encode("role:" if add_generation_prompt else "")


def test_the_engine_of_a_recurrent_model_learns_where_the_users_turn_ends():
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "it says so"}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does it say?"}]
    ends = len("Be brief.") + 1 + len("What does it say?") + 1
    for messages, recurrent, expected in [([*asked, call, result], True, ends), (asked, True, None), ([*asked, call, result], False, None)]:
        info = EngineInfo(vocab_size=counting_engine.VOCABULARY, recurrent=recurrent)
        chat = Chat(TurnsTokenizer(), info, messages, SamplingParams(), ChatOptions(None, None, None, True, False))
        assert chat.scheduling(Scheduling(priority=3)) == Scheduling(priority=3, user_turn_end=expected)
        assert chat.scheduling(Scheduling(user_turn_end=5)).user_turn_end == 5


def test_reasoning_text_and_calls_stand_apart(counting):
    llm = LLM()
    (output,) = llm.chat(HELLO, SamplingParams(max_tokens=len(ANSWER)), tools=[WEATHER])
    check(output.text, output.reasoning, output.tool_calls)
    assert len(output.token_ids) == len(ANSWER)
    assert llm.tokenizer.rendered[1]["tools"][0]["function"]["name"] == "weather"


def test_without_tools_the_text_of_a_call_is_text(counting):
    (output,) = LLM().chat(HELLO, SamplingParams(max_tokens=len(ANSWER)))
    assert output.text == ANSWER.partition("</think>")[2].lstrip()
    assert output.tool_calls == ()


def test_each_of_several_answers_is_separated(counting):
    outputs = LLM().chat(HELLO, SamplingParams(max_tokens=3, n=2))[0].outputs
    assert [(output.text, output.reasoning) for output in outputs] == [("<th", None), (ANSWER[100:103], None)]


def test_increments_are_separated_too(counting):
    outputs = list(LLM().stream_chat(HELLO, SamplingParams(max_tokens=len(ANSWER)), tools=[WEATHER]))
    reasoning = "".join(output.reasoning or "" for output in outputs)
    check("".join(output.text for output in outputs), reasoning, outputs[-1].tool_calls)
    assert not any(output.tool_calls for output in outputs[:-1])
    assert sum(len(output.token_ids) for output in outputs) == len(ANSWER)


def test_a_stream_that_is_left_ends_its_request(counting):
    llm = LLM()
    for output in llm.stream_chat(HELLO, SamplingParams(max_tokens=1000)):
        if output.reasoning:
            break
    del output
    assert not llm.engine.running


def test_chats_of_the_asynchronous_engine(counting):
    async def main():
        async with asyncio.timeout(60), AsyncEngine() as engine:
            outputs = [one async for one in engine.chat(HELLO, SamplingParams(max_tokens=len(ANSWER)), tools=[WEATHER])]
            reasoning = "".join(output.reasoning or "" for output in outputs)
            check("".join(output.text for output in outputs), reasoning, outputs[-1].tool_calls)
            with pytest.raises(InvalidRequest, match="tool_choice names 'clock'"):
                await anext(engine.chat(HELLO, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "clock"}}))
            for messages, params, says in ((None, None, "messages is invalid"), (HELLO, {"seed": 1}, "params must be SamplingParams")):
                with pytest.raises(InvalidRequest, match=says):
                    await anext(engine.chat(messages, params))

    asyncio.run(main())


def test_a_required_call_is_forced_by_a_grammar(counting):
    llm = LLM()
    llm.chat(HELLO, SamplingParams(max_tokens=1), tools=[WEATHER], tool_choice="required")
    assert llm.engine.sampling[-1].structured_output.kind == "grammar"
    llm.chat(HELLO, SamplingParams(max_tokens=1), tools=[WEATHER])
    assert llm.engine.sampling[-1].structured_output is None


def test_further_inputs_of_the_template(counting):
    llm, one = LLM(), SamplingParams(max_tokens=1)
    llm.chat(HELLO, one, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False)
    assert llm.tokenizer.rendered[1] == {"enable_thinking": False, "add_generation_prompt": False}
    llm.chat(HELLO, one, continue_final_message=True)
    assert llm.tokenizer.rendered[1] == {"continue_final_message": True, "add_generation_prompt": False}


def test_the_calls_of_earlier_answers_are_read_as_over_http(counting):
    llm = LLM()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "rain", "tool_call_id": "1"}]
    llm.chat([*turns, *HELLO], SamplingParams(max_tokens=1))
    assert llm.tokenizer.rendered[0][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([{"role": "robot", "content": "a"}], {}, r"prompt 0: messages\[0\].role is invalid: it should be .*'system'"),
        ([{"content": "a"}], {}, r"messages\[0\].role is missing"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\].content must be a string"),
        (HELLO, {"tools": [{"name": "weather"}]}, r"tools\[0\].type is missing"),
        (HELLO, {"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be function or custom, got 'web_search'"),
        (HELLO, {"tools": "weather"}, "tools is invalid"),
        (HELLO, {"tools": [WEATHER, WEATHER]}, "tools has two functions of one name"),
        (HELLO, {"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice must be none, auto, required"),
        (HELLO, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs may not set 'tokenize'"),
        (HELLO, {"chat_template_kwargs": {5: True}}, "chat_template_kwargs may not set 5"),
        (HELLO, {"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs must be a dict"),
    ],
)
def test_wrong_chats_are_invalid_requests(counting, messages, options, says):
    with pytest.raises(InvalidRequest, match=says):
        LLM().chat(messages, **options)
