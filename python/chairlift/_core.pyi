"""The Rust scheduler, simulator and CPU kernels. Times are microseconds on one clock of the caller."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.snapshot import CoreSnapshot

__all__ = [
    "CORPUS_BYTES_PER_TOKEN",
    "NO_TOKEN",
    "POLICIES",
    "PREEMPTION_REASONS",
    "SERVING_RULES",
    "TIMELINE_STATES",
    "Adapter",
    "Arbiter",
    "Candidate",
    "Decoder",
    "DecoderBlock",
    "EmptyPrompt",
    "Encoder",
    "EncoderBlock",
    "GrammarMatcher",
    "GrammarVocabulary",
    "KvBudget",
    "KvCache",
    "Linear",
    "NeverFits",
    "NoNewTokens",
    "Outputs",
    "PartialText",
    "QueueFull",
    "RecurrentHeads",
    "Rejected",
    "Router",
    "Scheduler",
    "Shadow",
    "StateCache",
    "StepBuffers",
    "StepPlan",
    "TensorFile",
    "ThreadPool",
    "TooLong",
    "__version__",
    "add_policy",
    "added_policies",
    "bf16_products",
    "block_types",
    "byte_products",
    "decode_work",
    "instruction_sets",
    "journal_settings",
    "matrix_tiles",
    "max_splits",
    "prefill_work",
    "provide_grid",
    "replay",
    "request_fields",
    "settings",
    "simulate",
    "simulate_models",
    "simulate_sessions",
    "step_times",
    "take_policy_failure",
    "what_if",
    "workload",
]

__version__: str

CORPUS_BYTES_PER_TOKEN: int
NO_TOKEN: int
"""A sample that ends its request without a token, because only the prompt's embedding was wanted."""
POLICIES: tuple[tuple[str, str], ...]
"""Each policy's name, and which request it serves first."""
TIMELINE_STATES: tuple[str, ...]
"""Names of the states into which a request's time is divided."""

PREEMPTION_REASONS: tuple[str, ...]
"""Names of the reasons for which a running sequence is preempted."""
SERVING_RULES: tuple[str, ...]
"""Names of the rules by which a request is served before others."""

class Rejected(ValueError):
    """A request was rejected."""

class EmptyPrompt(Rejected):
    """The prompt has no tokens."""

class NoNewTokens(Rejected):
    """The request allows no new tokens."""

class TooLong(Rejected):
    """Prompt and output exceed the model's context."""

class NeverFits(Rejected):
    """Prompt and output exceed the whole KV cache."""

class QueueFull(Rejected):
    """The queue is full. `args` are the message and the microseconds after which to retry."""

@final
class GrammarVocabulary:
    """The tokens of a model, over which llguidance compiles grammars."""

    def __new__(cls, file: bytes, *, size: int, ends: Sequence[int]) -> GrammarVocabulary:
        """`file` is a tokenizer.json. Raises ValueError if it cannot be used, or if an end is not in the vocabulary."""
    def piece(self, token: int) -> bytes:
        """The bytes of a token."""

@final
class GrammarMatcher:
    """The position of a sequence in a grammar. Copies share the states of the lexer."""

    def __new__(cls, vocabulary: GrammarVocabulary, grammar: str, *, max_items: int, max_lexer_states: int) -> GrammarMatcher:
        """Compiles Lark, or llguidance's list of grammars. The matcher of an invalid grammar has an `error`."""
    @staticmethod
    def regex(text: str) -> str:
        """A grammar in Lark for a regular expression."""
    def copy(self) -> GrammarMatcher:
        """A matcher at the same position."""
    @property
    def error(self) -> str | None:
        """Why the matcher failed: the grammar is invalid, a token was not allowed, or a limit was reached."""
    @property
    def lexer_bytes(self) -> int:
        """Bytes of the lexer's states, which all copies share: about what llguidance takes for them.

        0 if the grammar is invalid, or if the lexer has failed.
        """
    def mask(self) -> bytes:
        """Which tokens may come next: int32 [vocabulary / 32, rounded up] as bytes, a bit for each token.

        After the grammar's end, and after a failure, only tokens that end an answer may.
        """
    def consume(self, token: int) -> None:
        """Advances by one token. If it is not allowed, the matcher fails."""
    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other."""
    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next, one after the other."""

@final
class Router:
    """Chooses one of a model's engines for each request, by what the engines report of their caches."""

    def __new__(cls, routing: str, hash_key: int, block_size: int, has_states: bool = False) -> Router:
        """`routing` is a name of --routing; `hash_key` and `block_size` are those of the engines' schedulers. Raises ValueError.

        If the model `has_states` of recurrent layers, engines report only the blocks after which one is saved.
        """

    def choose(
        self,
        engines: Sequence[tuple[int, int, int, float, int]],
        prompt: Sequence[int],
        salt: bytes,
        session: bytes | None = None,
        group: str = "",
    ) -> tuple[int, int, int]:
        """Returns the index of the chosen engine, how many tokens of the prompt it is expected to have, and the request's number.

        An engine is its number, its requests, the microseconds until it starts another prompt, those for each prompt token, and those
        that a session waits for its turn if it is not active there. Only prompts of equal `salt` and `group` share prefixes. Requests of
        a session stay with one engine while its load allows it, unless another one finishes the prompt sooner. Until `computed` the
        engine counts as having the prompt.
        """

    def computed(self, request: int) -> None:
        """Records that the prompt of a request, by its number, is computed, or that the request has ended. Unknown ones are ignored."""

    def cache_changed(self, engine: int, added: bytes, dropped: bytes) -> None:
        """Takes what `Scheduler.take_cache_changes` returned in the engine of this number."""

    def forget(self, engine: int) -> None:
        """Forgets the cache of an engine that has ended, by its number."""

@final
class Arbiter:
    """Chooses which of several models runs the next step, by weighted fair shares of time. The caller numbers the models.

    Lower priorities go first; `itl` is the longest time that should pass between two steps of a model. A model that has waited for a second
    goes before all others.
    """

    def __new__(cls) -> Arbiter: ...
    def add(self, model: int, *, weight: int = 1, priority: int = 0, itl: int | None = None) -> None:
        """Adds an idle model, or replaces the one with this number."""

    def remove(self, model: int) -> None:
        """Removes a model, if it is known."""

    def ready(self, model: int, now: int) -> None:
        """Records that a model has work. No effect if it had some already."""

    def idle(self, model: int) -> None:
        """Records that a model has no work."""

    def expect(self, model: int, us: int, begins: int) -> None:
        """Predicts that the model's next step takes `us` microseconds and is the first of `begins` requests."""

    def choose(self, now: int) -> int | None:
        """The model whose step is next; None if none is ready."""

    def charge(self, model: int, us: int, now: int) -> None:
        """Charges a step of `us` microseconds, predicted or measured, that ended at `now`."""

