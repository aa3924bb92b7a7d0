import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import write

from chairlift._core import decode_work
from chairlift.config import EngineConfig
from chairlift.layers.device_attention import DecodeLists
from chairlift.runner import cuda_graphs, warm_up
from chairlift.runner.build import build_runner
from chairlift.runner.torch_backend import TorchBackend


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of interpreted kernels, beside other tests on few cores
def test_answers_are_the_same_with_graphs_and_without():
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    # Triton decides whether to interpret when a kernel is defined: so in a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).with_name("check_cuda_graphs.py"))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 63, 64, 256, 500, 512, 4096])
def test_sizes_rise_to_the_largest_step_or_graph(most):
    found = cuda_graphs.sizes(most)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, min(most, cuda_graphs.MAX_SIZE))
    # What fills up a step is less than half of it, and from 8 on less than 8 sequences or a fifth.
    for smaller, larger in itertools.pairwise(found):
        assert larger - smaller <= (smaller if smaller < 8 else max(8, larger // 5))


@pytest.mark.parametrize("longest", [1, 512, 513, 5000, 200_000])
def test_lists_have_room_for_any_step_and_hold_its_work(longest):
    random, seqs, windows = np.random.default_rng(longest), 9, [None, 1, 500, 40_000]
    lists = DecodeLists(seqs, longest, windows, torch.device("cpu"))
    work = lists.work(seqs)
    contexts = [np.full(seqs, longest), *(random.integers(1, longest + 1, random.integers(1, seqs + 1)) for _ in range(40))]
    for context in contexts:
        lengths = np.arange(len(context) + 1, dtype=np.int32), context.astype(np.int32)
        lists.fill(lengths)
        for window in windows:
            expected = np.frombuffer(decode_work(*lengths, window=window), dtype=np.int32).reshape(-1, 4)
            one = work[window]
            assert np.array_equal(one.list[: len(expected)].numpy(), expected)
            bounds = one.units, one.merges, one.parts, one.longest
            assert all(bound >= count for bound, count in zip(bounds, expected[0].tolist(), strict=True))


def test_a_step_fits_the_smallest_graph_if_every_sequence_has_one_token():
    graphs = [SimpleNamespace(size=size) for size in cuda_graphs.sizes(24)]

    def fit(num_tokens, num_seqs):
        return cuda_graphs.smallest_graph(graphs, num_tokens, num_seqs)

    assert [fit(count, count).size for count in (1, 3, 4, 5, 9, 24)] == [1, 4, 4, 8, 16, 24]
    assert fit(25, 25) is fit(4, 3) is fit(512, 1) is None
    assert cuda_graphs.smallest_graph([], 1, 1) is None


def test_all_of_sampling_and_a_copy_are_compiled_at_the_start(tmp_path, monkeypatch):
    write("llama", tmp_path)
    config = EngineConfig(device="cpu", num_kv_blocks=80, max_num_seqs=4)
    runner = build_runner(config, tmp_path, make_backend=partial(TorchBackend, overlaps=False))
    monkeypatch.setattr(runner, "compiles_kernels", True)
    sampler, variants, scored, copied = runner.sampler.tokens, [], [], []
    monkeypatch.setattr(runner.model, "copy", lambda pairs: copied.append(pairs.tolist()))
    sample, score = sampler.sample, sampler.score_rows
    monkeypatch.setattr(sampler, "sample", lambda *given: variants.append(given[-1]) or sample(*given))
    monkeypatch.setattr(sampler, "score_rows", lambda *given: scored.append(given[2].dtype) or score(*given))
    run, tokens = runner.model.run, []
    monkeypatch.setattr(runner.model, "run", lambda step, count, *rest: tokens.append(count) or run(step, count, *rest))
    warm_up.warm_up(runner)
    # Products with quantised weights have kernels for up to 16, 32, 64 and 128 rows.
    assert tokens == [16, 1, 32, 64, 65, 2]
    assert variants == [cuda_graphs.PLAIN] * 5 + [(True, 4)]
    # Of prompts, and of what was drawn.
    assert scored == [torch.int64, torch.int32]
    assert copied == [[[0, 0]]]
    assert not any(array.any() for array in runner.buffers[0].arrays().values())
