"""Vocabularies in other files than tokenizer.json, and what tokenizer_config.json adds to them."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cpu_cost import cost
from gguf_files import tokenizer_of_bytes
from tekken_files import write_tekken
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from chairlift.checkpoint.plain_text import plain
from chairlift.checkpoint.pre_tokenizers import split_into_bytes
from chairlift.checkpoint.sentencepiece import Kind, Vocabulary, merges, unigram
from chairlift.checkpoint.tekken import tekken_tokenizer
from chairlift.checkpoint.tokenizer_files import load_backend
from chairlift.errors import UnsupportedModel
from chairlift.grammar.trial import Vocabulary as MaskedVocabulary
from chairlift.tokenizer import Tokenizer, eos_token_ids

DATA = Path(__file__).parents[1] / "data" / "sentencepiece"
"""Three tiny models that SentencePiece 0.2.3 trained, and the ids that it gives for texts."""
EXPECTED: dict[str, list[tuple[str, list[int]]]] = json.loads((DATA / "expected.json").read_text())


def directory_with(tmp_path: Path, model: str, **config: Any) -> Path:
    shutil.copyfile(DATA / f"{model}.model", tmp_path / "tokenizer.model")
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("model", sorted(EXPECTED))
def test_ids_are_those_of_sentencepiece(tmp_path: Path, model: str) -> None:
    tokenizer = Tokenizer(directory_with(tmp_path, model, add_bos_token=False))
    for text, ids in EXPECTED[model]:
        assert tokenizer.encode_pieces([(text, True)]) == ids, text


@pytest.mark.parametrize("model", ["bpe", "unigram-bytes"])
def test_texts_are_read_back(tmp_path: Path, model: str) -> None:
    tokenizer = Tokenizer(directory_with(tmp_path, model))
    for text, ids in EXPECTED[model]:
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_roles_of_a_tokenizer_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer(directory_with(tmp_path, "bpe"))
    assert tokenizer.encode("a<s>")[0] == 1
    assert tokenizer.encode("a<s>")[-1] == 1
    assert tokenizer.eos_token_ids == {2, 4}  # </s> and <|im_end|>
    assert eos_token_ids(tmp_path) == {2, 4}
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>")) == "a"


def test_t5_ends_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(directory_with(tmp_path, "unigram", tokenizer_class="T5TokenizerFast"))
    assert tokenizer.encode("the") == [*tokenizer.encode("the", add_special_tokens=False), 2]


def test_older_added_tokens(tmp_path: Path) -> None:
    directory_with(tmp_path, "bpe")
    size = Tokenizer(tmp_path).vocab_size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size, "<far>": size + 9}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [size]
    assert tokenizer.vocab_size == size + 1


def test_grammars_read_a_tokenizer_model(tmp_path: Path) -> None:
    file = directory_with(tmp_path, "bpe") / "tokenizer.model"
    vocabulary = MaskedVocabulary(file, 620, (2,)).load()
    tokens = Tokenizer(file.parent).encode("hello", add_special_tokens=False)
    assert b"".join(map(vocabulary.piece, tokens)) == b" hello"  # a model of SentencePiece puts a space before the text


def test_a_class_with_other_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"XLMRobertaTokenizer numbers its tokens otherwise; it needs the model's tokenizer\.json"):
        Tokenizer(directory_with(tmp_path, "unigram", tokenizer_class="XLMRobertaTokenizer"))


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_damaged_models_are_refused_by_one_line(tmp_path: Path, model: str) -> None:
    whole = (DATA / f"{model}.model").read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole), 397)] + [
        whole[:at] + b"\xff" * 9 + whole[at + 9 :] for at in range(0, 4000, 163)
    ]
    messages = []
    for data in damaged:
        (tmp_path / "tokenizer.model").write_bytes(data)
        try:
            Tokenizer(tmp_path).encode("the \uff21 text")
        except UnsupportedModel as error:
            messages.append(str(error))
    assert len(messages) > len(damaged) // 2
    assert not any("\n" in message for message in messages)


def test_no_text_becomes_a_control_token_or_a_byte() -> None:
    tokens = ["<unk>", "<s>", "<0x41>", "\u2581", *"<s>0x41ab"]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.BYTE] + [Kind.NORMAL] * (len(set(tokens)) - 3)
    tokens = list(dict.fromkeys(tokens))
    backend = unigram(Vocabulary(tokens, [0.0] * 3 + [-5.0] * (len(tokens) - 3), kinds, unknown=0, adds_space=False))
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    assert backend.encode("a<s>").ids[-1] == 1
    ids = plain(backend).encode("a<s>b <0x41> <unk>").ids
    assert not {1, 2} & set(ids)
    assert ids[:4] == [tokens.index(text) for text in "a<s>"]


def test_merges_in_the_middle_of_a_text_make_no_control_token() -> None:
    pieces = ["<s>", *"<s>", "s>", "\u2581", "\u2581<", "a"]
    merges = [("\u2581", "<"), ("s", ">"), ("<", "s>")]
    backend = Backend(models.BPE(vocab={text: index for index, text in enumerate(pieces)}, merges=merges))
    backend.normalizer = normalizers.Prepend("\u2581")
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    assert plain(backend).encode("<s>").ids == [6, 4]
    assert plain(backend).encode("a<s>").ids == [5, 7, 1, 4]


def test_a_space_makes_no_control_token_where_spaces_are_not_marked() -> None:
    backend = Backend(models.Unigram([(text, -1.0) for text in ("<unk>", "<s>", *"<s> a")], unk_id=0))
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    assert plain(backend).encode("a <s>").ids == [6, 5, 2, 3, 4]


def test_a_very_long_token_takes_little_time() -> None:
    def found(length: int) -> list[tuple[str, str]]:
        return merges({"a" * length: 0, "a": 1, "a" * (length - 1): 2}, [0.0] * 3)

    assert found(200_000) == [("a", "a" * 199_999), ("a" * 199_999, "a")]
    assert cost(partial(found, 200_000), partial(found, 20_000)) < 40  # in quadratic time 100


def test_whole_words_are_no_control_tokens_either() -> None:
    pieces = ["<unk>", "<s>", *"<s>", "\u2581"]
    backend = Backend(
        models.BPE(vocab={text: index for index, text in enumerate(pieces)}, merges=[], ignore_merges=True, unk_token="<unk>")
    )
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    assert backend.encode("<s>").ids == [1]
    assert plain(backend).encode("<s>").ids == [2, 3, 4]


def test_merged_words_are_no_control_tokens_either() -> None:
    pieces = ["<s>", *"<s>", "s>"]
    backend = Backend(models.BPE(vocab={text: index for index, text in enumerate(pieces)}, merges=[("s", ">"), ("<", "s>")]))
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    assert plain(backend).encode("<s>").ids == [1, 4]


def test_added_tokens_keep_their_ids_without_control_tokens() -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), *((text, -1.0) for text in "<s>ab")], unk_id=0))
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False), AddedToken("<tool>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("bb", normalized=False)])
    whole, kept = backend.encode("abb<tool>").ids, plain(backend).encode("abb<tool>").ids
    assert whole[-2:] == [8, 7]
    assert kept[:2] == whole[:2]
    assert not {1, 7} & set(kept)


def test_tekken(tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 293
    assert [tokenizer.piece(token) for token in tokenizer.encode("hello xyz caf\u00e9")] == [
        *(b"<s>", b"hello", b" ", b"x", b"y", b"z", b" ", b"c", b"a", b"f", b"\xc3\xa9")
    ]
    assert tokenizer.encode("xyz[INST]", add_special_tokens=False) == [30 + 262, 3]  # a whole word needs no merges
    assert tokenizer.eos_token_ids == {2}
    for text in ("\U0001f600 \x00\n", "[INST]", ""):
        assert tokenizer.decode(tokenizer.encode_pieces([(text, True)])) == text
    assert tokenizer.piece(29) == b"<SPECIAL_29>"


def test_tekken_may_name_its_control_tokens(tmp_path: Path) -> None:
    write_tekken(tmp_path / "tekken.json", control=["<unk>", "<s>", "</s>", "[THINK]"])
    assert Tokenizer(tmp_path).encode("[THINK]") == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": []},
        {"config": {}},
        {"vocab": [{"rank": 1}]},
        {"config": {"pattern": ".", "default_vocab_size": 10**12, "default_num_special_tokens": 30}},
        {"config": {"pattern": ".", "default_vocab_size": 10**9 + 263, "default_num_special_tokens": 10**9}},
    ],
)
def test_a_damaged_tekken_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write_tekken(tmp_path / "tekken.json")
    (tmp_path / "tekken.json").write_text(json.dumps(json.loads((tmp_path / "tekken.json").read_text()) | change))
    with pytest.raises(UnsupportedModel, match=r"tekken\.json cannot be read as a tekken\.json \(.*\): is the download complete\?"):
        Tokenizer(tmp_path)


def _byte_level(tmp_path: Path, config: dict[str, Any]) -> Tokenizer:
    """A tokenizer.json of bytes with two added tokens, and this tokenizer_config.json."""
    vocab = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken("<a>", special=True, normalized=False), AddedToken("<b>", special=True, normalized=False, lstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(tmp_path)


def test_flags_of_the_configuration_replace_those_of_the_vocabulary(tmp_path: Path) -> None:
    flags = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
    added = {"256": {"content": "<a>"} | flags, "257": {"content": "<b>", "special": True}, "258": {"content": "<c>", "lstrip": True}}
    tokenizer = _byte_level(tmp_path, {"added_tokens_decoder": added | {"999": {"content": "<far>"}}, "pad_token": "<d>", "eos_token": "!"})
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("q <a> z <b> <c>!<d>")]
    assert pieces == [b"q", b" ", b"<a>", b"z", b"<b>", b"<c>", b"!", b"<", b"d", b">"]
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == {tokenizer.encode("!")[0]}
    assert tokenizer.encode("!")[0] in tokenizer.special_token_ids


def test_the_files_of_older_versions_of_transformers(tmp_path: Path) -> None:
    older = {"eos_token": {"content": "<end>", "lstrip": False}, "bos_token": "<a>", "additional_special_tokens": ["<tool>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<word>": 258, "<end>": 259, "<tool>": 260, "<far>": 999}))
    tokenizer = _byte_level(tmp_path, {"eos_token": "!"})
    assert tokenizer.encode("<word><end><tool>") == [258, 259, 260]
    assert tokenizer.special_token_ids == {256, 257, 259, 260}
    assert tokenizer.eos_token_ids == eos_token_ids(tmp_path) == {259}
    assert tokenizer.special_tokens == {"bos_token": "<a>", "eos_token": "<end>"}
    newer = _byte_level(tmp_path, {"eos_token": "!", "added_tokens_decoder": {"257": {"content": "<b>", "special": True}}})
    assert newer.eos_token_ids == {newer.encode("!")[0]}
    assert newer.vocab_size == 258


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "hello world",
    " two  spaces\n\n x ",
    "don't I'LL 1234",
    "na\u00efve cafe\u0301 \u6a21\u578b \U0001f642",
    "a<|endoftext|>b</s><mask>",
]


@pytest.mark.parametrize(
    ("name", "special", "model_type"),
    [
        ("Qwen2Tokenizer", ["<|endoftext|>"], "qwen2"),
        ("GPT2TokenizerFast", ["<|endoftext|>"], None),
        ("RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], None),
        (None, ["<|endoftext|>"], "qwen2"),
    ],
)
def test_vocabularies_with_merges_are_those_of_transformers(
    tmp_path: Path, name: str | None, special: list[str], model_type: str | None
) -> None:
    words = ["he", "ll", "hell", "hello", "\u0120t", "\u0120tw", "\u0120two"]
    (tmp_path / "vocab.json").write_text(json.dumps({text: index for index, text in enumerate([*special, *BYTES, *words])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n\u0120 t\n\u0120t w\n\u0120tw o\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if name else {}))
    expected, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text), text
    assert tokenizer.encode_pair("hello", "two")[0] == expected.encode("hello", "two")
    assert tokenizer.eos_token_ids == {expected.eos_token_id}
    MaskedVocabulary(tmp_path / "vocab.json", tokenizer.vocab_size, (expected.eos_token_id,)).load()


@pytest.mark.parametrize("cased", [False, True])
def test_vocabularies_of_words_are_those_of_transformers(tmp_path: Path, cased: bool) -> None:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "world",
        "two",
        "don",
        "'",
        "t",
        "cafe",
        "na",
        "##ive",
        "x",
        "1",
        "##2",
        "\u6a21",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}))
    expected, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in (*TEXTS, "Hello [MASK] NA\u00cfVE 12"):
        assert tokenizer.encode(text) == expected.encode(text), text
    assert tokenizer.encode_pair("hello", "two")[0] == expected.encode("hello", "two")


SETTINGS = ({}, {"do_lower_case": True}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False})


@pytest.mark.parametrize("name", ["BertTokenizerFast", "DistilBertTokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("cased", [False, True])
def test_settings_of_bert_replace_those_of_its_tokenizer_json(tmp_path: Path, name: str | None, cased: bool) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "naive", "na\u00efve", "\u6a21", "\u6a21\u578b"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    roles = {f"{word[1:-1].lower()}_token": word for word in words[:5]} | ({"tokenizer_class": name} if name else {})
    for settings in SETTINGS:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles | settings))
        expected, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
        for text in ("Hello na\u00efve", "hello \u6a21\u578b NAIVE"):
            assert tokenizer.encode(text) == expected.encode(text), settings


@pytest.mark.parametrize("name", ["GPT2TokenizerFast", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("spaced", [False, True])
def test_the_space_before_a_text_is_that_of_the_settings(tmp_path: Path, name: str, spaced: bool | None) -> None:
    if name == "GPT2TokenizerFast":
        _byte_level(tmp_path, {})
    else:
        marks = ["\u2581", "x", "xy", "\u2581x", "\u2581xy", "y"]
        vocab = {text: index for index, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *marks])}
        merged = [("\u2581", "x"), ("x", "y"), ("\u2581x", "y")]
        backend = Backend(models.BPE(vocab, merged, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "unk_token": "<unk>", "add_prefix_space": spaced}))
    expected, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in ("xy x", "x"):
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))


def test_the_rule_of_mistral_that_a_flag_asks_for(tmp_path: Path) -> None:
    vocab = {text: index for index, text in enumerate([*BYTES, "oW"])}
    backend = Backend(models.BPE(vocab, [("o", "W")]))
    split_into_bytes(backend, [r" ?\p{L}+|\s+|."])
    backend.save(str(tmp_path / "tokenizer.json"))
    found = [load_backend(tmp_path / "tokenizer.json", {"fix_mistral_regex": flag}).encode("oW").tokens for flag in (False, True)]
    assert found == [["oW"], ["o", "W"]]


def test_unknown_settings_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = {
        "model_max_length": 512,
        "image_token": "<image>",
        "padding_side": "left",
        "legacy": True,
        "max_length": 9,
        "do_lower_case": True,
    }
    _byte_level(tmp_path, usual | {"split_special_tokens": False})
    assert caplog.text == ""
    _byte_level(tmp_path, usual | {"split_special_tokens": True, "depth": 3})
    assert "entries that are not known here and not used: split_special_tokens, depth" in caplog.text


def test_without_a_decoder_tokens_are_words(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("one two", "two  three one", ""):
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids)
        assert tokenizer.min_tokens(text) <= len(ids)


UNIGRAM = models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0), ("b", -2.0), ("\u2581hello", -3.0), ("ab", -2.5)], 0, False)
BPE = {"vocab": {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "ab": 4, "hello": 5}, "merges": [("a", "b")]}
WORDS = models.WordLevel({"<unk>": 0, "a": 1, "hello": 2}, unk_token="<unk>")


@pytest.mark.parametrize(
    ("model", "least"),
    [
        (UNIGRAM, 2000 / 5),
        (models.BPE(**BPE, unk_token="<unk>", fuse_unk=True), 2000 / 5),
        (models.BPE(**BPE), 2000 / 5),
        (models.BPE(**BPE, unk_token="<unk>"), 4000 / 5),
        (WORDS, 0),
    ],
)
def test_unknown_characters_that_become_one_token_do_not_count(tmp_path: Path, model: Any, least: float) -> None:
    backend = Backend(model)
    backend.decoder, backend.pre_tokenizer = decoders.Metaspace(), pre_tokenizers.Metaspace(split=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("\U00012000" * 3000, "a \U00012000" * 500, "ab" * 1000 + "z" * 2000, "hello" * 50, "ahz " * 99, "", "a"):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("ab" * 1000 + "z" * 2000) == least


def test_bytes_that_a_vocabulary_lacks_do_not_count(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1, "\u00c3": 2, "\u00a9": 3, "\u00c3\u00a9": 4}, [("\u00c3", "\u00a9")]))
    backend.decoder, backend.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text, least in (("\u00e9ab" * 100, 150), ("\u00c5" * 100, 0), ("\u4e00" * 100, 0)):
        assert tokenizer.min_tokens(text) == least <= len(tokenizer.encode(text))


def test_the_first_token_loses_only_the_space_that_encoding_adds(tmp_path: Path) -> None:
    vocabulary = {
        token: number for number, token in enumerate(["<unk>", "\u2581", "a", "b", "\u2581\u2581\u2581", "\u2581a\u2581b", "\u2581b"])
    }
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for ids, text, theirs in (([1, 2, 6], "a b", "a b"), ([4, 2], "  a", "a"), ([5], "a b", "ab"), ([1, 4], "   ", "   ")):
        assert (tokenizer.decode(ids), backend.decode(ids)) == (text, theirs)


NESTED = decoders.Sequence(
    [decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()]), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
OTHER_MARKS = decoders.Sequence([decoders.Replace("\u00a4", "-"), decoders.Fuse()])


@pytest.mark.parametrize("decoder", [NESTED, OTHER_MARKS])
def test_decoders_may_be_nested_and_replace_any_text(tmp_path: Path, decoder: Any) -> None:
    pieces = ["[UNK]", "\u2581one", "\u2581two", "\u00a4", "<0xC3>", "<0xA9>"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for ids in ([1, 2, 3, 1], [4, 5, 2], [3, 3]):
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_regular_expressions_of_a_decoder_are_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.Replace(Regex("a+"), "b")
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match=r"replaces \{'Regex': 'a\+'\} in tokens"):
        Tokenizer(tmp_path)


def test_special_tokens_may_be_listed_by_their_roles(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path, {"extra_special_tokens": {"image_token": "a", "audio_token": {"content": "b"}}})
    assert set(tokenizer.encode("ab")) <= tokenizer.special_token_ids
    assert tokenizer.special_token_ids.isdisjoint(tokenizer.encode("c"))


@pytest.mark.parametrize("lower", [False, True])
def test_sentence_transformers_may_lower_texts(tmp_path: Path, lower: bool) -> None:
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": lower}))
    tokenizer = _byte_level(tmp_path, {})
    assert (tokenizer.encode("\u00c0B<a>") == tokenizer.encode("\u00e0b<a>")) == lower
    assert tokenizer.encode("<a>") == [256]


def test_vocabularies_of_other_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"vocab.json belongs to CLIPTokenizer, for which the model's tokenizer.json is needed"):
        load_backend(tmp_path / "vocab.json", {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(UnsupportedModel, match=r"vocab.json cannot be read as a vocabulary"):
        load_backend(tmp_path / "vocab.json", {"tokenizer_class": "Qwen2Tokenizer"})


def test_a_tekken_beside_a_tokenizer_json_says_how_texts_are_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tekken(tmp_path / "tekken.json")
    right = load_backend(tmp_path / "tekken.json", {})
    text = "hello xyz hell"
    for pattern, is_right in ((r" ?\p{L}+|\s+|.", True), (r"\p{L}|\s", False)):
        caplog.clear()
        converted = tekken_tokenizer(tmp_path / "tekken.json")
        split_into_bytes(converted, [pattern])
        converted.save(str(tmp_path / "tokenizer.json"))
        assert (converted.encode(text).ids == right.encode(text, add_special_tokens=False).ids) == is_right
        found = load_backend(tmp_path / "tokenizer.json", {})
        assert found.encode(text).ids == right.encode(text, add_special_tokens=False).ids
        assert ("whose rule is used" in caplog.text) != is_right


def test_texts_to_embed_end_with_the_end_token_if_the_settings_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_of_bytes(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = Tokenizer(tmp_path).encode("hello")
    assert plain == AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"]
    (tmp_path / "modules.json").write_text("[]")  # only models of sentence-transformers
    assert caplog.text == ""
    assert Tokenizer(tmp_path).encode("hello") == [*plain, 256]
    assert "it is added" in caplog.text
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    ends = [(token, backend.token_to_id(token)) for token in ("<|user|>", "<|end|>")]
    for single, expected in (("<|user|> $A", [257, *plain, 256]), ("$A <|end|>", [*plain, 256])):
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[end for end in ends if end[0] in single])
        backend.save(str(tmp_path / "tokenizer.json"))
        assert Tokenizer(tmp_path).encode("hello") == expected


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    directory_with(tmp_path, "bpe")
    assert _byte_level(tmp_path, {}).encode("<b>") == [257]
    assert load_backend(tmp_path / "tokenizer.model", {}).get_vocab_size() == 620