@final
class KvBudget:
    """Divides bytes for KV blocks among models. The caller numbers the models.

    The total is the most bytes of one model, and at least all promised minimums. The caller reports the use of each model, applies the
    limits of `shrink`, tells each limit that applies by `set`, and then applies the limits of `grow`.
    """

    def __new__(cls) -> KvBudget: ...
    def add(self, model: int, *, block_bytes: int, state_bytes: int, least: int, most: int) -> None:
        """Adds a model. It begins with its promised minimum of `least` blocks, or with all of its `most` blocks if it is the only one.

        Beside its blocks it keeps `state_bytes` of recurrent states.
        """

    def remove(self, model: int) -> None:
        """Removes a model, if it is known."""

    def promised(self) -> int:
        """Bytes of all promised minimums."""

    def report(self, model: int, held: int, kept: int, wanted: int) -> None:
        """Records the use of a model's blocks: see `Scheduler.blocks_used`."""

    def set(self, model: int, limit: int) -> None:
        """Records the limit that applies to a model."""

    def is_short(self) -> bool:
        """Whether a model has used up its limit or wants more, or the limits are more than all bytes."""

    def shrink(self) -> list[tuple[int, int]]:
        """The models that must have fewer blocks, each with its new limit. A model keeps what its sequences hold, except for minimums."""

    def grow(self) -> list[tuple[int, int]]:
        """The models that can have more blocks, each with its new limit."""

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
        state_slots: NDArray[np.int32] | None = None,
        state_copies: NDArray[np.int32] | None = None,
        state_saves: NDArray[np.int32] | None = None,
    ) -> StepBuffers: ...

@final
class StepPlan:
    """A planned step. `Scheduler.commit` consumes it."""

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
    def num_state_copies(self) -> int: ...
    @property
    def num_state_saves(self) -> int: ...
    @property
    def admitted(self) -> list[tuple[int, int, int, int, int, int]]:
        """One entry per sequence admitted in this step.

        The numbers are its batch slot, its handle, its tag, the prompt tokens that were cached, those of them that its tenant had used
        before, and its microseconds in the queue.
        """
    @property
    def preempted(self) -> list[int]:
        """Tags of the sequences that were preempted."""
    @property
    def swap_out(self) -> list[tuple[int, int]]:
        """Blocks to copy to the host pool, (device, host), before all other copies."""
    @property
    def swap_in(self) -> list[tuple[int, int]]:
        """Blocks to copy from the host pool, (host, device), after `swap_out` and before the copies of the step buffers."""

@type_check_only
class Timeline(TypedDict):
    """What happened to a request, in microseconds: the fields of `chairlift.Timeline`, of which these are read here or converted there."""

    tag: int
    finish: str | None
    arrived: int
    submitted: int
    started: int | None
    first_token: int | None
    ended: int | None
    states: dict[str, int]
    compute_ns: int
    energy_uj: int | None
    block_us: int
    preempted_by: list[int]
    queued_behind: NotRequired[list[tuple[str, int]]]
    """How long each tenant's requests ran while this request waited for its first step, longest first. Only `Scheduler.explain` sets it and
    `served_before`, `served_first`, `expected_wait_ms` and `max_wait_ms`."""
    served_first: NotRequired[list[tuple[int, str, str]]]

@type_check_only
class Usage(TypedDict):
    """The usage of each tenant and class, by name."""

    tenants: dict[str, dict[str, int]]
    classes: dict[int, dict[str, int]]

@final
class Outputs:
    """The output of a step: packed little-endian arrays of equal length, one entry per token."""

    @property
    def tags(self) -> bytes:
        """uint64: the tag of the token's sequence."""
    @property
    def tokens(self) -> bytes:
        """int32: the token."""
    @property
    def finishes(self) -> bytes:
        """uint8: 0 running, 1 stop, 2 length, 3 error (the entry has no valid token)."""
    @property
    def ended(self) -> list[Timeline]:
        """The timelines of the requests that finished."""

