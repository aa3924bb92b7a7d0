"""The Rust scheduler, as Python sees it; times are microseconds on one clock of the caller's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PREEMPTION_REASONS",
    "TIMELINE_STATES",
    "Decoder",
    "DecoderBlock",
    "EmptyPrompt",
    "KvCache",
    "Linear",
    "NeverFits",
    "NoNewTokens",
    "Outputs",
    "QueueFull",
    "Rejected",
    "Scheduler",
    "StepBuffers",
    "StepPlan",
    "TensorFile",
    "TooLong",
    "__version__",
    "block_types",
    "choose",
    "decode_work",
    "instruction_set",
    "max_splits",
    "prefill_work",
    "replay",
    "score",
    "settings",
    "simulate",
    "step_times",
    "what_if",
]

__version__: str

TIMELINE_STATES: tuple[str, ...]
"""Names of the states that a request's time is divided into."""

PREEMPTION_REASONS: tuple[str, ...]
"""Names of the reasons for which a running sequence loses its blocks."""

class Rejected(ValueError):
    """A request that was turned away."""

class EmptyPrompt(Rejected):
    """The prompt has no tokens."""

class NoNewTokens(Rejected):
    """No new token was asked for."""

class TooLong(Rejected):
    """Prompt and output exceed the model's context."""

class NeverFits(Rejected):
    """Prompt and output exceed the whole KV cache."""

class QueueFull(Rejected):
    """As many requests wait as may: `args` are the message and the microseconds after which to come back."""

@final
class StepBuffers:
    """The arrays of one step, shared with the model runner: writable, C-contiguous int32."""

    def __new__(
        cls,
        *,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        batch_slots: NDArray[np.int32],
        sample_at: NDArray[np.int32],
        sample_slots: NDArray[np.int32],
        copies: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        table_writes: NDArray[np.int32] | None = None,
    ) -> StepBuffers: ...

