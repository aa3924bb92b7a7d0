"""Sizes the KV cache, the context and the largest step to the available memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.config import TILES_STEP_TOKENS, TILES_WEIGHTS, EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.machine import available_memory
from chairlift.models.shape import ModelShape
from chairlift.runner.memory.decision import Decision, asked, gib
from chairlift.runner.memory.precision import BYTES, Precision

DEFAULT_SHARE = 0.25
"""Share of free memory that the KV cache takes by default."""
LARGEST_SHARE = 0.9
"""Share of free memory that everything may take together if one sequence of full length needs it."""
STATE_SHARE = 0.5
"""Share of the memory for keys, values and recurrent states that the states may take."""
STATES_EACH, STATES_LEAST = 6, 3
"""Recurrent states for each sequence of a step, its own and those that are saved for later requests; and for how many there is room before
the default number of sequences is lowered."""
STEP_SHARE = 0.25
"""Share of free memory above which the largest step is made smaller."""

HEADROOM = 256 << 20
"""Bytes left free for grammars, requests and prompt log-probabilities; at most a quarter of the free memory."""
REGISTER, LINE, KV_SCALE_BYTES = 16, 64, 4
"""Padding of KV pages, in numbers and bytes, and the bytes of a scale, as in `rust/cpu/src/cache.rs`."""
LOGIT_BYTES = 24
"""Bytes per logit of a sampled token: the logit, a copy, and the probabilities, indices and sums of the sampler."""


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of KV blocks (with scratch block 0), tokens per sequence, sequences and tokens per step, and slots of recurrent states."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decisions: tuple[Decision, ...] = field(default=(), compare=False)
    state_slots: int = 0


class StateSize(NamedTuple):
    """Slots of recurrent states, their bytes, and the sequences in a step that they suffice for."""

    slots: int
    bytes: int
    seqs: int
    decisions: tuple[Decision, ...]


class StepSize(NamedTuple):
    """Most sequences and tokens in a step."""

    seqs: int
    tokens: int
    decisions: tuple[Decision, ...]


class Room(NamedTuple):
    """Memory for the KV cache."""

    most: int
    """Most bytes."""
    source: str
    """Origin of these bytes, for messages."""
    share: int
    """Most bytes unless one sequence of full length needs more."""
    why: str
    """Reason for `share`."""


def block_bytes(model: ModelShape, block_size: int, kv: str) -> int:
    """Bytes of one block of all layers with dtype `kv`.

    As in Rust: each head's values, or the keys that they are parts of, are padded to whole registers, int8 has a scale per key and value,
    and a page ends at a cache line.
    """
    total = 0
    for spec in model.kv_specs:
        padded = -(-(spec.value_dim or spec.head_dim) // REGISTER) * REGISTER
        numbers = spec.head_dim + padded if spec.value_dim else padded
        page = block_size * (numbers * BYTES[kv] + (2 * KV_SCALE_BYTES if kv == "int8" else 0))
        total += spec.kv_heads * -(-page // LINE) * LINE
    return total


def step_bytes(model: ModelShape, seqs: int, tokens: int) -> int:
    """Bytes of a step's activations and logits, with one sample per sequence."""
    return _sampling(model, seqs) + _activations(model, tokens)


def _sampling(model: ModelShape, seqs: int) -> int:
    return seqs * model.vocab_size * LOGIT_BYTES


def _activations(model: ModelShape, tokens: int) -> int:
    """Bytes of a layer's live tensors: input, norm and sum; queries, keys and values before and after rotation; the MLP's inner part."""
    qkv = max((model.num_heads + 2 * spec.kv_heads) * max(spec.head_dim, spec.value_dim) for spec in model.kv_specs)
    return tokens * 4 * (4 * model.hidden_size + 3 * qkv + 3 * model.widest)


def tile_step_tokens(model: ModelShape, precision: Precision) -> int | None:
    """The default tokens of a step that matrix tiles compute. None for the usual default, where the model is large."""
    if model.num_weights > TILES_WEIGHTS:
        return None
    # In bfloat16, twice as many tokens take as long.
    return TILES_STEP_TOKENS * (2 if precision.compute == "bfloat16" else 1)


