"""Engines of one process share the bytes of their KV blocks: an idle one leaves them to the others, and gives their memory back."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.kv_sharing import KvSharing, SharedBlocks
from chairlift.errors import InvalidSetting
from chairlift.trim import trim

TOTAL = 24 << 20
# In large steps without drafts the engines do the same, however long a step takes.
SIZES = {
    "max_model_len": 128,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "threads": 1,
    "load_format": "dummy",
    "speculative_config": {"method": "off"},
}
LEAST = 8
PROMPT, ANSWER = 70, 50


@pytest.fixture(scope="module")
def wide_model(byte_model, tmp_path_factory):
    """A model whose KV blocks have some memory pages in each layer."""
    directory = tmp_path_factory.mktemp("wide_model")
    config = json.loads((byte_model / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes((byte_model / "tokenizer.json").read_bytes())
    return directory


class Models:
    """Engines that take turns, as in a step loop."""

    def __init__(self, directory, *settings):
        self.sharing, self.engines, self.tokens = KvSharing(), [], defaultdict(list)
        for number, one in enumerate(settings):
            engine = Engine(EngineConfig(model=str(directory), **SIZES | {"kv_cache_memory_bytes": TOTAL} | one))
            self.engines.append(engine)
            self.sharing.add(number, engine)
        self.most = self.engines[0].shared_blocks.most
        self.peaks = Counter()

    def ask(self, number, count, seed=0):
        """Adds requests with different prompts."""
        for tag in range(count):
            prompt = np.random.default_rng(1000 * seed + tag).integers(0, 250, PROMPT).astype(np.int32)
            self.engines[number].add(
                EngineRequest.of(1000 * seed + tag, prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0))
            )

    def step(self, number):
        """Runs a step of one engine."""
        self.sharing.divide()
        assert sum(self.limit(at) for at in range(len(self.engines))) <= self.most
        if (outputs := self.engines[number].step()) is not None:
            tags, tokens = np.frombuffer(outputs.tags, np.uint64), np.frombuffer(outputs.tokens, np.int32)
            for tag, token in zip(tags.tolist(), tokens.tolist(), strict=True):
                self.tokens[number, tag].append(token)
        self.peaks[number] = max(self.peaks[number], self.engines[number].blocks_used()[0])
        self.engines[number].check()

    def run(self):
        """Steps until no engine has work."""
        while any(engine.has_work for engine in self.engines):
            for number, engine in enumerate(self.engines):
                if engine.has_work:
                    self.step(number)

    def limit(self, number):
        return self.engines[number].stats().total_blocks

    def close(self):
        for engine in self.engines:
            engine.close()


def resident():
    """Bytes of this process's memory, without what the allocator keeps."""
    trim()
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def test_a_busy_model_gets_all_but_the_minimum_of_an_idle_one(wide_model):
    models = Models(wide_model, {}, {})
    models.ask(0, 60)
    models.run()
    assert models.limit(1) == LEAST
    assert models.peaks[0] > 0.9 * (models.most - LEAST)
    models.close()


def test_both_progress_while_both_are_busy_and_neither_preempts_for_the_other(wide_model):
    alone = Models(wide_model, {})
    alone.ask(0, 60)
    alone.run()
    alone.close()
    models = Models(wide_model, {}, {})
    models.ask(0, 60)
    for _ in range(10):
        models.step(0)
    held, before = models.engines[0].blocks_used()[0], models.engines[0].stats().preemptions
    assert held > 0.9 * (models.most - LEAST)
    models.ask(1, 60)
    models.step(1)
    assert models.engines[1].blocks_used()[0] > 0, "its minimum is there at once"
    assert models.engines[0].blocks_used()[0] == held
    assert models.engines[0].stats().preemptions == before
    models.run()
    assert models.peaks[1] > 0.4 * models.most, "the second gets what the first one's requests release"
    for number in range(2):
        assert {tag: tokens for (one, tag), tokens in models.tokens.items() if one == number} == {
            tag: tokens for (_, tag), tokens in alone.tokens.items()
        }
    models.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_memory_of_both_together_is_that_of_one(wide_model):
    models = Models(wide_model, {}, {})
    for number in range(2):  # grows what is not KV, by steps as large as those below
        models.ask(number, 60, seed=3)
        models.run()
        models.engines[number].set_block_limit(0)
    before = resident()
    models.ask(0, 60, seed=1)
    models.run()
    first = resident() - before
    assert first > 0.8 * TOTAL, "what is cached keeps its memory"
    models.ask(1, 60, seed=2)
    models.run()
    assert models.peaks[1] > 0.75 * models.peaks[0]
    both = resident() - before
    # Two caches would have twice the bytes.
    assert both < 1.5 * TOTAL
    given_back = models.limit(1) - models.engines[1].set_block_limit(0)
    assert given_back > 0.4 * models.most
    assert both - (resident() - before) > 0.8 * TOTAL * given_back / models.most
    models.close()


def test_a_model_that_ends_leaves_its_bytes_to_the_others(wide_model):
    models = Models(wide_model, {}, {})
    models.ask(1, 60)
    models.step(1)
    assert models.limit(0) < models.most
    models.engines.pop().close()
    models.sharing.remove(1)
    assert models.limit(0) == models.most
    models.close()


def test_minimums_that_are_more_than_all_bytes_are_refused(wide_model):
    with pytest.raises(InvalidSetting, match=r"--kv-cache-memory-bytes \d+ is for all models, .* the 2 loaded ones needs \d+: raise it"):
        Models(
            wide_model,
            {"max_model_len": 500, "kv_cache_memory_bytes": TOTAL // 5},
            {"max_model_len": 500, "kv_cache_memory_bytes": TOTAL // 5},
        )


def test_the_recurrent_states_of_models_are_taken_from_the_bytes_of_all():
    class Fake:
        def __init__(self, *sizes):
            self.shared_blocks, self.limit = SharedBlocks(*sizes), None

        def set_block_limit(self, blocks):
            self.limit = blocks
            return blocks

        def blocks_used(self):
            return 0, 0, 1000

    sharing, plain, hybrid = KvSharing(), Fake(100, 10, 1000, 100_000), Fake(50, 100, 200, 100_000, 30_000)
    sharing.add(0, plain)
    sharing.divide()
    sharing.add(1, hybrid)
    assert plain.limit * 100 + hybrid.limit * 50 + 30_000 == 100_000
    with pytest.raises(InvalidSetting, match="the 3 loaded ones needs 106100"):
        sharing.add(2, Fake(1, 100, 200, 100_000, 70_000))


def test_blocks_that_a_flag_counts_are_not_shared(wide_model):
    engine = Engine(EngineConfig(model=str(wide_model), **SIZES, num_kv_blocks=100))
    assert engine.shared_blocks is None
    engine.close()
    engine = Engine(EngineConfig(model=str(wide_model), **SIZES, kv_cache_memory_bytes=TOTAL))
    blocks = engine.shared_blocks
    assert blocks == SharedBlocks(blocks.block_bytes, LEAST, TOTAL // blocks.block_bytes - 1, TOTAL)
    engine.close()