@final
class StepPlan:
    """A planned step, spent by `Scheduler.commit`."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def num_table_writes(self) -> int: ...
    @property
    def admitted(self) -> list[tuple[int, int, int, int, int]]:
        """One a sequence admitted in this step: row, sequence, tag, cached prompt tokens, microseconds it had queued."""
    @property
    def preempted(self) -> list[int]:
        """Tags of the sequences that lost their blocks to make room."""
    @property
    def swap_out(self) -> list[tuple[int, int]]:
        """Blocks to be copied to the host pool, (device, host), before anything else."""
    @property
    def swap_in(self) -> list[tuple[int, int]]:
        """Blocks to be copied from the host pool, (host, device), after that; then come the copies of the step buffers."""

@final
class Outputs:
    """What a step gave: packed little-endian arrays of equal length, one entry a token."""

    @property
    def tags(self) -> bytes:
        """uint64: whose token."""
    @property
    def tokens(self) -> bytes:
        """int32: the token."""
    @property
    def finishes(self) -> bytes:
        """uint8: 0 goes on, 1 stop, 2 length, 3 error (the entry's token is none)."""
    @property
    def ended(self) -> list[dict[str, Any]]:
        """One ledger a request that finished: see `Scheduler.explain`."""

@final
class Scheduler:
    """Chooses each step's tokens and the KV blocks they live in."""

    def __new__(cls, *, journal: bool = False, hash_key: int = 0, draft_tokens: int = 0, **settings: Any) -> Scheduler:
        """Takes `settings` by the names of the function `settings`, and its defaults for the others; `journal`: calls are recorded.

        `draft_tokens` is how many tokens are proposed for a sequence and step, at most; 0 for none.
        `hash_key` of 128 bits is secret, where clients choose tokens. Raises ValueError for limits that run nothing, and for a value that
        a setting does not take.
        """
    def add(
        self,
        tag: int,
        prompt: NDArray[np.int32],
        max_new_tokens: int,
        stop: Sequence[int],
        now: int,
        *,
        salt: bytes = ...,
        priority: int = 0,
        tenant: str = "",
        weight: int = 1,
        deadline: int | None = None,
        ttft_deadline: int | None = None,
        predicted_tokens: int | None = None,
        draft: bool = False,
    ) -> int:
        """Queues a request and returns its sequence's handle; raises a `Rejected` if it can never run or the queue is full.

        `draft` says that several of its tokens can be sampled in one step.
        """
    def fork(self, seq: int, tag: int, now: int) -> int:
        """Adds a sibling with the same prompt, which will share its blocks; KeyError if the sequence has ended."""
    def prepared(self, seq: int, spent: Sequence[tuple[str, int]]) -> None:
        """Books states that the request was in before it was added, with their microseconds; ValueError for an unknown state."""
    def abort(self, seq: int, now: int) -> bool:
        """Ends a request in whatever state it is; False if it has ended already."""
    def stop(self, seq: int, now: int) -> bool:
        """As `abort`, for a caller who has what it asked for: it counts as a stop."""
    def fail(self, seq: int, now: int) -> bool:
        """As `abort`, for one that cannot be computed: it counts as failed."""
    def expire(self, now: int) -> list[dict[str, Any]]:
        """Ends the requests that missed their deadlines, or surely will; returns their ledgers. To be called before `plan`."""
    def plan(self, buffers: StepBuffers, now: int) -> StepPlan | None:
        """Chooses the next step and fills the buffers; None when there is nothing to run."""
    def commit(self, plan: StepPlan, sampled: NDArray[np.int32], now: int) -> Outputs:
        """Takes in the sampled tokens (int32, one a sampled position, negative: none), plans in order."""
    def tokens(self, seq: int) -> tuple[bytes, int]:
        """A sequence's tokens so far (int32) and how many are its prompt; KeyError if it has ended."""
    def explain(self, tag: int) -> dict[str, Any] | None:
        """The ledger of a live request, or of one of the last 10,000 that ended: times by cause in microseconds, and what it used.

        `ahead` has (tenant, microseconds) of those whose requests ran while it waited for its first step, the most first.
        """
    def snapshot(self, now: int, max_waiting: int, max_cells: int) -> dict[str, Any]:
        """Who has which row, who waits for what, what each KV block is, and the steps since the last look.

        `cells` are little-endian uint32: 0 free, 1 cached, 2 shared, 3 + row of its one holder; `blocks_per_cell` to each. A step's
        `rows` has one character a row: d decodes, p computes its prompt, r computes again, - has no token in it, and a space is free.
        Steps are noted for three seconds after a look. Rows, waiting and steps are dicts; times are microseconds.
        """
    def wake_at(self) -> int | None:
        """When `plan`, having given None, may give a step without another call before; None: never."""
    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what is true now."""
    def usage(self) -> dict[str, Any]:
        """What each tenant and each class used, under "tenants" and "classes"."""
    def journal(self) -> bytes:
        """What was recorded since the last call."""
    def check(self) -> None:
        """Panics unless every invariant holds."""

def settings() -> list[dict[str, Any]]:
    """The table of a scheduler's settings: dicts with name, doc and default, and with least, most and optional, or with names."""

def replay(journal: bytes) -> dict[str, Any]:
    """Makes every recorded call again.

    Returns config, calls, truncated, hash, differs_at (the first plan that came out otherwise, or None), step_model (microseconds of an
    empty step, a prompt token, a decoding sequence, a token of context, a pair of tokens of a prompt), and report: what came of the
    requests in the time that was recorded, as of `simulate`, with times from the first call. Raises ValueError for what is no journal.
    """

def what_if(journal: bytes, changes: dict[str, Any]) -> dict[str, Any]:
    """Lives the recorded requests again in virtual time, under the recorded settings but for `changes`.

    These are the arguments of `Scheduler`, but for block_size and journal. Steps take what the journal's took. Times count
    from the first call. Returns config and report, as `simulate` gives it. Raises ValueError.
    """

def simulate(
    requests: NDArray[np.int64],
    names: NDArray[np.int64],
    name_block: int,
    tenants: Sequence[tuple[str, int]],
    settings: dict[str, Any],
    step_time: tuple[Sequence[tuple[float, float]], float, float, float],
    *,
    replicas: int = 1,
    routing: str = "round-robin",
) -> list[dict[str, Any]]:
    """Runs requests, in the order of their arrivals, through as many schedulers in virtual time; a report of each.

    `requests` is int64 [N, 10]: arrival (microseconds), tokens of prompt, of output, and allowed; tenant (its place in `tenants`, names
    and weights), priority; microseconds to the deadline, and to that of the first token; predicted tokens (-1: none); how many of `names`
    are its own, each for `name_block` tokens of its prompt: equal names mean equal tokens up to there. `settings` are the arguments of
    `Scheduler`, but for journal. A step takes what a curve through points (tokens, microseconds) says, and microseconds for each sequence
    that decodes, token of context, and pair of a prompt's tokens. `routing` is round-robin, least-loaded, prefix-aware or predicted.

    A report has ended (int64 [N, 35]: tag, finish as in `Outputs` or 4 for a missed deadline, arrived, started, first token, ended, tokens
    of prompt, cached, of output, computed, recomputed; preemptions, swaps, block-microseconds, longest time between two tokens, and time by
    each of `causes`), refused (tags), steps, chunks (of sequences in steps), ended_at, stats, gaps and step_times (int64 [n, 2]:
    microseconds and how often), timeline (int64 [n, 7]: time, sequences in the step and its tokens, running, waiting,
    blocks held, saturation in thousandths), tenant (int64 [N]: whose request, its place in `tenants`), service (what each tenant was given
    in each window of `service_window` microseconds: 1 for a prompt token computed, 2 for an output token; empty in a replay), and
    sums over time (microseconds with a step, sequences in it times microseconds, blocks held then times microseconds, and the most
    sequences in a step and blocks held). Raises ValueError.
    """

def step_times(journal: bytes) -> bytes:
    """What each step of a journal had to do and how long it took: int64 [steps, 6].

    Tokens of prompts, sequences that decode, tokens of context, pairs of a prompt's tokens; microseconds from its plan to its commit,
    and to the next plan (-1: not committed, or the next was not planned at once). Raises ValueError for what is no journal.
    """

def choose(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    uniforms: NDArray[np.float64],
    *,
    threads: int,
) -> bytes:
    """A token for each row of logits [N, vocabulary]: int32 [N], -1 where there is NaN among them or the best is not finite.

    Temperature 0 takes the first of the likeliest. Otherwise tokens are ordered, likeliest first, equal ones by their number; top-k
    (0: all) and of these top-p and min-p leave some, and `uniforms` in [0, 1) say where in their cumulative distribution the token
    is. On at most so many threads, without the GIL: nobody may write to the logits meanwhile. Raises ValueError for other shapes.
    """

def score(logits: NDArray[np.float32], tokens: NDArray[np.int64], count: int, *, threads: int) -> bytes:
    """A line for each row of logits [M, vocabulary], as in `chairlift.runner.sampling.logprobs.score`: int32 [M, 3 + 2 * count].

    Equally likely tokens come by their number; log-probabilities are NaN where `choose` gives -1. Threads and the GIL as there. Raises
    ValueError for a token or a count beyond the vocabulary.
    """

def decode_work(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], *, window: int | None = None) -> bytes:
    """Which keys each unit of decode attention reads in a step, chunks of up to 4 tokens; int32 rows of 4.

    First the counts (splits, merges, parts, longest chunk); then splits (sequence, first key, end, part), where the part is that of
    the first token, the next token's is the next, and -1 is that of a split which is all that its tokens see; then merges (token,
    part, step, parts), whose parts lie `step` apart. Contexts of 0 are padding. Raises ValueError for lengths that do not match.
    """