@final
class Scheduler:
    """Plans each step: chooses its tokens and allocates their KV blocks."""

    def __new__(
        cls,
        *,
        journal: bool = False,
        hash_key: int = 0,
        draft_tokens: int = 0,
        draft_corpus_tokens: int = 0,
        end_tokens: Sequence[int] = ...,
        tenant_weights: Mapping[str, int] = ...,
        tier_weights: Mapping[str, int] = ...,
        **settings: Any,
    ) -> Scheduler:
        """Creates a scheduler with `settings`, by the names of the function `settings`; other settings have their defaults.

        `journal` records all calls. `draft_tokens` is the maximum number of tokens proposed per sequence and step; 0 for none.
        `draft_corpus_tokens` is the number of tokens of finished texts among which they are looked up too. `end_tokens` end every answer
        that does not ignore them. A request's weight is that of its tenant multiplied by that of its tier, each 1 by default. `hash_key`
        has 128 bits and must be secret if clients choose tokens. Raises ValueError for limits under which nothing can run, and for an
        invalid value of a setting.
        """
    def add(
        self, request: EngineRequest, now: int, salt: bytes = ..., preparation: Literal["grammar", "read_cache"] | None = None
    ) -> list[tuple[int, int]]:
        """Queues a request. Returns the numbers of its unfinished answers, each with the handle of its sequence.

        `now` is in microseconds. Only requests of equal `salt` and `cache_group` share cached blocks. No limit of the queue applies to a
        resumed request. With a `preparation` the request waits in that state of its timeline until `prepare` ends it, and counts as queued;
        `read_cache` begins when `take_reads` has it.
        Raises a `Rejected` if the request can never run or the queue is full; then nothing was added.
        """
    def prepare(self, seq: int, next: Literal["grammar", "read_cache"] | None, now: int) -> bool:
        """Records that a sequence's preparation is done. It waits for the `next` one, or joins the queue in the order of its arrival.

        Returns False if the sequence has ended or waits for none, as the further answers of a new request do.
        """
    def take_reads(self) -> list[int]:
        """Tags of the sequences in the state `read_cache` that the caller reads KV for from now on, since the last call.

        A sequence comes into that state when its session has its turn. It waits for `prepare`, even if there is nothing to read.
        """
    def fork_held(self, handle: int, forks: Sequence[int], now: int) -> None:
        """Opens held sequences with the handles `forks` and the blocks of `handle`. Does nothing if that is unknown."""
    def drop_held(self, handle: int, now: int) -> None:
        """Drops a held sequence, if it is known. Its blocks are free for the next step."""
    def note_session(self, tenant: str, session: str, event: str, now: int) -> bool:
        """Records that a session `awaits_user` or has `ended`. Returns False if it is unknown. Raises ValueError for another event."""
    def session_wait(self, seq: int) -> tuple[int, int] | None:
        """Milliseconds that a request is expected to wait for its session's turn, and at most; None unless it waits for it."""
    def cached_blocks(self, tokens: NDArray[np.int32], group: str = "") -> int:
        """Number of full blocks at the start of `tokens` (int32) that a request of `group`, without a salt, would find in the cache."""
    def restore(self, tokens: NDArray[np.int32], now: int, group: str = "") -> tuple[int, list[int], int | None]:
        """Names free blocks of `group` for the full blocks of `tokens` (int32) that are not cached, as many as are free.

        Returns the number of leading blocks that were cached, the blocks that follow them, and the slot for the recurrent state after all
        of them, if one is to be written. What is new must be written before the next step.
        """
    def stored_blocks(self, after: int) -> list[tuple[int, int, int, bytes, str]]:
        """The cached blocks with complete KV and without a salt, whose content is newer than number `after`.

        Each is the block, the number of its content, that of the content before it (0: none), its tokens (int32), and its group. Older
        content comes first.
        """
    def stored_states(self) -> list[tuple[int, int]]:
        """The complete recurrent states that are saved for later requests: the content of the block before each, and its slot."""
    def remember_users(self) -> None:
        """Remembers from now on which tenants have used the latest evicted blocks, for blocks that `restore` brings back."""
    def record_cache_changes(self) -> None:
        """Records from now on which blocks are cached and dropped. The record grows until `take_cache_changes`."""
    def take_cache_changes(self) -> tuple[bytes, bytes]:
        """The names (u64, little-endian) of the blocks that were cached and dropped since the last call. Empty if not recorded.

        In a model with recurrent layers, those of the blocks whose states were saved and dropped.
        """
    def unused(self) -> float:
        """Part of the KV blocks, or of the slots for states if that is less, that holds nothing. At 0, new content evicts old one."""
    def blocks_used(self) -> tuple[int, int, int]:
        """Blocks that sequences hold, that are held or cached, and that running and waiting sequences could use."""
    def set_block_limit(self, blocks: int, now: int) -> int:
        """Sets the most blocks that may have memory. Returns the limit that applies.

        It is at least what one sequence of the maximum length needs, and at most all blocks. Cached blocks beyond it are evicted. Running
        sequences keep their blocks and get no more until they hold less.
        """
    def set_upstream_token_time(self, ns: int, now: int) -> None:
        """Sets the nanoseconds that a prompt token takes at another server. Reloads of sessions are spread from now on."""
    def evict_cached(self, now: int) -> None:
        """Evicts all cached blocks that no running sequence uses, and those of held sequences."""
    def close_queue(self, closed: bool, now: int) -> None:
        """Sets whether plans admit no waiting requests as long as any sequence runs, and preempt none for them."""
    def take_given_back(self) -> list[int]:
        """The blocks that were given back since the last call. All planned steps must have run; discard them before the next one."""
    def next_step(self) -> tuple[int, int] | None:
        """Predicted microseconds of the next step, and the requests whose first step it is; None before enough steps were observed."""
    def charge_external(self, tenant: str, us: int) -> None:
        """Charges a tenant for its service at another engine or model, in microseconds of engine time at weight 1.

        Between two of its requests that leave the queue, at most ten seconds are charged. No effect for a tenant without requests so far,
        before the first step, and under policies other than `fair` and `vtc`.
        """
    def take_service(self) -> dict[str, int]:
        """The service of each tenant since the last call, divided by its weight, in microseconds of engine time.

        Tenants without are left out. Empty under policies other than `fair` and `vtc`.
        """
    def set_priority(self, seq: int, priority: int, now: int) -> bool:
        """Moves a request to another class. Returns False if it has ended, or if one of the classes is the background."""
    def abort(self, seq: int, now: int) -> bool:
        """Ends a request in any state. Returns False if it has ended already."""
    def stop(self, seq: int, now: int) -> bool:
        """Ends a request like `abort`, but counts it as stopped, because its caller has the complete output."""
    def fail(self, seq: int, now: int) -> bool:
        """Ends a request like `abort`, but counts it as failed, because it cannot be computed."""
    def expire(self, now: int) -> list[Timeline]:
        """Ends the requests that missed, or will certainly miss, their deadlines. Returns their timelines. Call it before `plan`."""
    def plan(self, buffers: StepBuffers, now: int, forced: Sequence[tuple[int, Sequence[int]]] = ...) -> StepPlan | None:
        """Plans the next step and fills the buffers. Returns None if there is nothing to run.

        `forced` are sequences whose next tokens are certain, with these tokens: drafts if drafting is on.
        """
    def commit(self, plan: StepPlan, sampled: NDArray[np.int32], now: int) -> Outputs:
        """Adds the sampled tokens: int32, one per sampled position, negative if there is none. Plans are committed in order."""
    def may_end(self, plan: StepPlan, sampled: NDArray[np.int32]) -> bool:
        """Returns whether a sequence may end in the commit of these tokens."""
    def read_meter(self, energy: int, now: int) -> None:
        """Records the microjoules that a meter measured since the last call; the first call begins the metering.

        The next call that ends a step or a sequence divides them among the sequences whose steps ran in that time, by the time of their
        parts of these steps. Energy of the time between steps is idle, and so is what is read after a sequence has ended.
        """
    def tokens(self, seq: int) -> tuple[bytes, int]:
        """Returns a sequence's tokens so far (int32) and the number of prompt tokens. Raises KeyError if it has ended."""
    def explain(self, tag: int) -> Timeline | None:
        """Returns the timeline of a live request or of one of the last 10,000 that ended."""
    def snapshot(self, now: int, max_waiting: int, max_cells: int) -> CoreSnapshot:
        """Returns the sequence of each batch slot, at most `max_waiting` of the waiting requests, the state of the KV blocks, and the steps
        since the last snapshot, if that was less than three seconds ago."""
    def wake_at(self) -> int | None:
        """Returns the time at which `plan`, after it returned None, may plan a step without another call; None for never."""
    def stats(self) -> dict[str, Any]:
        """Returns counters since the start and the current gauges: fields of `chairlift.engine.stats.Stats`."""
    def usage(self) -> Usage:
        """Returns the usage of each tenant and class."""
    def journal(self) -> bytes:
        """Returns the records since the last call."""
    def check(self) -> None:
        """Panics unless every invariant holds."""

