"""Readers of model files meet damaged ones: each is read, or refused with one line.

FUZZ_SECONDS sets how long each kind of file is damaged in new ways (`make fuzz-files`); without it the ways are few and always the same.
"""

import copy
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import adapters
import numpy as np
import pytest
from gguf_files import byte_level_metadata, gguf_of, sentencepiece_metadata, split_gguf_of, tiny_model, write_vocabulary
from safetensors.numpy import save_file
from tekken_files import write_tekken

from chairlift.checkpoint.adapter import AdapterFiles
from chairlift.checkpoint.generation_config import recommended_sampling
from chairlift.checkpoint.gguf import GGUFTensors, convert
from chairlift.checkpoint.safetensors_file import tensor_files
from chairlift.checkpoint.weight_files import weight_files
from chairlift.errors import ChairliftError, UnsupportedModel
from chairlift.models.config import load_shape
from chairlift.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "sentencepiece"
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
TURNS = 15
"""Ways without FUZZ_SECONDS."""
LONGEST = 1000
"""Most characters of a message."""
NUMBERS = [b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", (2**63).to_bytes(8, "little"), b"\1\0\0\0\0\0\0\0", (2**20).to_bytes(4, "little")]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\ud800",
    "a" * 5000,
]
ODD += [[], {}, [[]], [None], {"": {}}, [2**63] * 3, "model.safetensors", "<s>"]


class Kind(NamedTuple):
    """A kind of files: how they are made in a directory, how they are read from it, and which of them are damaged."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    damaged: tuple[str, ...]


def _read_gguf(directory: Path) -> None:
    path = next(iter(sorted(directory.glob("*.gguf"))))
    shutil.rmtree(directory / "out", ignore_errors=True)
    convert(path, directory / "out")
    tensors = GGUFTensors(path)
    for name in list(tensors.entries)[:3]:
        tensors.values(name)
    _use(Tokenizer(directory / "out"))


def _use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello <s> \uff21 <|end|> 12 \U0001f600")
    tokenizer.decode([*ids, 0, 10**6])
    tokenizer.encode_pieces([("hello <s>", True)])
    _ = tokenizer.eos_token_ids, tokenizer.suppressed_token_ids, tokenizer.longest_token, tokenizer.num_closing_tokens


def _make_weights(directory: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensor in zip(names, "ab", strict=True):
        save_file({tensor: np.ones((2, 3), np.float32), f"{tensor}2": np.zeros(4, np.float16)}, directory / name)
    index = {"metadata": {"total_size": 64}, "weight_map": {"a": names[0], "a2": names[0], "b": names[1], "b2": names[1]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_weights(directory: Path) -> None:
    assert all(path.parent == directory for path in weight_files(directory))
    for name, file in tensor_files(directory).items():
        file.data(name)


def _make_settings(directory: Path) -> None:
    write_vocabulary(directory, byte_level_metadata("gpt-2") | {"tokenizer.chat_template": "{{ messages }}"})
    tiny_model("llama").config.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5, "suppress_tokens": [3]}))


def _read_settings(directory: Path) -> None:
    _use(Tokenizer(directory))
    recommended_sampling(directory)
    load_shape(directory)


def _make_adapter(directory: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (directory / "config.json").write_text(json.dumps(sizes))
    tensors = adapters.matrices(directory)
    adapters.write(directory, tensors, rank_pattern={"q_proj": 4}, alpha_pattern={r"layers\.0\..*_proj": 2.5})
    adapters.write_gguf(directory / "adapter.gguf", tensors, 2, 1)


def _make_split(directory: Path) -> None:
    split_gguf_of(tiny_model("llama"), directory / "tiny.gguf", 8)


SENTENCEPIECE = sentencepiece_metadata()
UNIGRAM = SENTENCEPIECE | {"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": [0, 4, 0, 0, *[0] * 1025]}
KINDS = {
    "gguf": Kind(lambda directory: gguf_of(tiny_model("llama"), directory / "tiny.gguf"), _read_gguf, ("tiny.gguf",)),
    "gguf-sentencepiece": Kind(
        lambda directory: gguf_of(tiny_model("llama"), directory / "tiny.gguf", replaced=SENTENCEPIECE), _read_gguf, ("tiny.gguf",)
    ),
    "gguf-unigram": Kind(
        lambda directory: gguf_of(tiny_model("llama"), directory / "tiny.gguf", replaced=UNIGRAM), _read_gguf, ("tiny.gguf",)
    ),
    "gguf-split": Kind(_make_split, _read_gguf, tuple(f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3))),
    "weights": Kind(
        _make_weights, _read_weights, ("model.safetensors.index.json", *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)))
    ),
    "settings": Kind(_make_settings, _read_settings, ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")),
    "adapter": Kind(_make_adapter, AdapterFiles, ("adapter_config.json", "adapter_model.safetensors")),
    "adapter-gguf": Kind(_make_adapter, lambda directory: AdapterFiles(directory / "adapter.gguf"), ("adapter.gguf",)),
    "tekken": Kind(
        lambda directory: write_tekken(directory / "tekken.json"), lambda directory: _use(Tokenizer(directory)), ("tekken.json",)
    ),
    **{
        f"tokenizer-model-{name}": Kind(
            lambda directory, name=name: shutil.copyfile(DATA / f"{name}.model", directory / "tokenizer.model"),  # type: ignore[misc]
            lambda directory: _use(Tokenizer(directory)),
            ("tokenizer.model",),
        )
        for name in ("bpe", "unigram")
    },
}


def _damaged_bytes(random: Random, data: bytes) -> bytes:
    """Changes, cuts, repeats or removes some bytes, mostly of the beginning, where headers are."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        end = len(changed) if random.random() < 0.3 else min(len(changed), 1 << random.randrange(4, 16))
        at = random.randrange(end + 1)
        size = random.choice((1, 4, 8, random.randrange(100)))
        way = random.randrange(5)
        if way == 0:
            changed[at : at + size] = random.randbytes(size)
        elif way == 1:
            changed[at : at + len(number)] = (number := random.choice(NUMBERS))
        elif way == 2:
            del changed[at : at + size]
        elif way == 3:
            changed[at:at] = changed[at : at + size]
        else:
            del changed[at:]
    return bytes(changed)