def max_splits(longest: int, *, window: int | None = None) -> int:
    """The most splits that `decode_work` makes of a sequence with one token in the step and up to `longest` in its context.

    Raises ValueError for less than one token.
    """

def prefill_work(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], *, tokens: int) -> bytes:
    """The pieces of a step's longer chunks, of up to `tokens` each; int32 rows of 2: the count and 0; then sequence, first token.

    Raises ValueError for lengths that do not match.
    """

def instruction_set() -> str:
    """The instructions that the CPU's kernels use here: avx512, avx2, neon or portable."""

def block_types() -> list[int]:
    """ggml's numbers of the block types that `Linear` keeps as they are."""

@final
class TensorFile:
    """An open file of weights, which is read as they are packed."""

    def __new__(cls, path: Path) -> TensorFile:
        """Opens the file. Raises OSError where that fails."""

@final
class Linear:
    """A linear layer's weights, packed for this processor."""

    def __new__(
        cls,
        tensors: Sequence[tuple[str, int, NDArray[np.uint8] | tuple[TensorFile, int], int]],
        ins: int,
        form: str,
        *,
        threads: int,
        bias: NDArray[np.float32] | None = None,
        gated: bool = False,
    ) -> Linear:
        """Packs matrices [rows, ins] that lie one under another or, `gated`, a gate and what it lets through.

        Each comes as the kind of its numbers (float32, float16, bfloat16, or a ggml type's number), its rows, its bytes (or a file,
        and the byte at which they start there), and the rows of a head whose rotary halves alternate in the source, else 0. They are
        kept as `form` says, float32, float16, bfloat16, kept (each as it is), or int8, and multiplied in fp32 unless int8.
        Raises ValueError where that cannot be done, or the file ends too early.
        """