def request_fields() -> list[str]:
    """Names of the fields of the core's request that a journal records. Those of `Scheduling` are read from there by name."""

@final
class Candidate:
    """A waiting or running request as a `Policy` sees it. Times are in microseconds."""

    @property
    def tier(self) -> str:
        """Its service tier. Urgent tiers go first, except before tenants that take turns."""

    @property
    def priority(self) -> int:
        """Its class, as the caller gave it. Lower is more urgent."""

    @property
    def arrived(self) -> int:
        """When it arrived."""

    @property
    def started(self) -> bool:
        """Whether it has run before."""

    @property
    def deadline(self) -> int | None:
        """The deadline of the last token."""

    @property
    def ttft_deadline(self) -> int | None:
        """The deadline of the first token; None once it has one."""

    @property
    def is_predicted(self) -> bool:
        """Whether the caller predicted the length of the output."""

    @property
    def weight(self) -> int:
        """Its weight: that of its tenant times that of its tier."""

    @property
    def tenant_service(self) -> int:
        """The service of its tenant divided by the weight, where tenants take turns; 0 elsewhere."""

    @property
    def tenant_slots(self) -> int:
        """Running sequences of its tenant."""

    @property
    def cached_tokens(self) -> int:
        """Tokens found in the prefix cache at the latest lookup."""

    @property
    def output_left(self) -> int:
        """Output tokens left by the caller's prediction, or up to the maximum."""

    @property
    def work_left(self) -> int:
        """Predicted microseconds of the remaining prompt and output."""

    @property
    def preemption_cost(self) -> int:
        """Predicted microseconds to compute or copy again what a preemption takes."""

def add_policy(policy: Any) -> None:
    """Lets simulations use a `chairlift.Policy` by its name, instead of one that was added under it before. Raises ValueError."""

def added_policies() -> list[str]:
    """Returns the names of the policies that were added."""

def take_policy_failure(name: str, for_good: bool = False) -> BaseException | None:
    """Returns what a method of the policy of this name raised first since the last call. Raises RuntimeError.

    The policy then decides again, unless it is replaced `for_good`.
    """

def settings() -> list[dict[str, object]]:
    """Returns the table of a scheduler's settings: dicts with name, doc and default, and with min, max and optional, or with names."""

_Settings = dict[str, int | bool | str | None]
"""Arguments of `Scheduler`."""

@type_check_only
class Ended(TypedDict):
    """The requests that ended, in that order. Arrays are bytes of int64."""

    ended: bytes
    """[N, 38]: tag, finish as in `Outputs` or 4 for a missed deadline, arrived, started, first token, ended; tokens of prompt, cached, of
    output, computed, recomputed; preemptions, swaps, block-microseconds, longest time between two tokens, drafted tokens and accepted ones,
    and the time in each of `states`."""
    states: list[str]
    tenant: bytes
    """[N]: an index in `tenants`. So are the others in those that follow them, -1 for none."""
    tenants: list[str]
    session: bytes
    sessions: list[str]
    tier: bytes
    tiers: list[str]

@type_check_only
class Report(Ended):
    """The result of a simulation on one scheduler. Times are in microseconds."""

    refused: list[tuple[int, str]]
    """Tags, and why: a key of `sim.table.REFUSALS`."""
    steps: int
    chunks: int
    """Sequences in steps."""
    stats: dict[str, Any]
    """As of `Scheduler.stats`; None in a report of `Shadow`."""
    gaps: bytes
    """[n, 2]: microseconds between two tokens, and how often. `step_times` likewise."""
    step_times: bytes
    timeline: bytes
    """[n, 7]: time, sequences in the step and its tokens, running, waiting, blocks held, saturation in thousandths."""
    service: dict[str, list[int]]
    """By tenant, the service in each window of `service_window`: 1 per prompt token computed, 2 per output token. Empty in a replay."""
    service_window: int
    sums: list[int]
    """Microseconds with a step; the same times its sequences; the same times the blocks held; the most sequences in a step; the most blocks
    held."""

@type_check_only
class WhatIf(TypedDict):
    """The result of requests under other settings."""

    config: _Settings
    report: Report

@type_check_only
class Replay(WhatIf):
    """The result of recorded calls, with times from the first call."""

    calls: int
    truncated: bool
    hash: str
    differs_at: int | None
    """The first plan that differs."""
    step_model: list[float]
    """Microseconds of an empty step, a prompt token, a decoding sequence, a token of context, a pair of tokens of a prompt."""

@type_check_only
class Workload(TypedDict):
    """Arguments of `simulate`. Arrays are bytes of int64."""

    requests: bytes
    names: bytes
    name_block: int
    tenants: list[tuple[str, int]]
    drafts: bytes
    has_sessions: bool
    """Whether requests were of sessions, which are left out."""

@type_check_only
class ShadowReport(TypedDict):
    """What ended under each of the settings. A request has the same tag in all of them."""

    runs: list[Ended]
    """For the recorded settings, and for each change."""
    recorded: Ended
    """What was recorded. Columns that a journal does not record are 0."""

@type_check_only
class SessionsReport(TypedDict):
    """The result of a simulation of sessions."""

    engines: list[Report]
    sessions: bytes
    """int64 [M, 7] of the replays with a request after the warm-up: the recorded session, when it began and ended, answered requests,
    microseconds that it takes alone, the longest wait for a first token, and whether it is complete."""
    context_tokens: int
    """The mean tokens of all live contexts after the warm-up."""

def replay(journal: bytes) -> Replay:
    """Repeats every recorded call. Raises ValueError for an invalid journal."""

def what_if(journal: bytes, changes: _Settings) -> WhatIf:
    """Simulates the recorded requests in virtual time, under the recorded settings with `changes`, except of block_size and journal.

    Steps take the times of the journal's steps. Times count from the first call. Recorded drafts are proposed again. Raises ValueError.
    """

def journal_settings(journal: bytes) -> _Settings | None:
    """Returns the settings of a journal by its first bytes; None if they end within the settings. Raises ValueError for another file."""

