//! Where a request's time went, and what it used.
//!
//! Nothing is counted per step and request: clocks run for all at once, a
//! sequence notes them when it enters a state and subtracts when it leaves.

use crate::request::{FinishReason, Time};
use std::sync::Arc;

/// What a request was doing, or waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub enum TimelineState {
    /// Every slot of the batch was taken (`max_seqs`).
    WaitSlots,
    /// The step's tokens were (`max_tokens`, or what `target_itl` leaves).
    WaitBudget,
    /// Too few blocks of the KV cache were free.
    WaitBlocks,
    /// The batch before was not done, or its own not full (static and dynamic batching).
    WaitBatch,
    /// Others go first by policy.
    WaitPolicy,
    /// Others' tenants go first, which had less service (fair policy).
    WaitFairness,
    /// The step under way when it came had to end.
    WaitStep,
    /// The prompt that it shares with its parent was not computed.
    WaitFork,
    /// Its prompt was computed, alone.
    Prefill,
    /// Its prompt was computed, in steps that others shared.
    PrefillShared,
    /// Its output was computed.
    Decode,
    /// Its output was computed, in steps that others' prompts made longer.
    DecodeShared,
    /// It had a slot, but the step had no tokens left for it.
    Stalled,
    /// It had lost its blocks, and its KV with them.
    Preempted,
    /// It had lost its blocks, and its KV lay in host memory.
    Swapped,
    /// What it had lost was computed again.
    Recompute,
    /// Its bytes were on their way to the server.
    Receive,
    /// It was parsed, its template applied, its text made into tokens.
    Tokenize,
    /// The grammar of its structured output was compiled.
    Grammar,
    /// There was no engine, or one that ended before it had answered.
    Restart,
}

/// States there are.
pub(crate) const STATES: usize = 20;
/// Those that can bind a whole group of waiting sequences: the first of them.
const LIMITS: usize = 4;

impl TimelineState {
    /// Every cause, by the name that reports use, in order.
    pub const NAMES: [(Self, &'static str); STATES] = [
        (Self::WaitSlots, "wait_slots"),
        (Self::WaitBudget, "wait_budget"),
        (Self::WaitBlocks, "wait_blocks"),
        (Self::WaitBatch, "wait_batch"),
        (Self::WaitPolicy, "wait_policy"),
        (Self::WaitFairness, "wait_fairness"),
        (Self::WaitStep, "wait_step"),
        (Self::WaitFork, "wait_fork"),
        (Self::Prefill, "prefill"),
        (Self::PrefillShared, "prefill_shared"),
        (Self::Decode, "decode"),
        (Self::DecodeShared, "decode_shared"),
        (Self::Stalled, "stalled"),
        (Self::Preempted, "preempted"),
        (Self::Swapped, "swapped"),
        (Self::Recompute, "recompute"),
        (Self::Receive, "receive"),
        (Self::Tokenize, "tokenize"),
        (Self::Grammar, "grammar"),
        (Self::Restart, "restart"),
    ];

    /// The cause's name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}

/// Why a running sequence lost its blocks and slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum PreemptionReason {
    /// The KV cache had no free block for the next token of a running sequence.
    Blocks,
    /// A request of a more urgent class waited (priority and deadline policies).
    Priority,
    /// A request of a tenant that had been served less waited (fair policy).
    Fairness,
    /// A request with much less work left waited (shortest policy).
    Shortest,
}

/// Reasons there are.
pub(crate) const PREEMPTION_REASONS: usize = 4;

impl PreemptionReason {
    /// Every reason, by the name that reports use, in order.
    pub const NAMES: [(Self, &'static str); PREEMPTION_REASONS] =
        [(Self::Blocks, "kv_blocks"), (Self::Priority, "priority"), (Self::Fairness, "fairness"), (Self::Shortest, "shortest")];
}

/// A request's account: disjoint intervals that sum to its life, and what it used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Which request.
    pub tag: u64,
    /// How it ended; `None` while it lives.
    pub finish: Option<FinishReason>,
    /// When its first byte was read, as far as the caller said what was done with it before it was added.
    pub arrived: Time,
    /// When it was added, which begins its time in the queue.
    pub submitted: Time,
    /// When its first chunk was planned.
    pub started: Option<Time>,
    /// When its first token was committed.
    pub first_token: Option<Time>,
    /// When it ended, or the time of the account.
    pub ended: Time,
    /// Microseconds by [`TimelineState`]: they sum to `ended - arrived`.
    pub states: [Time; STATES],
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of those, in the cache when it was first admitted.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Tokens computed for it, those computed again included.
    pub computed_tokens: u64,
    /// Tokens computed again after a preemption.
    pub recomputed_tokens: u64,
    /// How often it lost its blocks.
    pub preemptions: u32,
    /// Of those, with a copy in host memory.
    pub swaps: u32,
    /// Who needed the room, by tag; the first few.
    pub preempted_by: Vec<u64>,
    /// How often it lost its blocks, by [`PreemptionReason`].
    pub preempted_for: [u32; PREEMPTION_REASONS],
    /// Blocks of the KV cache times microseconds that it held them, shared ones counted for each holder.
    pub block_us: u64,
    /// Whose request.
    pub tenant: Arc<str>,
    /// Its class.
    pub priority: i32,
}

impl Timeline {
    /// The limit that it waited for longest, if any: the end of a step or of its parent's prompt is none.
    pub fn limit(&self) -> Option<TimelineState> {
        let waits = &TimelineState::NAMES[..=TimelineState::WaitFairness as usize];
        let longest = waits.iter().map(|&(cause, _)| cause).max_by_key(|&cause| self.states[cause as usize])?;
        (self.states[longest as usize] > 0).then_some(longest)
    }

