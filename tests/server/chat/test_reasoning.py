"""Where a model's reasoning ends and its answer begins."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.chat.reasoning import (
    REASONING_FORMATS,
    Reasoning,
    ReasoningParser,
    ReasoningState,
    ReasoningTokens,
    format_for_template,
)
from chairlift.grammar.source import ReasoningFormat
from chairlift.server.config import ServerConfig

POSSIBLE, OPEN, OVER = ReasoningState


def parsed(name, pieces, state=POSSIBLE):
    """Reasoning and answer of a text that comes in `pieces`."""
    parser = ReasoningParser(Reasoning(REASONING_FORMATS[name], state))
    parts = [parser.push(piece) for piece in pieces]
    parts.append(parser.push("", final=True))
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CASES = [
    ("qwen3", POSSIBLE, "<think>\nIt is 4.\n</think>\n\nFour. ", "It is 4.", "Four. "),
    ("qwen3", POSSIBLE, "\n <think>a</think>b", "a", "b"),
    ("openai_gptoss", POSSIBLE, f" {ANALYSIS}a", "a", " "),
    ("qwen3", OPEN, "\nIt is 4.\n\n</think>\nFour.", "It is 4.", "Four."),
    ("qwen3", OVER, "Use <think> and </think>.", "", "Use <think> and </think>."),
    ("qwen3", POSSIBLE, "  Use <think>a</think>.", "", "  Use <think>a</think>."),
    ("qwen3", POSSIBLE, "<thin air", "", "<thin air"),
    ("qwen3", POSSIBLE, "<thin", "", "<thin"),
    ("qwen3", POSSIBLE, "<think>a <think> b</think> c </think> d", "a <think> b", "c </think> d"),
    ("qwen3", POSSIBLE, "<think>no end </thin", "no end </thin", ""),
    ("qwen3", POSSIBLE, "<think></think>", "", ""),
    ("qwen3", POSSIBLE, " \n ", "", " \n "),
    ("deepseek_r1", POSSIBLE, "It is 4.</think>Four.", "It is 4.", "Four."),
    ("deepseek_r1", POSSIBLE, " <think>It is 4.</think>Four.", "It is 4.", "Four."),
    ("deepseek_r1", POSSIBLE, "<th", "<th", ""),
    ("granite", POSSIBLE, "Here is my thought process: a\nHere is my response:\n b", "a", "b"),
    ("granite_thinking_parser", POSSIBLE, "<think>a</think>\n<response>b</response>", "a", "b"),
    ("granite_thinking_parser", POSSIBLE, "<think>a</think><response>b </resp</response>", "a", "b </resp"),
    ("mistral", POSSIBLE, "[THINK]a[/THINK]b", "a", "b"),
    ("apertus", POSSIBLE, "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    ("gemma4", POSSIBLE, "<|channel>thought\na\n<channel|>b", "a", "b"),
    ("cohere_command3", POSSIBLE, "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b", "a", "<|START_RESPONSE|>b"),
    ("seed_oss", POSSIBLE, "<seed:think>\na</seed:think>\nb", "a", "b"),
    ("hunyuan_a13b", POSSIBLE, "<think>\na\n</think>\n<answer>\n b\n</answer>", "a", "b\n"),
    ("apriel", OPEN, "a\n[BEGIN FINAL RESPONSE]\nb\n[END FINAL RESPONSE]", "a", "b\n"),
    ("openai_gptoss", POSSIBLE, f"{ANALYSIS}a<|end|>{FINAL}b", "a", f"{FINAL}b"),
    # A recipient before the channel makes it a call.
    ("openai_gptoss", POSSIBLE, f" to=functions.f{ANALYSIS}{{}}", "", f" to=functions.f{ANALYSIS}{{}}"),
    ("openai_gptoss", POSSIBLE, f"{ANALYSIS}a<|end|>to=f {ANALYSIS}{{}}<|end|>{ANALYSIS}b", "a\nb", f"to=f {ANALYSIS}{{}}<|end|>"),
    ("openai_gptoss", POSSIBLE, f"{ANALYSIS}a<|end|>{ANALYSIS} c <|end|>{FINAL}b", "a\nc", f"{FINAL}b"),
]


@pytest.mark.parametrize(("name", "state", "text", "reasoning", "answer"), CASES, ids=[f"{case[0]} {case[2]!r:.50}" for case in CASES])
def test_reasoning_and_answer_of_a_text(name, state, text, reasoning, answer):
    assert parsed(name, [text], state) == (reasoning, answer)
    assert parsed(name, text, state) == (reasoning, answer)  # a character at a time
    for at in range(len(text)):
        assert parsed(name, [text[:at], "", text[at:]], state) == (reasoning, answer)


MARKS = {mark for form in REASONING_FORMATS.values() for mark in (form.start, form.end, *form.dropped)}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(REASONING_FORMATS)),
    st.sampled_from(list(ReasoningState)),
    st.lists(st.sampled_from([*sorted(MARKS), "<", "</", "think>", "<|", "Here is my", " ", "\n", "é", "x"]), max_size=16),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_how_a_text_is_cut_changes_nothing(name, state, pieces, cuts):
    text = "".join(pieces)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = parsed(name, [text], state)
    assert parsed(name, [text[start:end] for start, end in itertools.pairwise(places)], state) == whole
    assert parsed(name, text, state) == whole


@pytest.mark.parametrize("text", ["<" * 200_000, " " * 200_000, "<think>" * 30_000, "</think>" * 30_000, "<think>" + "<" * 200_000])
@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss"])
def test_hostile_text_is_kept_and_little_of_it_is_held_back(name, text):
    parser = ReasoningParser(Reasoning(REASONING_FORMATS[name], POSSIBLE))
    length, blank = 0, text.isspace()
    for number, character in enumerate(text, 1):
        length += sum(map(len, parser.push(character)))
        assert number - length < 64 or blank  # whitespace may stand before reasoning
    length += sum(map(len, parser.push("", final=True)))
    assert length in (len(text), len(text) - len("<think>"))


def test_a_part_of_a_mark_is_held_back_and_nothing_else():
    parser = ReasoningParser(Reasoning(REASONING_FORMATS["qwen3"], OPEN))
    assert parser.push("a < b </th") == ("a < b", "")
    assert parser.push("e") == (" </the", "")
    assert parser.push(" end </think") == (" end", "")
    assert parser.push("> \nb ") == ("", "b ")
    assert parser.push("</think>") == ("", "</think>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("{{ content.split('</think>')[-1] }}<|im_start|>assistant\n<think>\n", "qwen3"),
        ("<\uff5cAssistant\uff5c>{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("Write your thoughts after 'Here is my thought process:' and the rest after 'Here is my response:'", "granite"),
        ("thoughts between <think></think> and the response between <response></response>", "granite_thinking_parser"),
        ("{{ '<response>' + content.split('</think>')[-1] + '</response>' }}", "granite_thinking_parser"),
        ("<minimax:tool_call>{{ call }}<response>{{ result }}</response>{{ content.split('</think>')[-1] }}", "qwen3"),
        ("<|im_start|>assistant\n<think>", "qwen3"),
        ("<think>\n{{ thought }}\n</think>\n<answer>\n", "hunyuan_a13b"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|>", "cohere_command3"),
        ("{{ '<seed:think>' + thought + '</seed:think>' }}", "seed_oss"),
        ("Here are my reasoning steps:\n{{ thought }}[BEGIN FINAL RESPONSE]", "apriel"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("<|channel>thought\n<channel|>", "gemma4"),
    ],
)
def test_the_format_is_read_from_the_template(template, name):
    assert format_for_template(template) == (name and REASONING_FORMATS[name])


def test_every_format_can_be_chosen():
    assert set(ServerConfig.__dataclass_fields__["reasoning_parser"].metadata["choices"]) == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize(
    ("tail", "continued", "state"),
    [
        ("<|im_start|>assistant\n", None, POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", None, OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, OVER),
        ("user: what is <think>?<|im_end|>\nassistant:", None, POSSIBLE),
        ("", "", POSSIBLE),
        ("", "Fo", OVER),
        ("", "<think>It is", OPEN),
        ("", "<think>It is 4.</think>Fo", OVER),
        ("<think>", "Fo", OVER),
    ],
)
def test_the_prompt_may_begin_or_skip_the_reasoning(tail, continued, state):
    message = None if continued is None else {"role": "assistant", "content": continued}
    assert Reasoning.after_prompt(REASONING_FORMATS["qwen3"], tail, message).state is state


@pytest.mark.parametrize(
    ("form", "state", "tokens", "count"),
    [
        ("qwen3", OPEN, ["It ", "is", "</think>", "4"], 3),
        ("qwen3", OPEN, ["It ", "is</th", "ink>4", "."], 3),
        ("qwen3", POSSIBLE, ["\n", "<thi", "nk>", "It", "</think>", "4"], 5),
        ("qwen3", POSSIBLE, ["<thi", "ng>", "4"], 0),
        ("qwen3", OVER, ["<think>", "4"], 0),
        ("qwen3", OPEN, ["never", " ", "ends"], 3),
        ("openai_gptoss", POSSIBLE, ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>"], 4),
    ],
)
def test_tokens_of_the_reasoning_are_counted(form, state, tokens, count):
    pieces = [token.encode() for token in tokens]
    for size in (1, 2, len(tokens)):
        counter = ReasoningTokens(Reasoning(REASONING_FORMATS[form], state), lambda token: pieces[token])
        assert sum(counter.count(range(len(tokens))[at : at + size]) for at in range(0, len(tokens), size)) == count


def test_a_character_in_two_tokens_does_not_disturb_the_count():
    form = ReasoningFormat("<ü>", "</ü>")
    pieces = [bytes([byte]) for byte in "<ü>ä</ü>b".encode()]
    counter = ReasoningTokens(Reasoning(form, POSSIBLE), lambda token: pieces[token])
    assert counter.count(range(len(pieces))) == len(pieces) - 1