def _damaged_json(random: Random, data: bytes) -> bytes:
    """Puts an odd value, or a value from elsewhere, in some places."""
    if random.random() < 0.03:
        return b"[" * 100_000
    value = json.loads(data)
    places = list(_places(value))
    for container, key in random.sample(places, min(len(places), random.choice((1, 1, 2, 4)))):
        odd = random.choice(ODD) if random.random() < 0.7 else copy.deepcopy(random.choice(places)[0])
        if isinstance(container, dict) and random.random() < 0.2:
            container[str(random.choice(ODD))] = container.pop(key, odd)
        elif isinstance(container, dict) or key < len(container):
            container[key] = odd
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


def _refusal(kind: Kind, directory: Path) -> str | None:
    """Reads the files and returns the message with which they are refused; for another error several lines."""
    try:
        kind.read(directory)
    except ChairliftError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers package is no Exception
        return "".join(traceback.format_exception(error))
    return None


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused_with_one_line(name: str, tmp_path: Path) -> None:
    kind, directory = KINDS[name], tmp_path / "files"
    directory.mkdir()
    kind.make(directory)
    kind.read(directory)
    whole = {file: (directory / file).read_bytes() for file in kind.damaged}
    end, turn, refused = time.monotonic() + SECONDS, 0, 0
    while turn < TURNS or time.monotonic() < end:
        seed = f"{name} {turn}" if not SECONDS else f"{name} {os.urandom(8).hex()}"
        random = Random(seed)
        file = random.choice(kind.damaged)
        as_json = file.endswith(".json") and random.random() < 0.8
        damaged = (_damaged_json if as_json else _damaged_bytes)(random, whole[file])
        (directory / file).write_bytes(damaged)
        if (message := _refusal(kind, directory)) is not None:
            refused += 1
        if message is not None and ("\n" in message or len(message) > LONGEST):
            kept = Path(os.environ.get("FUZZ_DIRECTORY", tmp_path)) / f"{seed} {file}".replace(" ", "_")
            kept.write_bytes(damaged)
            pytest.fail(f"{seed}: {file}, kept as {kept}: {message}")
        (directory / file).write_bytes(whole[file])
        turn += 1
    print(f"{name}: {turn} damaged files, {refused} of them refused")
    assert refused > turn // 10


def test_a_message_that_quotes_a_file_is_one_printable_line() -> None:
    message = str(UnsupportedModel("file: " + "a\n\x1b[1m\ud800b" * 1000 + ": download it again"))
    assert message.isprintable()
    assert len(message) < LONGEST
    assert message.startswith("file: a")
    assert message.endswith(": download it again")
