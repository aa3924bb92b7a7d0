"""How byte-level vocabularies of GGUF files split text into words before merging, by the file's `tokenizer.ggml.pre`.

The names are llama.cpp's (src/llama-vocab.cpp), the patterns those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Alphabet(Enum):
    """How the tokens of a vocabulary with merges spell a text."""

    BYTES = "bytes"
    """In GPT-2's alphabet for bytes."""
    MARKED_SPACES = "marked spaces"
    """As text with ▁ for a space and with byte fallback, as in SentencePiece."""
    WORDS = "words"
    """As text with byte fallback; white space separates words and has no tokens."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules of one kind of vocabulary."""

    patterns: tuple[str, ...]
    """Regular expressions in Oniguruma's syntax. Each splits the pieces that the one before it left: a match is a piece of its own."""
    whole_words: bool = False
    """Whether a word that is in the vocabulary becomes one token without merging."""
    adds_bos: bool = False
    """Whether prompts begin with `bos` if the file does not say."""
    adds_sep: bool = False
    """Whether prompts end with the separator if the file does not say."""
    composes: bool = False
    """Whether characters are composed first (Unicode's NFC)."""
    alphabet: Alphabet = Alphabet.BYTES
    marks_lines: bool = False
    """Whether each line begins with ▁."""


def split_into_bytes(tokenizer: Tokenizer, patterns: Iterable[str]) -> None:
    """Makes a tokenizer split texts by the patterns, and spell the words in GPT-2's alphabet for bytes."""
    from tokenizers import Regex, decoders, pre_tokenizers

    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_BY_LINE = r"[^\n]+|[\n]+"
_NOT_PUNCTUATION = " ?[^(\\s|.,!?…。，、।۔،)]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(
    digits: str,
    letters: str = r"\p{L}",
    contraction: str = f"{_CONTRACTION}|",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    """Words as in cl100k: a letter run takes one preceding character, a symbol run takes the line breaks after it."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{symbols}|{spaces}"


def _cased_words(
    digits: str, contraction: str = f"{_CONTRACTION}?", upper: str = _UPPER, lower: str = _LOWER, after_symbols: str = r"[\r\n/]*"
) -> str:
    """Words as in o200k: a word also ends where small letters are followed by a capital."""
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contraction}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_SPACES}"


def _ascii_led_words(symbols: str, breaks: str) -> str:
    """Words as in DeepSeek 3: an ASCII symbol starts the word of ASCII letters after it."""
    ascii_symbols = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    return rf"{ascii_symbols}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|{symbols}|{breaks}|\s+(?!\S)|\s+"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(_DIGIT)
_DEEPSEEK3 = r"\p{N}{1,3}", _CJK, _ascii_led_words(r" ?[\p{P}\p{S}]+[\r\n]*", r"\s*[\r\n]+")
_HALVING_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_NOT_HAN_UPPER, _NOT_HAN_LOWER = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_ASIAN = "[一-\u9fff㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
# Numbers are cut into threes from the right. Each pattern looks to a number's end once, so that long numbers take linear time.
_THREES = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3}"
_THREES_OF_DIGITS = r"\A\d{1,2}(?=(?:\d{3})++(?!\d))|\d{3}(?=\d)"
# Equal to \d{1,3}(?=(?:\d{3})*\b): whole numbers first, then their threes, each where the one before it ends.
_THREES_BEFORE_BOUNDARIES = r"(?<!\d)\d++\b", r"\A\d{1,3}(?=(?:\d{3})*+\z)|(?!\A)\G\d{3}"
_KOREAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert exaone4"
        " jina-es jina-de jina-v2-es jina-v2-de",
        PreTokenizer((_GPT2,)),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer((_GPT2,), adds_sep=True)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((_DIGIT, _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    ("jais-2", PreTokenizer((_words(r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+|{_HALVING_SPACES}|\s"),))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez",
        PreTokenizer((_QWEN2,), composes=True),
    ),
    ("stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe", PreTokenizer((_QWEN2,))),
    # llama.cpp's expected tokens of Qwen 3.5 keep decomposed characters. transformers composes them, as for Qwen 2.
    ("qwen35", PreTokenizer((_words(_DIGIT, letters=r"[\p{L}\p{M}]", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),))),
    ("ufakzeka", PreTokenizer((_words(_DIGIT, contraction=""),))),
    ("laguna", PreTokenizer((_BY_LINE, _QWEN2))),
    ("seed-coder", PreTokenizer((_words(_DIGIT, symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    (
        "exaone-moe",
        PreTokenizer((_words(_DIGIT, letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),)),
    ),
    ("tekken", PreTokenizer((_cased_words(_DIGIT, contraction=""),), whole_words=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased_words(r"\p{N}{1,3}"),))),
    ("granite-embed-multi-97m", PreTokenizer((_cased_words(r"\p{N}{1,3}"),), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer((*_THREES_BEFORE_BOUNDARIES, _cased_words(r"\p{N}{1,3}")))),
    ("youtu", PreTokenizer((_KOREAN, _cased_words(_DIGIT)), whole_words=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    ("afmoe", PreTokenizer((_THREES, _ASIAN, _DEEPSEEK3[2]))),
    ("spark2_5", PreTokenizer((*_DEEPSEEK3[:2], _ascii_led_words(r" ?[\p{P}\p{S}]+", r"[\r\n]"), _DIGIT))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_NOT_PUNCTUATION,))),
    ("viking", PreTokenizer((_NOT_PUNCTUATION, _DIGIT))),
    ("chameleon", PreTokenizer(("[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2), adds_bos=True)),
    (
        "kimi-k2",
        PreTokenizer((r"\p{Han}+", _cased_words(r"\p{N}{1,3}", upper=_NOT_HAN_UPPER, lower=_NOT_HAN_LOWER, after_symbols=r"[\r\n]*"))),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", _THREES_OF_DIGITS))),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((_BY_LINE,), adds_bos=True, alphabet=Alphabet.MARKED_SPACES)),
    ("sarvam-moe", PreTokenizer((_BY_LINE,), alphabet=Alphabet.MARKED_SPACES)),
    ("mmbert", PreTokenizer((r"▁[^▁\n]*|\n+",), alphabet=Alphabet.MARKED_SPACES, marks_lines=True)),
    ("whitespace", PreTokenizer((), alphabet=Alphabet.WORDS)),
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)

PRE_TOKENIZERS = {name: rules for names, rules in _GROUPS for name in names.split()}
"""The rules by name. `default` is for files that name none, which old converters wrote."""