@final
class Shadow:
    """A journal's requests under the recorded settings and under others, in virtual time, while the journal is written."""

    def __new__(cls, journal: bytes, changes: list[_Settings]) -> Shadow:
        """Takes the journal's first bytes, and the changed settings of each engine, as for `what_if`. Raises ValueError."""

    def feed(self, journal: bytes) -> None:
        """Reads the bytes that follow. Raises ValueError if they are damaged."""

    def advance(self, requests: int) -> bool:
        """Simulates at most so many requests whose outputs are known. Returns whether more are."""

    def skip(self) -> None:
        """Leaves out the requests whose outputs are known."""

    def take(self) -> ShadowReport:
        """Returns what ended since the last call."""

    @property
    def now(self) -> int:
        """Microseconds from the first call to the last record."""

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that were simulated, and that were left out."""

def workload(journal: bytes) -> Workload:
    """Returns the recorded requests. Raises ValueError."""

def simulate(
    requests: NDArray[np.int64],
    names: NDArray[np.int64],
    name_block: int,
    tenants: Sequence[tuple[str, int]],
    settings: _Settings,
    step_time: tuple[Sequence[tuple[float, float]], float, float, float],
    *,
    drafts: NDArray[np.int64] | None = None,
    draft_tokens: int = 0,
    replicas: int = 1,
    routing: str = "round-robin",
) -> list[Report]:
    """Simulates requests on `replicas` schedulers in virtual time, in the order of their arrivals. Returns a report for each.

    `requests` is int64 [N, 11]: arrival (microseconds); tokens of prompt, tokens of output, and maximum tokens of output; tenant (an index
    in `tenants`, which has names and weights); priority; microseconds to the deadline, and to that of the first token (-1: none); predicted
    tokens (-1: none); how many of `names` belong to the request; and its model, for `simulate_models`. Each name stands for `name_block`
    tokens of its prompt: prompts with equal names have equal tokens up to there. `settings` are the arguments of `Scheduler` except
    journal. `step_time` is a curve through points (tokens, microseconds) and the additional microseconds per decoding sequence, per token
    of context and per pair of a prompt's tokens. `drafts` are recorded drafts, int64 [M, 5]: index of the request, tokens of prompt and
    output before the draft, tokens, accepted tokens, and source as in a journal. They are proposed again, `draft_tokens` for a sequence and
    step at most. `routing` is a name of --routing. Raises ValueError.
    """

def simulate_models(
    requests: NDArray[np.int64],
    names: NDArray[np.int64],
    name_block: int,
    tenants: Sequence[tuple[str, int]],
    models: Sequence[tuple[_Settings, tuple[Sequence[tuple[float, float]], float, float, float], int, int | None]],
) -> list[Report]:
    """Simulates requests on a scheduler for each model in virtual time; an `Arbiter` chooses whose step is next.

    `models` has for each: settings and step time as in `simulate`, the weight, and microseconds that should pass between two of its steps
    at most. A request's model is an index into it. Returns a report for each model. Raises ValueError.
    """

def simulate_sessions(
    sessions: NDArray[np.int64],
    parents: NDArray[np.int64],
    turns: NDArray[np.int64],
    block: int,
    tenants: Sequence[tuple[str, int]],
    users: tuple[int, int, int, int, int],
    settings: _Settings,
    step_time: tuple[Sequence[tuple[float, float]], float, float, float],
    *,
    replicas: int = 1,
    routing: str = "round-robin",
    read_ns_per_block: int = 0,
    beside: tuple[NDArray[np.int64], NDArray[np.int64], int] | None = None,
) -> SessionsReport:
    """Simulates users that run recorded sessions in a closed loop, in virtual time.

    `sessions` is int64 [S, 8]: threads, requests, blocks, shared blocks, group, tenant, tier (0 priority, 1 default, 2 flex) and weight of
    each. `parents` has the block before each block of a session, one session after another; block 0 is the beginning. `turns` is int64
    [N, 8]: a request's thread, microseconds since the answer before it, tokens of prompt and output, whether the output calls a tool, the
    last full block of the prompt, and the first and the number of the threads that run before it. Blocks have `block` tokens. `users` are
    their number, the longest time between an answer and the next request, the end of the warm-up and of the simulation in microseconds,
    and a seed. `read_ns_per_block` is the time to read a block from a disk that has all contexts; 0 without one. `beside` are requests
    without a session, their names and the tokens of a name, as in `simulate`; they get new tags. The others are those of `simulate`; the
    weights of `tenants` are those of requests without a session. Raises ValueError.
    """

def step_times(journal: bytes) -> bytes:
    """Returns the load and duration of each step of a journal: int64 [steps, 6].

    The columns are prompt tokens, decoding sequences, tokens of context, pairs of a prompt's tokens, microseconds from the plan to the
    commit, and microseconds to the next plan. A time is -1 if the step was not committed or the next step was not planned at once. Raises
    ValueError for an invalid journal.
    """

def decode_work(
    query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], *, window: int | None = None, at_once: int = 2147483647
) -> bytes:
    """Returns the work list of decode attention for a step's chunks of up to 4 tokens: int32 rows of 4.

    The first row has the counts (splits, merges, parts, longest chunk). Then come splits (sequence, first key, end, part): `part` is the
    partial result of the chunk's first token, its next tokens have the next ones, and -1 means that the sequence has only this split. Then
    come merges (token, first part, stride, number of parts). Sequences with context 0 are padding. Contexts are split into no more than the
    device works on `at_once`, or twice as many. Raises ValueError for lengths that do not match.
    """

def max_splits(longest: int, *, window: int | None = None) -> int:
    """Returns the most splits that `decode_work` makes of a sequence with one token in the step and a context of up to `longest` tokens.

    Raises ValueError if `longest` or `window` is less than one.
    """

def prefill_work(query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], *, tokens: int) -> bytes:
    """Returns the work list of prefill attention: tiles of up to `tokens` tokens of the step's longer chunks; int32 rows of 2.

    The first row is the count and 0. Then come tiles (sequence, first token). Raises ValueError for lengths that do not match.
    """

def instruction_sets() -> list[str]:
    """Returns the instruction sets that the CPU kernels can use on this machine: of amx, vnni, avx512, avx2, neon and portable.

    The first is the fastest. vnni is AVX-512 with products of bytes for GGUF blocks. amx also has matrix tiles, for many rows of these
    products, with the same results, and for weights and attention in bfloat16.
    """

def bf16_products(isa: str) -> Literal["none", "vectors", "tiles"]:
    """Returns the unit that multiplies bfloat16 numbers in an instruction set; one with tiles has vectors too.

    Raises ValueError for one that this machine does not have.
    """

def byte_products(isa: str) -> bool:
    """Returns whether an instruction set multiplies the codes of GGUF blocks as bytes.

    Raises ValueError for one that this machine does not have.
    """

def matrix_tiles() -> Literal["absent", "refused", "usable"]:
    """Returns whether this process can use the processor's matrix tiles (AMX). The operating system can refuse them to it."""

def block_types() -> list[int]:
    """Returns ggml's numbers of the block types that `Linear` stores unchanged.

    Those with a grid are among them once `provide_grid` has set it.
    """