def fit(config: EngineConfig, model: ModelShape, kv: str, available: int, *, step_tokens: int | None = None) -> Size:
    """Sizes everything for `available` bytes of host memory, after the weights are loaded. `step_tokens` is a default for matrix tiles.

    Sizes that the settings name are kept or refused with InvalidSetting. Other sizes shrink to fit.
    """
    step = fit_step(config, model, available, step_tokens)
    left = min(available * LARGEST_SHARE, available - headroom(available)) - step_bytes(model, step.seqs, step.tokens)
    if left < 0:
        _check_step(config, model, step, available)
    source = f"{gib(available)} of free memory"
    # A quarter by default, because other programs need memory too.
    return fit_cache(config, model, kv, step, Room(int(left), source, int(available * DEFAULT_SHARE), f"a quarter of the {source}"))


def _check_step(config: EngineConfig, model: ModelShape, step: StepSize, available: int) -> None:
    """Raises InvalidSetting for the setting that asks for a step that memory does not hold, if one does."""
    seqs, tokens = config.max_num_seqs or config.static_batch_size, config.max_num_batched_tokens
    flag, value = ("--max-num-seqs" if config.max_num_seqs else "--static-batch-size"), seqs
    if tokens is not None and (seqs is None or _activations(model, tokens) > _sampling(model, seqs)):
        flag, value = "--max-num-batched-tokens", tokens
    if value is not None:
        needs = gib(step_bytes(model, step.seqs, step.tokens))
        raise InvalidSetting(f"{flag} {value}: such a step takes {needs}, and there is {gib(available)} of free memory")


