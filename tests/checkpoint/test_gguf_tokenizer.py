import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_files import (
    CONTROL,
    CONTROLS,
    NORMAL,
    USER_DEFINED,
    byte_level_metadata,
    default_file,
    gguf_of,
    sentencepiece_metadata,
    tiny_model,
    write_vocabulary,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as InTurn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chairlift.checkpoint.end_tokens import end_tokens
from chairlift.checkpoint.gguf import convert, open_gguf
from chairlift.checkpoint.gguf_tokenizer import write_tokenizer
from chairlift.errors import UnsupportedModel
from chairlift.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello world, it's we'll I'M 'S don't",
    "def f(x):\n    return x[1:]\n\n\tif a==1: print('hi')\r\n",
    "12 3456 7.89e-10 x12y 2026-01-02",
    "😀 👩\u200d👩\u200d👧 🏳️\u200d🌈 ok",
    "你好世界 こんにちは 안녕하세요 Ελληνικά العربية",
    "cafe\u0301 a\u0308 café \u0915\u094d\u0937 \u212b",
    "   a    b\n\n\n c\t\td \n   ",
    "\u00a0x\u2003y\u200bz\ufeff\ufffd\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>\n <|endoftext|>x<file_sep> <empty_output>y",
]
SPACED_NUMBERS = ["  1", "x  12   345\n 6", "½ ² ٣٤ Ⅷ"]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    """transformers' own reading of the default file."""
    path = default_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.slow
def test_ids_are_those_of_transformers(converted: Path, reference: PreTrainedTokenizerBase) -> None:
    tokenizer = Tokenizer(converted)
    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text)["input_ids"] for text in TEXTS]
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_token_ids == set(range(17))


@pytest.mark.slow
def test_digits_stand_alone_before_words_are_cut(converted: Path, reference: PreTrainedTokenizerBase) -> None:
    """SmolLM's own tokenizer isolates digits first; transformers leaves that out for GGUF files, so it is put back here."""
    plain = [reference(text)["input_ids"] for text in SPACED_NUMBERS]
    reference.backend_tokenizer.pre_tokenizer = InTurn([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer = Tokenizer(converted)
    ours = [tokenizer.encode(text) for text in SPACED_NUMBERS]
    assert ours == [reference(text)["input_ids"] for text in SPACED_NUMBERS]
    assert ours != plain
    assert tokenizer.decode(ours[1]) == SPACED_NUMBERS[1]


def test_transformers_reads_what_is_written(converted: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(converted), Tokenizer(converted)
    for text in TEXTS + SPACED_NUMBERS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 2, 0)


def _both(tmp_path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """The tokenizer of a file with these metadata, read by chairlift and by transformers."""
    tmp_path.mkdir(exist_ok=True)
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced=metadata)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    return Tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")


BYTE_TEXTS = [
    *TEXTS,
    *SPACED_NUMBERS,
    "hello hello 123 1234567 hellohello\n\n x",
    "<|user|>hello<|end|> <think>hello</think>",
    "don't DON'T he'LL",
    "a!!!\n\nb  \n  c\r\n\r\n",
]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_ways_of_cutting_words(tmp_path: Path, pre: str) -> None:
    ours, theirs = _both(tmp_path, byte_level_metadata(pre) | {"tokenizer.ggml.add_bos_token": False})
    # Qwen's own tokenizer composes characters first (NFC), which transformers leaves out for GGUF files; and it adds
    # <|endoftext|> to vocabularies that lack it.
    texts = [text for text in BYTE_TEXTS if (pre != "qwen2" or "e\u0301" not in text) and "<|endoftext|>" not in text]
    assert [ours.encode(text) for text in texts] == [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [ours.decode(ours.encode(text)) for text in BYTE_TEXTS[:4]] == BYTE_TEXTS[:4]


def test_qwen_composes_characters(tmp_path: Path) -> None:
    ours, _ = _both(tmp_path, byte_level_metadata("qwen2"))
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    ours, _ = _both(tmp_path, byte_level_metadata("gpt-2"))
    ids = ours.encode("<|user|><think>a<|end|>")
    assert ids[:2] == [257, 258]
    assert ids[-1] == 256
    assert ours.decode(ids) == "<think>a"
    assert ours.decode(ids, skip_special_tokens=False) == "<|user|><think>a<|end|>"


@pytest.mark.parametrize(
    ("pre", "metadata", "expected"),
    [
        ("gpt-2", {}, ["h"]),
        ("llama-bpe", {}, [CONTROLS[1], "h"]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, ["h"]),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [CONTROLS[1], "h", CONTROLS[0]]),
    ],
)
def test_what_stands_around_a_prompt(tmp_path: Path, pre: str, metadata: dict[str, Any], expected: list[str]) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced=byte_level_metadata(pre) | metadata)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    ours, theirs = Tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [ours.decode([token], skip_special_tokens=False) for token in ours.encode("h")] == expected
    assert theirs("h")["input_ids"] == ours.encode("h")
    assert ours.encode("h", add_special_tokens=False) == [ord("h")]


def test_ends_of_a_turn(tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.eot_token_id": 258}
    ours, _ = _both(tmp_path, metadata)
    assert ours.eos_token_ids == {256, 257, 258}  # <|end|> is known to end a turn


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, CONTROL])
def test_a_token_with_a_known_text_ends_answers_whatever_its_type(tmp_path: Path, kind: int) -> None:
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.eos_token_ids": [90]}
    metadata["tokenizer.ggml.token_type"][256] = kind
    ours, _ = _both(tmp_path, metadata)
    assert ours.eos_token_ids == {90, 256, 257}
    assert ours.decode([97, 256]) == "a"
    assert ours.encode("a<|end|>") == [97, 256]


