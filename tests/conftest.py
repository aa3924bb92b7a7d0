import json
import os
import shutil
import signal
from pathlib import Path

# Before numpy and torch, which read it. Several test processes share the cores: threads that wait for each other's part of a small step
# would take more CPU time than the step. A test that is about threads says how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import chairlift.runner  # noqa: F401  (before torch, which reads what this sets)
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf import GGUFTensors
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL

pytest_plugins = ["expected_skips", *["quick_interpreter"] * ("TRITON_INTERPRET" in os.environ)]

# How long a client of a test waits for an answer is a guard: the machine may have other work for longer than httpx's five seconds.
for wait in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, wait, 60.0)  # noqa: SLF001

# A shell's background jobs ignore it, and with it what the tests send themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model as `locate` gives it: configuration, tokenizer, and a link to the GGUF file; downloaded the first time."""
    return locate(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def hf_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with its weights in model.safetensors, dequantised, for transformers."""
    directory = tmp_path_factory.mktemp("hf_model") / "model"
    shutil.copytree(model_dir, directory, symlinks=True)
    tensors = GGUFTensors((directory / LINK).resolve())
    weights = {name: np.ascontiguousarray(tensors.values(name)) for name in tensors.entries}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / LINK).unlink()
    return directory


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for `load_format="dummy"` with a tokenizer: 256 bytes, some pairs of them, `</s>` and the control token `[CALL]`."""
    directory = tmp_path_factory.mktemp("byte_model")
    alphabet = sorted(ByteLevel.alphabet())
    pairs = ['{"', '":', '",', "Ġ{", "Ġ[", "Ġ1", "ab", "00", "Ġtr", "ue", "Ã©"]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *pairs])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in pairs if len(pair) == 2]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(["</s>", "[CALL]"])
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id("</s>")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": eos, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