def provide_grid(kind: int, values: NDArray[np.int8]) -> None:
    """Sets the grid of a ggml type, [entries times the weights of each], for all models of the process.

    Raises ValueError if the type has no grid, or another one.
    """

@final
class TensorFile:
    """An open file of weights. Tensors are read while they are packed."""

    def __new__(cls, path: Path) -> TensorFile:
        """Opens the file. Raises OSError if that fails."""

_Tensor = tuple[str, int, NDArray[np.uint8] | tuple[TensorFile, int] | Callable[[], NDArray[np.uint8]], int]
_Update = tuple[_Tensor, _Tensor, int, float]

@final
class Linear:
    """A linear layer's weights, packed for this processor."""

    def __new__(
        cls,
        tensors: Sequence[Sequence[_Tensor]],
        ins: int,
        dtype: str,
        *,
        threads: int,
        bias: NDArray[np.float32] | None = None,
        gated: bool = False,
        isa: str = "auto",
    ) -> Linear:
        """Packs matrices [rows, ins] into one layer, stacked by rows or, if `gated`, as interleaved gate and up projections.

        Each of `tensors` has one tensor, or that of every expert of a mixture, of one shape and dtype; `bias` has those of the first expert
        first. A tensor is its dtype (float32, float16, bfloat16, or a ggml type's number), its rows, its bytes (or a file and the byte
        offset in it, or a function that makes them when the tensor is packed), and the rows of a head whose rotary halves alternate in the
        source, else 0. `dtype` is that of the packed weights: float32, float16, bfloat16, kept (each as it is), int16 (each as it is,
        activations rounded to 16 bits), rounded (to bfloat16, activations too), or int8. Products are in fp32, except for the last three.
        `isa` is one of `instruction_sets()`, or 'auto' for the first. Raises ValueError if the tensors cannot be packed or the file ends
        too early, and what such a function raises.
        """

_StreamNorm = NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]
"""The weight of a norm, or the weight and the bias of a layer norm."""

@final
class DecoderBlock:
    """A decoder block: a norm, then attention or an MLP, whose output is added to the residual stream."""

    @staticmethod
    def attention(
        *,
        norm: _StreamNorm | None,
        qkv_proj: Linear,
        kv: tuple[int, int, bool],
        o_proj: Linear,
        scale: float,
        gated: bool = False,
        temperature: tuple[float, int] | None = None,
        qk_norm: tuple[_StreamNorm, _StreamNorm] | None = None,
        rotated_first: bool = False,
        value_norm: NDArray[np.float32] | None = None,
        rope: int | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: NDArray[np.float32] | None = None,
        post_norm: NDArray[np.float32] | None = None,
        residual_scale: float = 1.0,
    ) -> DecoderBlock:
        """Creates a block of causal attention with scores multiplied by `scale`. Takes ownership of the linear layers.

        Without a `norm` it reads the residual stream itself; a weight and a bias are those of a layer norm. `kv` is the part of the KV
        cache, the layer in that part, and whether an earlier block writes the layer: then there are only queries. With `gated` the last
        rows of `qkv_proj` are gates, whose sigmoids multiply the outputs. `qk_norm` and `value_norm` are norms of each head's queries and
        keys, which may be `rotated_first`, and of its values; with a weight for each number, all heads are normalised together, or each by
        a layer norm. `rope` is the index of the decoder's rotary embedding (None: no positions). A `softcap` c maps scores x to c * tanh(x
        / c). A token sees `window` tokens, itself included. `sinks` are, for each head, the score of a token without a value that all
        tokens see. `temperature` (b, n) multiplies the query at position p by 1 + b * ln(1 + floor(p / n)). `post_norm` is applied to the
        output, which is then multiplied by `residual_scale`. Raises ValueError for a layer that another block owns.
        """

    @staticmethod
    def latent_attention(
        *,
        norm: _StreamNorm,
        in_proj: Linear,
        latent_norm: NDArray[np.float32],
        key_up: Linear,
        value_up: Linear,
        kv: tuple[int, int, bool],
        o_proj: Linear,
        rope: int,
        adjacent: bool,
        scale: float,
        eps: float,
        query_norm: NDArray[np.float32] | None = None,
        query_up: Linear | None = None,
    ) -> DecoderBlock:
        """Creates a block of attention to latents, of which the cache's part `kv` has one head.

        The rows of `in_proj` are queries, or their latent, which `query_norm` and `query_up` make queries of; then the latent of keys and
        values, and the rotated key. `key_up` and `value_up` have one matrix for each head. Neighbours are rotated together if they are
        `adjacent`. `eps` is that of the norms of latents. The rest is as in `attention`.
        """

    @staticmethod
    def recurrent(
        *,
        norm: _StreamNorm,
        in_proj: Linear,
        taps: NDArray[np.float32],
        out_proj: Linear,
        layer: int,
        bias: NDArray[np.float32] | None = None,
        heads: RecurrentHeads | None = None,
        residual_scale: float = 1.0,
    ) -> DecoderBlock:
        """Creates a block with a state: number `layer` of those that have one.

        `taps` [taps, channels] and `bias` [channels] are those of a convolution of each channel over the last tokens. Without `heads` the
        rows of `in_proj` are B, C and x, and the output is out_proj(C * convolution(B * x)). The rest is as in `attention`.
        """

    @staticmethod
    def mlp(
        *,
        norm: _StreamNorm | None,
        gate_up_proj: Linear,
        down_proj: Linear,
        activation: str = "silu",
        parallel: bool = False,
        post_norm: NDArray[np.float32] | None = None,
        residual_scale: float = 1.0,
        stream_scale: float = 1.0,
    ) -> DecoderBlock:
        """Creates down_proj(activation(gate) * up); the activation is silu or gelu_tanh, `gate_up_proj` is gated.

        With the activations relu, relu2 (max(up, 0) ** 2), gelu and gelu_new there is no gate, and `gate_up_proj` is up_proj.

        If it is `parallel`, it reads what the block before it reads, which is one of attention without `post_norm`; with a `norm`, the
        residual stream that that one reads.
        The sum of output and residual stream is multiplied by `stream_scale`. The rest is as in `attention`.
        """

    @staticmethod
    def layer_input(
        *, gate: Linear, projection: Linear, layer: int, activation: str, post_norm: NDArray[np.float32], stream_scale: float = 1.0
    ) -> DecoderBlock:
        """Creates projection(activation(gate) * e), where e is the token's embedding for a layer (see `Decoder`); without an input norm.

        The rest is as in `mlp`.
        """

    @staticmethod
    def mixture(
        *,
        norm: _StreamNorm | None,
        router: Linear,
        gate_up_proj: Linear,
        down_proj: Linear,
        scores: str,
        used: int,
        activation: str = "silu",
        parallel: bool = False,
        clamp: tuple[float, float] | None = None,
        bias: NDArray[np.float32] | None = None,
        groups: tuple[int, int, int] | None = None,
        normalised: float | None = None,
        scale: float = 1.0,
        expert_scales: NDArray[np.float32] | None = None,
        shared: tuple[Linear, Linear] | None = None,
        shared_gate: bool = False,
        norms: Sequence[NDArray[np.float32]] | None = None,
        post_norm: NDArray[np.float32] | None = None,
        residual_scale: float = 1.0,
        stream_scale: float = 1.0,
    ) -> DecoderBlock:
        """Creates a mixture of experts, of which `router` chooses `used` for each token by their scores.

        `gate_up_proj` and `down_proj` are a `Linear` of all experts. Scores are the 'softmax' of the router's logits, their 'sigmoid', or
        the 'logits', whose weights are the softmax of those that are chosen. `bias` is added to the scores for the choice alone. `groups`
        are a number of groups of experts, how many of them may be chosen from, and how many of a group's experts are in the sums by which
        groups are compared. Weights are divided by their sum and `normalised`, which
        is a small number, unless it is None, and multiplied by `scale` and by the `expert_scales` of their experts. `clamp` (slope s, limit
        l) replaces the activation by (up + 1) * gate * sigmoid(s * gate), with the gate at most l and up from -l to l. `shared` are the
        gated and the second layer of an expert that all tokens use; with `shared_gate` its output is multiplied by the sigmoid of the
        router's last logit. With `norms`, `norm` is that of the shared expert's input, and these four are those of the router's input, the
        experts' input, the sum of their outputs and the shared expert's output. The rest is as in `mlp`.
        """

