"""The rules that split text before merging."""

from functools import cache, partial

import pytest
from cpu_cost import cost
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from chairlift.checkpoint.pre_tokenizers import PRE_TOKENIZERS

NAMES = sorted(PRE_TOKENIZERS)


@cache
def splitter(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns])


def pieces(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in splitter(name).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's  12345!!\n", "It|'s| | 12345|!!|\n"),
        ("starcoder", " 123", " |1|2|3"),
        ("llama-bpe", "12345 DON'T!!\n\nx", "123|45| DON|'T|!!\n\n|x"),
        ("qwen2", "12 don't(x)", "1|2| don|'t|(x|)"),
        ("qwen2", "e\u0301a", "e|\u0301a"),
        ("qwen35", "e\u0301a 12", "e\u0301a| |1|2"),
        ("ufakzeka", "it's", "it|'s"),
        ("ufakzeka", "Ali'nin", "Ali|'nin"),
        ("laguna", "a\n\n!\n", "a|\n\n|!|\n"),
        ("bailingmoe", "it's 12", "it|'s| |1|2"),
        ("seed-coder", "a!\n", "a|!|\n"),
        ("exaone-moe", "to be 12", "to be| |1|2"),
        ("tekken", "camelCase 12 don't", "camel|Case| |1|2| don|'t"),
        ("gpt-4o", "camelCase 1234 don't", "camel|Case| |123|4| don't"),
        ("tiny_aya", "1234567", "1|234|567"),
        ("youtu", "1\uac00\uac01a", "1|\uac00\uac01|a"),
        ("jais-2", "a" + " " * 7 + "b", "a|    |  | b"),
        ("minicpm5", "12345", "123|45"),
        ("deepseek-v3", "1234 .net\u4e00\u4e01", "123|4| .|net|\u4e00\u4e01"),
        ("deepseek-v3", "a.net!\n", "a|.net|!\n"),
        ("spark2_5", "1234!\n", "1|2|3|4|!|\n"),
        ("deepseek-llm", "ab 12\n!", "ab| |12|\n|!"),
        ("deepseek-coder", "ab 12!", "ab| |1|2|!"),
        ("falcon", "a1234!b", "a|123|4|!|b"),
        ("bloom", "a b,c", "a| b|,|c"),
        ("viking", "a12", "a|1|2"),
        ("chameleon", "a    b\n1,2", "a|    |b|\n|1|,|2"),
        ("gemma4", "a b\n\nc", "a b|\n\n|c"),
        ("afmoe", "a1234567 12\u4e00\u4e01!", "a|1|234|567| |12|\u4e00\u4e01|!"),
        ("afmoe", "123456\u0661", "1|234|56\u0661"),
        ("kimi-k2", "camelCase\u4e00\u4e01x 1234 don't!\n", "camel|Case|\u4e00\u4e01|x| |123|4| don't|!\n"),
        ("kimi-k2", "a/b!/\n", "a|/b|!/\n"),
        ("superbpe", "in 1234567 of 12, 123", "in |1|234|567| of |12|, |123"),
        ("superbpe", "1000\u00b2", "1|000\u00b2"),
        ("mmbert", "\u2581a\u2581b\n\n\u2581c", "\u2581a|\u2581b|\n\n|\u2581c"),
        ("default", "a1234, b", "a|123|4|,| b"),
    ],
)
def test_how_text_is_split(name: str, text: str, expected: str) -> None:
    assert "|".join(pieces(name, text)) == expected


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789123ab_ .\u00b2\u0663\n", max_size=20))
def test_threes_of_numbers_before_a_boundary(text: str) -> None:
    plain = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), "isolated")
    quick = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS["tiny_aya"].patterns[:2]]
    )
    assert quick.pre_tokenize_str(text) == plain.pre_tokenize_str(text)


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "tiny_aya"])
def test_long_numbers_take_linear_time(name: str) -> None:
    long, short = (partial(splitter(name).pre_tokenize_str, "1" * digits + "x") for digits in (160_000, 16_000))
    assert cost(long, short) < 40  # in quadratic time 100


@settings(max_examples=100, deadline=None)
@given(st.text(), st.sampled_from(NAMES))
def test_no_character_is_lost(text: str, name: str) -> None:
    assert "".join(pieces(name, text)) == text


def test_every_pattern_compiles() -> None:
    tokenizer = Tokenizer(models.BPE())
    for name in NAMES:
        tokenizer.pre_tokenizer = splitter(name)
        assert tokenizer.to_str()