def test_what_ends_a_message_alone_does_not_end_an_answer() -> None:
    assert end_tokens({"<|end|>": 1, "<|return|>": 2, "<|call|>": 3, "a": 4}) == {2, 3}
    assert end_tokens({"<|end|>": 1, "<|calls|>": 2, "<|flush|>": 3}) == {2, 3}
    assert end_tokens({"<|end|>": 1, "<|return|>": 2}) == {1, 2}
    assert end_tokens({"</s>": 1, "<turn|>": 2, "<|tool_response>": 3}) == {2, 3}
    assert end_tokens({"</s>": 1, "<eos>": 2}) == {1, 2}
    turns = ("[|endofturn|]", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|assistant_end|>")
    assert end_tokens({text: index for index, text in enumerate(turns)}) == set(range(len(turns)))
    assert not end_tokens(
        {text: index for index, text in enumerate(("eot", "end_of_turn", "<|user_end|>", "<|end_of_thought|>", "[/INST]"))}
    )


@pytest.mark.parametrize("count", [128, 129])
def test_tokens_that_are_never_sampled(tmp_path: Path, count: int) -> None:
    listed = list(range(count))
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced={"tokenizer.ggml.suppress_tokens": [*listed, 5000]})
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    if count > 128:
        with pytest.raises(UnsupportedModel, match="suppress_tokens has 129 tokens, and 128 can be suppressed"):
            Tokenizer(tmp_path / "out")
    else:
        assert Tokenizer(tmp_path / "out").suppressed_token_ids == tuple(listed)


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_template.rag": "rag"}
    ours, _ = _both(tmp_path, byte_level_metadata("gpt-2") | templates)
    assert ours.decode(ours.chat([])) == "plain"
    assert ours.decode(ours.chat([], tools=[{}])) == "tools"


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"of the kind 'gpt2' / 'somebodys-own'; put the model's own tokenizer.json beside"):
        _both(tmp_path, byte_level_metadata("somebodys-own"))


def test_a_missing_pre_tokenizer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _both(tmp_path, byte_level_metadata("gpt-2") | {"tokenizer.ggml.pre": None})
    assert "names no pre-tokenizer" in caplog.text


def test_gemma4_merges_characters(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": None}
    metadata |= {"tokenizer.ggml.merges": ["h e", "l l"], "tokenizer.ggml.add_bos_token": False}
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced=metadata)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    ours = Tokenizer(tmp_path / "out")
    assert [ours.piece(token) for token in ours.encode("hell he\u4f60")] == [b"<s>", b"he", b"ll", b" ", b"he", b"\xe4", b"\xbd", b"\xa0"]
    assert ours.decode(ours.encode(" he\u4f60")) == " he\u4f60"


def wordpiece_metadata(**others: Any) -> dict[str, Any]:
    """A vocabulary of word pieces as in BERT: the control tokens are where BERT has them. Files of today say which they are."""
    tokens = [f"[unused{index}]" for index in range(320)]
    tokens[0], tokens[100:104] = "[PAD]", ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens[104:109] = ["\u2581hello", "\u2581wor", "ld", "\u2581a", "\u2581,"]
    kinds = dict.fromkeys(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), CONTROL) | dict.fromkeys(tokens[104:109], NORMAL)
    return byte_level_metadata("gpt-2") | {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 5) for token in tokens],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 101,
        "tokenizer.ggml.seperator_token_id": 102,
        "tokenizer.ggml.unknown_token_id": 100,
        "tokenizer.ggml.eos_token_id": None,
        **{f"tokenizer.ggml.{key}": value for key, value in others.items()},
    }