def fit_cache(config: EngineConfig, model: ModelShape, kv: str, step: StepSize, room: Room) -> Size:
    """Sizes the KV cache, the recurrent states and the context, given the size of a step."""
    states = fit_states(config, model, kv, step, room)
    seqs = states.seqs
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.longest_context:
        raise InvalidSetting(f"--max-model-len {longest}: the model was made for {model.longest_context} positions")
    size, each = config.block_size, block_bytes(model, config.block_size, kv)
    one = -(-longest // size)
    if config.num_kv_blocks is not None:
        blocks, source = config.num_kv_blocks - 1, f"--num-kv-blocks {config.num_kv_blocks} (one of them is scratch)"
        why = asked("--num-kv-blocks")
    elif config.kv_cache_memory_bytes is not None:
        blocks, source = (
            max(config.kv_cache_memory_bytes - states.bytes, 0) // each - 1,
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}",
        )
        why = asked("--kv-cache-memory-bytes")
    else:
        source = room.source
        share, most = (max(size - states.bytes, 0) for size in (room.share, room.most))
        shares = {seqs * one: f"enough for {seqs} sequences of full length", share // each: room.why}
        wanted = max(min(shares), one)
        blocks = min(wanted, most // each - 1)
        why = f"what is left of {source}" if blocks < wanted else shares.get(wanted, "one sequence of full length")
    if blocks < 1:
        raise InvalidSetting(f"{source} leaves no block for {size} tokens: two blocks of {each} bytes are needed")
    why_longest = asked("--max-model-len") if config.max_model_len else "what the model was made for"
    if blocks < one:
        if config.max_model_len is not None:
            raise InvalidSetting(
                f"--max-model-len {longest} needs {one} blocks of {size} tokens ({one * each / 2**20:.0f} MiB), "
                f"but {source} gives {blocks}: at most {blocks * size} tokens fit"
            )
        why_longest = f"what the KV cache holds; the model was made for {longest} tokens"
        longest = blocks * size
    decisions = (
        Decision("context length", f"{longest} tokens", why_longest),
        Decision("KV cache", f"{blocks * size} tokens, {gib((blocks + 1) * each)}", why),
        *states.decisions,
        *step.decisions,
    )
    return Size(blocks + 1, longest, seqs, step.tokens, decisions, states.slots)


def fit_states(config: EngineConfig, model: ModelShape, kv: str, step: StepSize, room: Room) -> StateSize:
    """Sizes the slots of recurrent states, which share their memory with the KV cache. Fewer sequences run at once if not all fit.

    Raises InvalidSetting if no state fits, or fewer than --max-num-seqs.
    """
    each = model.state_bytes
    if not each:
        return StateSize(0, 0, step.seqs, ())
    source = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}" if config.kv_cache_memory_bytes else room.source
    # One sequence that needs more than the usual share may have it, as with the KV cache.
    budget = config.kv_cache_memory_bytes or (room.share if each <= room.share * STATE_SHARE else room.most)
    if config.num_kv_blocks is not None:
        budget = min(2 * budget, 2 * (room.most - config.num_kv_blocks * block_bytes(model, config.block_size, kv)))
    fitting = max(int(budget * STATE_SHARE) // each, min(budget // each, 1))
    least = each + 2 * block_bytes(model, config.block_size, kv)
    if fitting < 1 or (config.num_kv_blocks is None and budget < least):
        raise InvalidSetting(f"{source} does not hold one sequence: its recurrent state and two KV blocks take {least} bytes")
    if config.max_num_seqs is not None and fitting < config.max_num_seqs:
        raise InvalidSetting(
            f"--max-num-seqs {config.max_num_seqs} needs as many recurrent states, each of {each} bytes, but {source} gives {fitting}"
        )
    seqs = config.max_num_seqs or min(step.seqs, max(1, fitting // STATES_LEAST))
    slots = min(fitting, seqs * STATES_EACH)
    why = f"{STATES_EACH} for each of {seqs} sequences" if slots == seqs * STATES_EACH else f"half of the caches' part of {source}"
    return StateSize(slots, slots * each, seqs, (Decision("recurrent states", f"{slots}, {gib(slots * each)}", why),))


def headroom(available: int) -> int:
    """Bytes of `available` memory to leave free."""
    return min(HEADROOM, available // 4)


def fit_step(config: EngineConfig, model: ModelShape, available: int, step_tokens: int | None = None) -> StepSize:
    """Sizes a step. If memory is short, the larger of its two parts is halved until both fit, unless a flag sets it.

    `step_tokens` is a default for matrix tiles.
    """
    usual = EngineConfig(device=config.device)
    usual_tokens = step_tokens or usual.step_tokens
    why_tokens = "the default for a small model with matrix tiles" if step_tokens else "the default"
    seqs, tokens = wanted = config.slots, config.step_tokens_from(usual_tokens)
    least = config.max_num_seqs or config.static_batch_size or 1
    while step_bytes(model, seqs, tokens) > available * STEP_SHARE:
        may_seqs = seqs > least
        may_tokens = config.max_num_batched_tokens is None and tokens > seqs
        if may_seqs and (not may_tokens or _sampling(model, seqs) > _activations(model, tokens)):
            seqs = max(seqs // 2, least)
        elif may_tokens:
            tokens = max(tokens // 2, seqs)
        else:
            break

    def why(flag: str, given: int | None, fitted: int, wanted: int, default: int, why_default: str) -> str:
        if given is not None:
            return asked(flag)
        if fitted != wanted:
            return f"{wanted} would need too much of {gib(available)} of free memory"
        return why_default if wanted == default else "follows from the other"

    return StepSize(
        seqs,
        tokens,
        (
            Decision(
                "sequences a step", str(seqs), why("--max-num-seqs", config.max_num_seqs, seqs, wanted[0], usual.slots, "the default")
            ),
            Decision(
                "tokens a step",
                str(tokens),
                why("--max-num-batched-tokens", config.max_num_batched_tokens, tokens, wanted[1], usual_tokens, why_tokens),
            ),
        ),
    )


def fit_host(config: EngineConfig, model: ModelShape, kv: str, available: int) -> int:
    """KV blocks that --swap-space holds, with `available` bytes of free host memory. Raises InvalidSetting."""
    space, each = config.swap_space, block_bytes(model, config.block_size, kv)
    if 0 < space < each:
        hint = f": write {space}G for {space} GiB" if space < 1024 else ""
        raise InvalidSetting(f"--swap-space {space} does not hold a block of {config.block_size} tokens, which takes {each} bytes{hint}")
    if space > available:
        raise InvalidSetting(f"--swap-space {space}: there are {available / 2**30:.1f} GiB of memory available")
    return space // each


class HostBudget:
    """Divides the host's memory."""

    def __init__(self, processes: int, *, tiles: bool = False) -> None:
        """`processes` is the number of processes that share this machine's memory, and `tiles` whether matrix tiles compute."""
        self._processes, self._tiles = processes, tiles

    def check(self, config: EngineConfig, model: ModelShape, precision: Precision) -> None:
        """Raises InvalidSetting, before the weights are loaded, for sizes that would not fit without them. `decide` has checked these."""
        self.fit(config, model, precision, lambda step: None)

    def fit(self, config: EngineConfig, model: ModelShape, precision: Precision, run: Callable[[StepSize], None]) -> Size:
        """Sizes a step and the KV cache. Swapped-out blocks are in the same memory as the cache."""
        available = available_memory() // self._processes
        fit_host(config, model, precision.kv, available)
        left = available - config.swap_space
        return fit(config, model, precision.kv, left, step_tokens=tile_step_tokens(model, precision) if self._tiles else None)