@final
class RecurrentHeads:
    """The heads of a recurrent block, each of which has a matrix [key size, value size] as state."""

    def __new__(
        cls,
        *,
        count: int,
        groups: int,
        key_size: int,
        value_size: int,
        rates: NDArray[np.float32],
        step_bias: NDArray[np.float32],
        norm: NDArray[np.float32],
        norm_group: int,
        tiled: bool = False,
        skip: NDArray[np.float32] | None = None,
        steps: tuple[float, float] | None = None,
    ) -> RecurrentHeads:
        """Describes heads, whose state is multiplied by exp(rate * softplus(step + bias)) at each token.

        Head h uses key and query h modulo `groups` if they are `tiled`, else consecutive heads share them. Without `skip` the gated delta
        rule changes the state, and the rows of the block's `in_proj` are queries, keys, values, gates, betas and steps. With `skip`, which
        is a factor for each head, it is a state space (Mamba 2), whose steps are within `steps`, and the rows are gates, values, keys,
        queries and steps. `norm` is the weight of the outputs' norm, of `norm_group` numbers at a time.
        """

@final
class Adapter:
    """A LoRA adapter, packed for this processor."""

    def __new__(
        cls,
        blocks: Sequence[tuple[Sequence[_Update | None], Sequence[_Update | None]]],
        *,
        isa: str = "auto",
    ) -> Adapter:
        """Packs the updates of each block's first and second linear layer, without the GIL.

        A layer has an entry for each of its tensors: A [rank, inputs] and B [outputs, rank], which must have one dtype, the inputs, and
        the factor of B A; or None. Raises ValueError if the tensors cannot be packed.
        """

@final
class ThreadPool:
    """Threads that sleep until there is work."""

    def __new__(cls, threads: int) -> ThreadPool:
        """Starts `threads - 1` threads. The caller is the first. Raises RuntimeError if they cannot be started."""

    def choose(
        self,
        logits: NDArray[np.float32],
        temperature: NDArray[np.float64],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float64],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int32],
    ) -> bytes:
        """Draws a token for each row of logits [N, vocabulary]: int32 [N], -1 if a logit is NaN or the best is not finite.

        Temperature 0 takes the first of the most likely tokens. Otherwise tokens are sorted, most likely first, ties by id. top-k (0: all),
        then top-p and min-p select tokens, and a uniform number that depends only on the row's seed and position inverts their cumulative
        distribution. Runs without the GIL: the logits must not be written meanwhile. Raises ValueError for other shapes.
        """

    def score(self, logits: NDArray[np.float32], tokens: NDArray[np.int64], count: int) -> bytes:
        """Returns a line of `chairlift.runner.sampling.logprobs.score` for each row of logits [M, vocabulary]: int32 [M, 3 + 2 * count].

        Equally likely tokens are sorted by id. Log-probabilities are NaN where `choose` returns -1. The GIL is released as in `choose`.
        Raises ValueError for a token or a count beyond the vocabulary.
        """