def test_wordpiece(tmp_path: Path) -> None:
    ours = _converted(tmp_path, wordpiece_metadata())
    assert ours.encode("H\u00e9llo World, a zz") == [101, 104, 105, 106, 108, 107, 100, 102]
    assert ours.decode(ours.encode("hello world")) == "hello world"


@pytest.mark.parametrize(
    "metadata",
    [
        {"bos_token_id": None, "cls_token_id": 101},  # as in files of 2024
        {"bos_token_id": None, "seperator_token_id": None, "unknown_token_id": None},
        {"add_bos_token": False, "add_sep_token": False, "add_eos_token": True, "eos_token_id": 5},
    ],
)
def test_texts_for_bert_always_have_their_ends(tmp_path: Path, metadata: dict[str, Any]) -> None:
    ours = _converted(tmp_path, wordpiece_metadata(**metadata))
    assert ours.encode("hello zz") == [101, 104, 100, 102]
    assert ours.encode_pair("hello", "a")[0] == [101, 104, 102, 107, 102]


def test_the_first_token_of_bert_is_the_one_that_the_file_names(tmp_path: Path) -> None:
    ours = _converted(tmp_path, wordpiece_metadata(bos_token_id=None, cls_token_id=103))
    assert ours.encode("hello") == [103, 104, 102]


def test_a_tokenizer_of_another_model_beside_the_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift")
    own = write_vocabulary(tmp_path / "own", wordpiece_metadata())
    other = write_vocabulary(tmp_path / "other", byte_level_metadata("gpt-2"))
    (tmp_path / "out").mkdir()
    write_tokenizer(open_gguf(own / "tiny.gguf"), tmp_path / "out")
    logged = [message for message in caplog.messages if str(own) in message]  # threads that other tests have left may log, too
    assert logged == [f"{own / 'tiny.gguf'}: its tokens are those of {own / 'tokenizer.json'}"]
    shutil.copyfile(other / "tokenizer.json", own / "tokenizer.json")
    write_tokenizer(open_gguf(own / "tiny.gguf"), tmp_path / "out")
    assert f"320 of its 320 tokens have other texts in {own / 'tokenizer.json'}: is that of this model?" in caplog.text


UNIGRAM_PIECES = {
    "\u2581": -2.0,
    "h": -4.0,
    "e": -4.0,
    "l": -4.0,
    "o": -4.0,
    "\u2581hell": -3.0,
    "\u2581he": -2.5,
    "llo": -2.9,
    "lo": -3.0,
    "A": -3.5,
}


def unigram_metadata(**others: Any) -> dict[str, Any]:
    """A unigram vocabulary: pieces with log probabilities, control tokens and a token that users define; padded to 320."""
    tokens = ["<pad>", "</s>", "<unk>", "<s>", "<sep>", *UNIGRAM_PIECES]
    padding = [f"[PAD{index}]" for index in range(320 - len(tokens))]
    return byte_level_metadata("gpt-2") | {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.scores": [0.0] * 5 + list(UNIGRAM_PIECES.values()) + [-20.0] * len(padding),
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, 2, CONTROL, USER_DEFINED] + [NORMAL] * len(UNIGRAM_PIECES) + [5] * len(padding),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.add_space_prefix": True,
        **{f"tokenizer.ggml.{key}": value for key, value in others.items()},
    }


def test_unigram_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    ours = _converted(tmp_path, unigram_metadata())
    pieces = [ours.piece(token) for token in ours.encode("hello hell")]
    assert pieces == [b" he", b"llo", b" hell", b"</s>"]  # -5.4, where " hell" and "o" have -7.0
    assert ours.decode(ours.encode("hello  hello<sep>h")) == "hello  hello<sep> h"
    assert ours.encode("h\u4f60\u597d", add_special_tokens=False) == [5, 6, 2]
    assert ours.eos_token_ids == {1}


def test_unigram_may_merge_spaces(tmp_path: Path) -> None:
    ours = _converted(tmp_path, unigram_metadata(remove_extra_whitespaces=True))
    assert ours.encode("  hello \n  hello  ") == ours.encode("hello \n hello")
    assert ours.encode("  ", add_special_tokens=False) == []


@pytest.mark.parametrize("charsmap", [[1], [255] * 8, [4, 0, 0, 0, 0, 0, 0, 0]])
def test_a_broken_table_of_replacements_is_refused(tmp_path: Path, charsmap: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match="table of replacements"):
        _converted(tmp_path, unigram_metadata(precompiled_charsmap=charsmap))


