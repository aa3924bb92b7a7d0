"""An answer's text as reasoning, content and calls, however it is cut."""

from types import SimpleNamespace

import pytest

from chairlift.chat.answer import AnswerParser, ChoiceBuilder
from chairlift.chat.answer_format import AnswerFormat, answer_grammar
from chairlift.chat.functions import Function, ToolSpec
from chairlift.chat.reasoning import REASONING_FORMATS, Reasoning, ReasoningState
from chairlift.chat.tools.formats import TOOL_PARSERS
from chairlift.outputs import RequestOutput

FUNCTIONS = ("f", "g")


def form(syntax, reasoning=None, control_texts=(), template="", required=False):
    """The format of answers that may call two functions."""
    encode = lambda text, **_: list(text.encode())  # noqa: E731
    source = SimpleNamespace(source=template)
    tokenizer = SimpleNamespace(control_texts=control_texts, piece=lambda token: bytes([token]), encode=encode, template=source)
    spec = ToolSpec(tuple(Function(name=name) for name in FUNCTIONS), required=required)
    thinks = None if reasoning is None else Reasoning(REASONING_FORMATS[reasoning], ReasoningState.POSSIBLE)
    return AnswerFormat(SimpleNamespace(tokenizer=tokenizer), spec, TOOL_PARSERS[syntax], thinks, hide=True)


def parsed(answers, *pieces, stop=None):
    """The choice that these pieces of text make, with the stop string that ends them."""
    parser, builder = AnswerParser(0, answers), ChoiceBuilder()
    for index, piece in enumerate(pieces, 1):
        for delta in parser.push(RequestOutput(piece, [1], (), *(("stop", stop) if index == len(pieces) else ()))):
            builder.add(delta)
    return builder.choice()


def cuts(text):
    """The text whole, and in pieces of each of some sizes."""
    return [[text], *([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 7))]


CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(("arguments", "after"), [('{"a": 1}', "<|call|><|start|>assistant"), ("", "")])
def test_a_call_after_reasoning_without_an_end_is_one_more_call(arguments, after):
    first, second = CALL.format("f", arguments), CALL.format("g", '{"b": 2}')
    for pieces in cuts(f"{first}{after}<|channel|>analysis<|message|>Now the other one.{second}"):
        choice = parsed(form("openai", "openai_gptoss"), *pieces)
        assert [(call.name, call.arguments) for call in choice.calls] == [("f", arguments or "{}"), ("g", '{"b": 2}')]
        assert choice.finish_reason == "tool_calls"


def test_a_call_in_earlier_reasoning_is_none():
    thought = f"<|channel|>analysis<|message|>So: {CALL.format('f', '{}')}<|end|><|start|>assistant"
    for pieces in cuts(f"{thought}<|channel|>analysis<|message|> "):
        assert parsed(form("openai", "openai_gptoss"), *pieces).calls == []


@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("<think>hm</thi", "nk", "hm", ""),
        ("<thi", "nk>\nhm", None, ""),
        ("<think>hm</think>So <tool", "_call>", "hm", "So"),
        ("<think>hm</think>So <tool", "bar", "hm", "So <tool"),
        ("<think>hm</thi", "s", "hm</thi", ""),
    ],
)
def test_a_mark_that_a_stop_string_has_cut_is_not_shown(text, stop, reasoning, content):
    for pieces in cuts(text):
        choice = parsed(form("hermes", "qwen3"), *pieces, stop=stop)
        assert (choice.reasoning, choice.content.rstrip(), choice.finish_reason) == (reasoning, content, "stop")


def test_a_hidden_control_token_may_come_in_pieces():
    answers = form("cohere", "cohere_command3", ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"))
    for pieces in cuts("<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>a <|START <<|END_RESPONSE|>b<"):
        choice = parsed(answers, *pieces)
        assert (choice.reasoning, choice.content) == ("hm", "a <|START <b<")


def test_one_call_is_made_where_the_template_takes_no_more():
    refusal = "{{ raise_exception('This model only supports single tool-calls at once!') }}"
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    for template, names in (("", ["f", "g"]), (refusal, ["f"])):
        answers = form("llama", template=template, required=True)
        assert [call.name for call in parsed(answers, text).calls] == names
        grammar = answer_grammar(answers, None, None, [])
        assert grammar is not None
        assert ("; " in grammar.text) == (len(names) > 1)