@final
class Decoder:
    """A decoder on the CPU with its own threads: embeddings, a list of blocks and a head."""

    def __new__(
        cls,
        blocks: Sequence[DecoderBlock],
        *,
        norm: _StreamNorm,
        head: Linear,
        embedding: Linear | None = None,
        layer_embeddings: tuple[Linear, Linear, NDArray[np.float32]] | None = None,
        hidden_size: int,
        num_heads: int,
        kv_heads: Sequence[tuple[int, int, int | None]],
        rms_norm_eps: float,
        ropes: Sequence[tuple[NDArray[np.float32], float]],
        threads: int,
        positions: NDArray[np.float32] | None = None,
        embedding_scale: float = 1.0,
        final_softcap: float | None = None,
    ) -> Decoder:
        """Takes ownership of the blocks. Without an `embedding`, embeddings are the rows of the head.

        `kv_heads` are the number and the size of the heads in each part of the KV cache, and the size of values that are parts of keys.
        `layer_embeddings` are the table, the projection and the norm of tokens' embeddings for each layer. `positions` [positions * hidden
        size] are added to the embeddings of tokens.

        Each rotary embedding has the radians per position of the rotated pairs, which may be fewer than half of a head's numbers, and the
        factor of cosines and sines. All weights must be packed for one instruction set, which the decoder uses. Raises ValueError for
        blocks that do not fit the configuration.
        """

    def allocate_states(self, slots: int) -> StateCache | None:
        """Creates slots for recurrent states. None if no layer is recurrent. Raises MemoryError if the system refuses the memory."""

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
        adapters: NDArray[np.int32] | None = None,
        states: StateCache | None = None,
        state_slots: NDArray[np.int32] | None = None,
        state_saves: NDArray[np.int32] | None = None,
    ) -> None:
        """Runs a step over the cache, without the GIL, and keeps the hidden states of its tokens.

        With `states` it goes on from the states in `state_slots` and writes the new ones there; a sequence whose first token is at position
        0 begins without a state. `state_saves` are triples of a sequence, a number of its tokens, and the slot that gets the state after
        them.

        The arrays are those of `chairlift.runner.buffers.StepBuffers`. `block_tables` is read in place and must not change until the call
        returns. `adapters` has the number of the adapter of each batch slot, 0 for none. Raises ValueError
        for a step that is not safe to run in parallel (two tokens with one KV slot, two states with one slot, overlapping sequences), that
        has unknown tokens or adapters, or whose states have not seen the tokens before it.
        """

    @property
    def progress(self) -> int:
        """A number that changes while the threads compute."""

    @property
    def pool(self) -> ThreadPool:
        """The threads, which also sample between steps."""

    def add_adapter(self, adapter: Adapter) -> int:
        """Takes ownership of an adapter and returns its number, the lowest free one from 1 on.

        Raises ValueError for an adapter that another decoder owns, or that does not fit this one.
        """

    def remove_adapter(self, number: int) -> None:
        """Frees the memory of an adapter, and its number."""

    def logits(self, at: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Writes the last step's logits at token positions `at` to `out` [at, vocabulary], without the GIL."""

    def states(self, at: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Writes the last step's hidden states after the last norm at token positions `at`, scaled to length 1, to `out` [at, hidden]."""

_Norm = tuple[NDArray[np.float32], NDArray[np.float32] | None]
"""Weight and bias of a layer norm, or the weight alone of a root-mean-square norm."""

@final
class EncoderBlock:
    """A block of an encoder: attention or an MLP, whose output is added to the states.

    `norms` are those of its input, of its output and of the sum.
    """

    @staticmethod
    def attention(
        *,
        norms: tuple[_Norm | None, _Norm | None, _Norm | None],
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        rope: int | None = None,
        window: int | None = None,
    ) -> EncoderBlock:
        """Creates a block of attention within a text. Takes ownership of the linear layers.

        `rope` is an index into the encoder's `ropes`. A token attends to `window` tokens on either side, or to all.
        """

    @staticmethod
    def mlp(
        *, norms: tuple[_Norm | None, _Norm | None, _Norm | None], up_proj: Linear, down_proj: Linear, gate: str | None = None
    ) -> EncoderBlock:
        """Creates an MLP with GELU; with a `gate` (silu, gelu or gelu_tanh), `up_proj` has gate and up projections."""

@final
class Encoder:
    """An encoder with its own threads. A text's result does not depend on the other texts of a call."""

    def __new__(
        cls,
        blocks: Sequence[EncoderBlock],
        *,
        tokens: Linear,
        positions: NDArray[np.float32] | None,
        types: NDArray[np.float32],
        embedding_norm: _Norm | None,
        final_norm: _Norm | None,
        pooling: str,
        dense: Sequence[tuple[Linear, str, _Norm | None]],
        normalized: bool,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        embedding_scale: float,
        attention_scale: float,
        causal: bool,
        distances: NDArray[np.float32] | None,
        ropes: Sequence[NDArray[np.float32]],
        longest: int,
        threads: int,
    ) -> Encoder:
        """Creates an encoder, which takes the blocks and the linear layers. Raises ValueError if sizes do not fit.

        `positions` and `types` are flat tables of embeddings, rows of the hidden size; `types` may be empty. `pooling` is first, last or
        mean. `dense` are layers after it: weights, activation (identity, tanh or gelu), and the norm of the result. `normalized` scales
        the result to length 1. In a `causal` model tokens do not attend to later ones. `distances` [heads, 2 * longest - 1], flat, are
        added to scores by how far the key is after the query, from 1 - longest on. `ropes` are radians per position of each pair.
        `longest` is the most tokens of a text.
        """

    @property
    def progress(self) -> int:
        """A number that changes while the threads compute."""

    def embed(self, ids: NDArray[np.int32], types: NDArray[np.int32], starts: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Writes the texts' results to `out` [texts, width], without the GIL. The width is that of the last dense layer.

        Text i has the ids from `starts[i]` to `starts[i + 1]`. `types` has the type of each token, or is empty if all are 0. Raises
        ValueError for empty or too long texts and for unknown ids or types.
        """

    @property
    def blocks(self) -> int:
        """The number of blocks."""

    def advance(self, text: PartialText, blocks: int) -> None:
        """Computes a text up to its first `blocks` blocks, or up to the last block, which is left to `finish`, without the GIL.

        Raises ValueError for an empty or too long text and for unknown ids or types.
        """

    def finish(self, text: PartialText, out: NDArray[np.float32]) -> None:
        """Computes the rest of a text and writes its result to `out` [1, width], as `embed` does. The text is then as new."""

@final
class PartialText:
    """A text that an encoder computes a few blocks at a time. From its first block on it has its states, float32 [tokens, hidden size]."""

    def __new__(cls, ids: NDArray[np.int32], types: NDArray[np.int32]) -> PartialText:
        """A text of which nothing has been computed. `types` has the type of each token, or is empty if all are 0."""

@final
class StateCache:
    """The states of all recurrent layers, in slots. `Decoder.allocate_states` makes it. Memory is only resident once it is used."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies states, one pair of slots (from, to) after another."""
    def read(self, slot: int) -> bytes:
        """The state in a slot."""
    def write(self, slot: int, position: int, state: bytes | memoryview) -> None:
        """Overwrites a slot with a state that `read` gave, that after `position` tokens."""

@final
class KvCache:
    """The KV cache of all layers, in blocks, with a host pool for swapped-out blocks. Memory is only resident once it is used.

    Its methods raise ValueError for a block that does not exist.
    """

    def __new__(
        cls, *, parts: Sequence[tuple[int, int, int, int | None]], blocks: int, block_size: int, dtype: str, host_blocks: int = 0
    ) -> KvCache:
        """Creates a cache whose parts have layers, KV heads, and numbers a head; `dtype` is float32, float16, bfloat16 or int8.

        The last number of a part is that of the first numbers of a key that are its value. None: values are stored too, as wide as keys.
        Raises MemoryError if the system refuses the memory.
        """

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, one pair (from, to) after another."""

    def swap(self, outs: Sequence[tuple[int, int]], ins: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to the host pool (block, host block), then from it (host block, block)."""

    def read(self, block: int) -> bytes:
        """The bytes of a block."""

    def discard(self, blocks: Sequence[int]) -> None:
        """Returns the memory of blocks to the system, on Linux. Their content is lost."""

    def write(self, block: int, bytes: bytes | memoryview) -> None:
        """Overwrites a block with bytes of `read`. Raises ValueError for another number of bytes."""