def _converted(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(write_vocabulary(tmp_path, metadata))


def test_mmbert_marks_words_and_lines(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "mmbert", "tokenizer.ggml.scores": None}
    metadata |= {"tokenizer.ggml.merges": ["h e", "l l", "\u2581 he", "he ll", "hell o", "\u2581he ll"]}
    ours = _converted(tmp_path, metadata)
    ids = ours.encode("he llo\nhell")
    assert [ours.piece(token) for token in ids] == [b" he", b" ", b"ll", b"o", b"\n", b" hell"]
    assert ours.decode(ours.encode("hell he  o")) == "hell he  o"


def test_whitespace_separates_words_and_has_no_tokens(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.model": "whitespace", "tokenizer.ggml.pre": "whitespace"}
    metadata |= {
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.normalizer.lowercase": True,
    }
    ours = _converted(tmp_path, metadata)
    assert [ours.piece(token) for token in ours.encode("HELL \t hell\nhe")] == [b"hell", b"hell", b"he"]


def test_kimi_without_merges_merges_in_the_order_of_ids(tmp_path: Path) -> None:
    metadata = byte_level_metadata("kimi-k2")
    ours = _converted(tmp_path, metadata)
    for text in ("hello 123", " hellohell"):
        ids = ours.encode(text)
        assert ids == _converted(tmp_path / str(len(text)), metadata | {"tokenizer.ggml.merges": None}).encode(text)
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("metadata", "text", "expected"),
    [
        ({"tokenizer.ggml.pre": "jina-v2-code"}, "a <mask> b", "a|<mask>| |b"),
        ({"general.name": "My Phi-3 mini"}, "a <|user|>\n b<think> c<s> d", "a| |<|user|>|b|<think>|c|<s>| |d"),
        ({"general.name": "modern-bert"}, "a [MASK] b", "a|[MASK]| |b"),
        ({}, "a <mask> b", "a| |<mask>| |b"),
    ],
)
def test_tokens_that_swallow_white_space(tmp_path: Path, metadata: dict[str, Any], text: str, expected: str) -> None:
    base = byte_level_metadata("gpt-2")
    base["tokenizer.ggml.tokens"][-3:] = ["<mask>", "[MASK]", "<s>"]
    base["tokenizer.ggml.token_type"][-3:] = [CONTROL] * 3
    ours = _converted(tmp_path, base | {"tokenizer.ggml.add_sep_token": False} | metadata)
    assert "|".join(ours.piece(token).decode() for token in ours.encode(text)) == expected


def test_llama3_takes_whole_words_before_it_merges(tmp_path: Path) -> None:
    ours, _ = _both(tmp_path, byte_level_metadata("llama-bpe") | {"tokenizer.ggml.add_bos_token": False})
    assert len(ours.encode("xyz")) == 1
    ours, _ = _both(tmp_path / "other", byte_level_metadata("gpt-2"))
    assert len(ours.encode("xyz")) == 3


def test_an_added_token_may_be_spelled_as_it_is_shown(tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][258] = "<thi nk…>"
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced=metadata)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    ours = Tokenizer(tmp_path / "out")
    assert ours.encode("a<thi nk…>b") == [97, 258, 98]
    assert ours.decode([97, 258, 98]) == "a<thi nk…>b"


SENTENCES = ["hello", "hello hello", " hello", "hell ohello ", "ähello你", "a\nb", ""]


def test_sentencepiece(tmp_path: Path) -> None:
    ours, theirs = _both(tmp_path, sentencepiece_metadata())
    assert ours.encode("hello hello") == theirs("hello hello")["input_ids"]
    assert ours.encode("h", add_special_tokens=False) == theirs("h", add_special_tokens=False)["input_ids"]
    for text in SENTENCES:
        assert ours.decode(ours.encode(text)) == text
    # llama.cpp, and the tokenizer.json of Llama 2, begin each stretch of text with a space.
    h = ours.encode("h", add_special_tokens=False)
    assert ours.encode("h</s>h") == [1, *h, 2, *h]
    assert ours.decode([1, *h, 2, *h]) == "h h"


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    ours, theirs = _both(tmp_path, sentencepiece_metadata())
    ids = ours.encode("a你", add_special_tokens=False)
    assert ids == theirs("a你", add_special_tokens=False)["input_ids"]
    assert [ours.piece(token) for token in ids[-3:]] == [b"\xe4", b"\xbd", b"\xa0"]
    assert ours.decode(ids[:-1]) == "a\ufffd"


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    ours, _ = _both(tmp_path, sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    assert not ours.strips_first_space
    assert ours.decode(ours.encode(" hello")) == " hello"
    assert ours.encode("h", add_special_tokens=False) != ours.encode(" h", add_special_tokens=False)


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="its vocabulary has no scores"):
        _both(tmp_path, sentencepiece_metadata() | {"tokenizer.ggml.scores": None})