    /// Microseconds from its addition to its first chunk, or to the account if there was none.
    pub fn queued(&self) -> Time {
        self.started.unwrap_or(self.ended) - self.submitted
    }
}

/// What a sequence is in, as far as its time is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum AccountState {
    New,
    Waiting,
    Fork,
    Prefill,
    Decode,
    Stalled,
    Preempted,
    Swapped,
    Recompute,
}

/// The clocks that run for all.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    now: Time,
    /// Time in steps of several sequences, and in steps with a piece of a prompt.
    several: Time,
    prefill: Time,
    in_several: bool,
    in_prefill: bool,
    /// Per group of the queue: time that it was its turn and a limit held it up.
    groups: Vec<[Time; LIMITS]>,
    turn: Option<(u32, TimelineState)>,
}

impl Clocks {
    /// The time that events are dated with: it never runs backwards.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Lets the clocks run until `now`.
    pub(crate) fn tick(&mut self, now: Time) {
        let passed = now.saturating_sub(self.now);
        self.now += passed;
        self.several += if self.in_several { passed } else { 0 };
        self.prefill += if self.in_prefill { passed } else { 0 };
        if let Some((group, limit)) = self.turn {
            self.groups[group as usize][limit as usize] += passed;
        }
    }

    /// From now on, a step runs of so many sequences, with pieces of prompts among them or not.
    pub(crate) fn step(&mut self, sequences: usize, prefill: bool) {
        (self.in_several, self.in_prefill) = (sequences > 1, prefill);
    }

    /// From now on, it is the turn of `group`, which `limit` holds up.
    pub(crate) fn hold(&mut self, turn: Option<(u32, TimelineState)>) {
        self.turn = turn;
    }

    /// Whose turn it is, and what holds it up.
    pub(crate) fn turn(&self) -> Option<(u32, TimelineState)> {
        self.turn
    }

    /// Makes room for groups up to `group`.
    pub(crate) fn admit_group(&mut self, group: u32) {
        if self.groups.len() <= group as usize {
            self.groups.resize(group as usize + 1, [0; LIMITS]);
        }
    }
}

/// A sequence's account while it lives.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// When the present state began.
    since: Time,
    /// The clocks when the state began: the group's while waiting, the steps' while running.
    base: [Time; LIMITS],
    states: [Time; STATES],
    swaps: u32,
    preempted_by: Vec<u64>,
    preempted_for: [u32; PREEMPTION_REASONS],
    /// Time before it was added.
    prepared: Time,
    computed_tokens: u64,
    recomputed_tokens: u64,
    block_us: u64,
    held: u64,
    held_since: Time,
}

/// The preemptors that a timeline names.
const NAMED: usize = 4;