@final
class DecoderBlock:
    """A block of a decoder: a norm, what is computed of it, and how that is added to the residual stream."""

    @staticmethod
    def attention(
        *,
        norm: NDArray[np.float32],
        qkv_proj: Linear,
        o_proj: Linear,
        scale: float,
        qk_norm: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        rope: int | None = None,
        softcap: float | None = None,
        window: int | None = None,
        post_norm: NDArray[np.float32] | None = None,
        residual_scale: float = 1.0,
    ) -> DecoderBlock:
        """Causal attention, whose scores are multiplied by `scale`. Takes the linear layers.

        `qk_norm` are norms of each head's queries and keys, `rope` is the index of the decoder's rotary embedding (None: no positions),
        a `softcap` c makes c * tanh(x / c) of scores, and a token sees `window` tokens, itself included. The output goes through
        `post_norm` and is multiplied by `residual_scale`. Raises ValueError for layers that were taken before.
        """

    @staticmethod
    def gated_mlp(
        *,
        norm: NDArray[np.float32],
        gate_up_proj: Linear,
        down_proj: Linear,
        activation: str = "silu",
        post_norm: NDArray[np.float32] | None = None,
        residual_scale: float = 1.0,
    ) -> DecoderBlock:
        """down_proj(activation(gate) * up), with the activation silu or gelu_tanh; `gate_up_proj` is a gated layer. Else as `attention`."""

@final
class Decoder:
    """A decoder on the CPU, with threads of its own: a list of blocks between embeddings and a head."""

    def __new__(
        cls,
        blocks: Sequence[DecoderBlock],
        *,
        norm: NDArray[np.float32],
        head: Linear,
        embedding: Linear | None = None,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        ropes: Sequence[tuple[NDArray[np.float32], float]],
        threads: int,
        embedding_scale: float = 1.0,
        final_softcap: float | None = None,
    ) -> Decoder:
        """Takes the blocks. Embeddings are the rows of the head where there is no `embedding`.

        Each rotary embedding is the radians per position of the pairs that it turns, of which a head may have fewer than half its
        numbers, and what cosines and sines are multiplied by. Raises ValueError for blocks that do not fit the configuration.
        """

    def forward(
        self,
        cache: KvCache,
        *,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        batch_slots: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> None:
        """Runs a step over the cache, without the GIL, and keeps the hidden states of its tokens.

        Arrays are those of `chairlift.runner.buffers.StepBuffers`. `block_tables` is read in place: leave it alone until the call returns.
        Raises ValueError for a step that threads could not share: two tokens with one slot, sequences that overlap, unknown tokens.
        """

    def logits(self, at: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Writes what the last step says of the tokens after those at places `at` to `out` [at, vocabulary], without the GIL."""

@final
class KvCache:
    """The keys and values of all layers, in blocks, and room for blocks that are swapped out; takes memory as it is used."""

    def __new__(
        cls, *, layers: int, blocks: int, kv_heads: int, block_size: int, head_dim: int, form: str, host_blocks: int = 0
    ) -> KvCache:
        """`form` is float32, float16 or int8. Raises MemoryError where the system refuses the memory."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, one pair (from, to) after the other."""

    def swap(self, outs: Sequence[tuple[int, int]], ins: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to the host's room (block, host block), then others from it (host block, block)."""
