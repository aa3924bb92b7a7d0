"""The first steps of a runner: they measure memory and compile kernels. Without torch."""

from __future__ import annotations

import numpy as np

from chairlift.runner.interface import NewSequence
from chairlift.runner.runner import ModelRunner
from chairlift.runner.sampling.logprobs import PromptLogprobs
from chairlift.sampling import SamplingParams

SPLIT_CONTEXT = 1024
"""Tokens of a context that attention on a GPU reads in several splits."""
ROWS = (32, 64, 65, 129)
"""Tokens of steps for which products with quantised weights have other kernels than for up to 16."""
EXPERT_ROWS = (16, 32, 64, 256)
"""Rows of an expert, on average, from which products of experts have other kernels."""
ALL_FEATURES = SamplingParams(top_k=2, presence_penalty=0.5, logprobs=1)
"""Uses every sampling kernel."""


def profile(runner: ModelRunner) -> None:
    """Runs the largest step with every sampling feature over one KV block, so that its peak memory can be measured."""
    max_tokens, max_seqs, context = runner.max_num_batched_tokens, runner.max_num_seqs, runner.max_model_len
    longest = min(max_tokens, context)
    tokens, samples = min(max_tokens, max_seqs * longest), min(max_seqs, max_tokens)
    starts = np.minimum(np.arange(-(-tokens // longest) + 1) * longest, tokens)
    buffers, seqs = runner.buffers[0], len(starts) - 1
    buffers.positions[:tokens] = np.arange(tokens) % longest
    buffers.slot_mapping[:tokens] = buffers.positions[:tokens] % runner.block_size
    buffers.query_starts[: seqs + 1], buffers.context_lens[:seqs] = starts, np.diff(starts)
    buffers.batch_slots[:seqs] = np.arange(seqs)
    buffers.sample_at[:samples] = buffers.sample_slots[:samples] = np.arange(samples)
    for slot in range(samples):
        runner.add_request(slot, NewSequence(ALL_FEATURES, np.zeros(1, dtype=np.int32), 1, 0))
    for _ in range(2):  # during the second step the hidden states of the first are still allocated
        runner.run(tokens, seqs, samples)
    runner.wait()


def warm_up(runner: ModelRunner, expert_counts: tuple[int, int] = (0, 0)) -> None:
    """Runs prefill and decode steps in scratch block 0, so that requests do not wait for one-time initialisation.

    Where no kernels are compiled, a step of one token shows that the model runs: those of a large model take seconds on a CPU.
    `expert_counts` are the number of experts of a layer, and of those that a token uses.
    """
    buffers = runner.buffers[0]
    cases = [(1, 1, SamplingParams(temperature=0.0))]
    if runner.compiles_kernels:
        longest = min(runner.block_size, len(buffers.input_ids), runner.max_model_len)
        cases.insert(0, (longest, longest, SamplingParams()))
        most = min(len(buffers.input_ids), runner.max_model_len)
        experts, used = expert_counts
        lengths = {*ROWS, *(-(-experts * mean // used) for mean in EXPERT_ROWS if used)}
        cases += [(rows, rows, SamplingParams()) for rows in sorted(lengths) if rows <= most]
        # A short chunk, a context in several splits, every sampling feature, a block copy.
        cases.append((min(2, longest), min(SPLIT_CONTEXT, runner.max_model_len), ALL_FEATURES))
    for length, context, params in cases:
        buffers.positions[:length] = np.arange(context - length, context)
        buffers.slot_mapping[:length] = np.arange(length) % runner.block_size
        buffers.query_starts[1], buffers.context_lens[0] = length, context
        buffers.sample_at[0] = length - 1
        tokens = np.zeros(context, dtype=np.int32)
        prompt = PromptLogprobs(0, tokens, 1) if params is ALL_FEATURES else None
        runner.add_request(0, NewSequence(params, tokens, 1, 0, prompt=prompt))
        runner.run(length, 1, 1, int(params is ALL_FEATURES))
    for array in buffers.arrays().values():
        array.fill(0)