impl Account {
    /// Opens the account of a request that came at `arrived`.
    pub(crate) fn open(arrived: Time) -> Self {
        Self { since: arrived, ..Self::default() }
    }

    /// Books time that was spent on the request before it was added.
    pub(crate) fn prepare(&mut self, cause: TimelineState, time: Time) {
        self.states[cause as usize] += time;
        self.prepared += time;
    }

    /// All of that time.
    pub(crate) fn prepared(&self) -> Time {
        self.prepared
    }

    /// When the present state began.
    pub(crate) fn since(&self) -> Time {
        self.since
    }

    /// Books the time of the state that it leaves, and begins another. `others` is
    /// what it is called when it is not the group's turn.
    pub(crate) fn enter(&mut self, leaves: AccountState, enters: AccountState, clocks: &Clocks, group: u32, others: TimelineState) {
        self.book(leaves, clocks, group, others);
        self.since = clocks.now;
        self.base = match enters {
            AccountState::Waiting => clocks.groups[group as usize],
            _ => [clocks.several, clocks.prefill, 0, 0],
        };
    }

    fn book(&mut self, state: AccountState, clocks: &Clocks, group: u32, others: TimelineState) {
        let mut add = |cause: TimelineState, time: Time| self.states[cause as usize] += time;
        let passed = clocks.now - self.since;
        match state {
            AccountState::New => add(TimelineState::WaitStep, passed),
            AccountState::Waiting => {
                let mut rest = passed;
                for (limit, (clock, base)) in clocks.groups[group as usize].iter().zip(&self.base).enumerate() {
                    add(TimelineState::NAMES[limit].0, clock - base);
                    rest -= clock - base;
                }
                add(others, rest);
            }
            AccountState::Fork => add(TimelineState::WaitFork, passed),
            AccountState::Prefill => {
                let shared = clocks.several - self.base[0];
                add(TimelineState::PrefillShared, shared);
                add(TimelineState::Prefill, passed - shared);
            }
            AccountState::Decode => {
                let shared = clocks.prefill - self.base[1];
                add(TimelineState::DecodeShared, shared);
                add(TimelineState::Decode, passed - shared);
            }
            AccountState::Stalled => add(TimelineState::Stalled, passed),
            AccountState::Preempted => add(TimelineState::Preempted, passed),
            AccountState::Swapped => add(TimelineState::Swapped, passed),
            AccountState::Recompute => add(TimelineState::Recompute, passed),
        }
    }

    /// Notes that the sequence holds `blocks` from now on.
    pub(crate) fn hold(&mut self, blocks: usize, clocks: &Clocks) {
        self.block_us += self.held * (clocks.now - self.held_since);
        (self.held, self.held_since) = (blocks as u64, clocks.now);
    }

    /// Notes that it lost its blocks, and to whom: `None` if it was itself that needed them.
    pub(crate) fn preempt(&mut self, reason: PreemptionReason, by: Option<u64>, swapped: bool) {
        self.preempted_for[reason as usize] += 1;
        self.swaps += u32::from(swapped);
        if self.preempted_by.len() < NAMED {
            self.preempted_by.extend(by);
        }
    }

    /// Notes tokens that were computed for it.
    pub(crate) fn compute(&mut self, tokens: u32) {
        self.computed_tokens += u64::from(tokens);
    }

    /// Notes tokens that are computed again.
    pub(crate) fn recompute(&mut self, tokens: u32) {
        self.recomputed_tokens += u64::from(tokens);
    }

    /// Tokens computed for it in runs that have ended.
    pub(crate) fn computed_tokens(&self) -> u64 {
        self.computed_tokens
    }

    /// The account up to now, of a sequence in `state`, into `timeline`.
    pub(crate) fn read(&self, state: AccountState, clocks: &Clocks, group: u32, others: TimelineState, timeline: &mut Timeline) {
        let mut copy = Self { since: self.since, base: self.base, states: self.states, ..Self::default() };
        copy.book(state, clocks, group, others);
        timeline.states = copy.states;
        timeline.block_us = self.block_us + self.held * (clocks.now - self.held_since);
        timeline.recomputed_tokens = self.recomputed_tokens;
        timeline.swaps = self.swaps;
        timeline.preempted_by.clone_from(&self.preempted_by);
        timeline.preempted_for = self.preempted_for;
    }
}
