//! Timelines: the time that a request spent in each state, and its usage.
//!
//! Nothing is counted per step and request. Shared clocks run for all sequences. A sequence notes the clocks when it
//! enters a state and subtracts them when it leaves.

use super::audit::QueuePosition;
use super::energy::Window;
use crate::memory::Taker;
use crate::policy::PreemptionReason;
use crate::request::{FinishReason, Tier, Time, named_enum, nonzero};
use serde::Serialize;
use std::sync::Arc;

named_enum! {
    /// The state of a request for its timeline.
    pub enum TimelineState {
        /// Waited for a slot of the batch (`max_num_seqs`).
        WaitSlots = "wait_slots",
        /// Waited for tokens of a step (`max_num_batched_tokens`, or the limit from `target_itl`).
        WaitBudget = "wait_budget",
        /// Waited for free KV blocks.
        WaitBlocks = "wait_blocks",
        /// Waited for the previous batch to end or its own batch to fill (static and dynamic batching).
        WaitBatch = "wait_batch",
        /// Waited because the policy serves other requests first.
        WaitPolicy = "wait_policy",
        /// Waited because tenants with less service go first (fair policy).
        WaitFairness = "wait_fairness",
        /// Waited for the step in flight at its arrival to end.
        WaitStep = "wait_step",
        /// Waited for its parent's prompt to be computed, because it is a fork.
        WaitFork = "wait_fork",
        /// Waited for the turn of its session.
        WaitSession = "wait_session",
        /// Computed its prompt in steps without other sequences.
        Prefill = "prefill",
        /// Computed its prompt in steps shared with other sequences.
        PrefillShared = "prefill_shared",
        /// Computed its output.
        Decode = "decode",
        /// Computed its output in steps made longer by other requests' prompts.
        DecodeShared = "decode_shared",
        /// Had a slot but got no tokens in the step.
        Stalled = "stalled",
        /// Waited after a preemption that discarded its KV.
        Preempted = "preempted",
        /// Waited after a preemption, with its KV in host memory.
        Swapped = "swapped",
        /// Recomputed tokens lost in a preemption.
        Recompute = "recompute",
        /// Waited for its turn, because its tenant took more than its share of the server's own time.
        Pace = "pace",
        /// The server received the request's bytes.
        Receive = "receive",
        /// The server parsed the request, applied the chat template and tokenized the text.
        Tokenize = "tokenize",
        /// Waited for its grammar to be compiled.
        Grammar = "grammar",
        /// Waited for the KV of its prefix to be read from storage.
        ReadCache = "read_cache",
        /// Waited for an engine to start.
        Restart = "restart",
        /// Was in an engine that ended before it had answered.
        LostEngine = "lost_engine",
    }
}

/// Number of states that can block a whole group of waiting sequences. They come first.
const LIMITS: usize = 4;

/// A request's timeline: disjoint intervals that sum to its lifetime, and its usage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Timeline {
    /// The request's tag.
    pub tag: u64,
    /// Why the request ended. `None` while it is live.
    pub finish: Option<FinishReason>,
    /// When the server read the request's first byte. Includes time before the request was added, as far as the caller
    /// reported it.
    pub arrived: Time,
    /// When the request was added, to its first engine if it is resumed. Its queue time starts here.
    pub submitted: Time,
    /// When the request's first chunk was planned.
    pub started: Option<Time>,
    /// When the request's first token was committed.
    pub first_token: Option<Time>,
    /// When the request ended, or the time of this timeline if the request is live.
    pub ended: Time,
    /// Microseconds by [`TimelineState`]. They sum to `ended - arrived`.
    #[serde(serialize_with = "nonzero::<TimelineState, _, _>")]
    pub states: [Time; TimelineState::COUNT],
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that were cached when the request was first admitted.
    pub cached_tokens: u32,
    /// Those of them that a request of the same tenant put into the cache or had used before. The request's tenant is told
    /// of no others, because they tell which prompts other tenants have sent.
    pub own_cached_tokens: u32,
    /// Prompt tokens whose KV was cached then, but which were computed again because no recurrent state was saved after them. Like
    /// `own_cached_tokens`, without those that only other tenants had used.
    pub lost_hit_tokens: u32,
    /// Tokens of blocks that only the request's session had used and that were evicted since its request before this one started, by
    /// [`Taker`](crate::Taker).
    #[serde(serialize_with = "nonzero::<Taker, _, _>")]
    pub evicted_for: [u32; Taker::COUNT],
    /// Generated tokens.
    pub output_tokens: u32,
    /// Computed tokens, including recomputed ones.
    pub computed_tokens: u64,
    /// Tokens recomputed after a preemption.
    pub recomputed_tokens: u64,
    /// The request's parts of the times of its steps, in nanoseconds, by the step-time model.
    pub compute_ns: u64,
    /// The energy that a meter measured for these parts, in microjoules. `None` without a meter.
    pub energy_uj: Option<u64>,
    /// Drafted tokens that were computed.
    pub draft_tokens: u32,
    /// Drafted tokens that the answer contains. Each saved a step.
    pub accepted_draft_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// Preemptions with a copy of the KV in host memory.
    pub swaps: u32,
    /// Tags of the requests that caused the preemptions. Only the first few.
    pub preempted_by: Vec<u64>,
    /// Number of preemptions, by [`PreemptionReason`].
    #[serde(serialize_with = "nonzero::<PreemptionReason, _, _>")]
    pub preempted_for: [u32; PreemptionReason::COUNT],
    /// KV blocks multiplied by the microseconds they were held. A shared block counts once for each holder. Those that the request's session
    /// kept in its turn, since its previous request, are included.
    pub block_us: u64,
    /// The request's tenant.
    pub tenant: Arc<str>,
    /// The tenant's name for the request's session.
    #[serde(skip)]
    pub session: Option<Arc<str>>,
    /// The request's class.
    pub priority: i32,
    /// The request's tier.
    pub tier: Tier,
    /// The request's place in the queue.
    #[serde(skip)]
    pub queue_position: QueuePosition,
}

impl Timeline {
    /// The limit that the request waited for longest, if any. Waiting for a step or for a parent's prompt does not
    /// count as a limit.
    pub fn limit(&self) -> Option<TimelineState> {
        let waits = &TimelineState::NAMES[..=TimelineState::WaitFairness as usize];
        let longest = waits.iter().map(|&(cause, _)| cause).max_by_key(|&cause| self.states[cause as usize])?;
        (self.states[longest as usize] > 0).then_some(longest)
    }

    /// Microseconds from the request's addition to its first chunk, or until now if it has none.
    pub fn queued(&self) -> Time {
        self.started.unwrap_or(self.ended).saturating_sub(self.submitted)
    }
}

/// A sequence's state, `None` in the queue, and the group that orders the sequence there.
pub(crate) type StateInGroup = (Option<TimelineState>, u32);

/// Clocks shared by all sequences.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    now: Time,
    /// Time in steps with several sequences. The next field is time in steps with prompt pieces.
    several: Time,
    prefill: Time,
    in_several: bool,
    in_prefill: bool,
    /// Per queue group: time in which the group was next in the queue and a limit blocked it.
    groups: Vec<[Time; LIMITS]>,
    blocked: Option<(u32, TimelineState)>,
}

impl Clocks {
    /// The time of events. It never decreases.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Advances the clocks to `now`.
    pub(crate) fn tick(&mut self, now: Time) {
        let passed = now.saturating_sub(self.now);
        self.now += passed;
        self.several += if self.in_several { passed } else { 0 };
        self.prefill += if self.in_prefill { passed } else { 0 };
        if let Some((group, limit)) = self.blocked {
            self.groups[group as usize][limit as usize] += passed;
        }
    }

    /// Sets the step that runs from now on: its number of sequences, and whether it has prompt pieces.
    pub(crate) fn step(&mut self, sequences: usize, prefill: bool) {
        (self.in_several, self.in_prefill) = (sequences > 1, prefill);
    }

    /// Sets the group that is next in the queue from now on, and the limit that blocks it.
    pub(crate) fn block(&mut self, blocked: Option<(u32, TimelineState)>) {
        self.blocked = blocked;
    }

    /// The group that is next in the queue, and the limit that blocks it.
    pub(crate) fn blocked(&self) -> Option<(u32, TimelineState)> {
        self.blocked
    }

    /// Makes room for groups up to `group`.
    pub(crate) fn admit_group(&mut self, group: u32) {
        if self.groups.len() <= group as usize {
            self.groups.resize(group as usize + 1, [0; LIMITS]);
        }
    }
}

/// A live sequence's account.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// When the current state began.
    since: Time,
    submitted: Time,
    /// Values of the clocks when the state began: the group's clocks while waiting, the step clocks while running.
    base: [Time; LIMITS],
    states: [Time; TimelineState::COUNT],
    swaps: u32,
    preempted_by: Vec<u64>,
    preempted_for: [u32; PreemptionReason::COUNT],
    /// Time before the request was added.
    prepared: Time,
    computed_tokens: u64,
    recomputed_tokens: u64,
    compute_ns: u64,
    /// The part of `compute_ns` whose energy is not divided yet.
    unmetered_ns: u64,
    energy_uj: u64,
    draft_tokens: u32,
    accepted_draft_tokens: u32,
    block_us: u64,
    held: u64,
    held_since: Time,
    queue_position: QueuePosition,
}

/// Maximum number of preempting requests listed in a timeline.
const NAMED: usize = 4;

impl Account {
    /// Opens the account of a request that arrived at `arrived`, and was first submitted at `submitted`.
    pub(crate) fn open(arrived: Time, submitted: Time) -> Self {
        Self { since: arrived, submitted, ..Self::default() }
    }

    /// Begins the time in the queue, for a request that was prepared first.
    pub(crate) fn submit(&mut self, now: Time) {
        self.submitted = now;
    }

    /// When the request was added to its first engine.
    pub(crate) fn submitted(&self) -> Time {
        self.submitted
    }

    /// The request's place in the queue when it first started.
    pub(crate) fn queue_position(&self) -> QueuePosition {
        self.queue_position
    }

    /// Records the place in the queue from which the request first starts.
    pub(crate) fn start(&mut self, position: QueuePosition) {
        self.queue_position = position;
    }

    /// Adds time spent on the request before it was added.
    pub(crate) fn prepare(&mut self, cause: TimelineState, time: Time) {
        self.states[cause as usize] += time;
        self.prepared += time;
    }

    /// Total time before the request was added.
    pub(crate) fn prepared(&self) -> Time {
        self.prepared
    }

    /// When the current state began.
    pub(crate) fn since(&self) -> Time {
        self.since
    }

    /// Closes the state `leaves` and begins `enters`. `others` is the state to book while another group is next.
    pub(crate) fn enter(&mut self, leaves: StateInGroup, enters: StateInGroup, clocks: &Clocks, others: TimelineState) {
        self.book(leaves, clocks, others);
        self.since = clocks.now;
        self.base = match enters {
            (None, group) => clocks.groups[group as usize],
            (Some(_), _) => [clocks.several, clocks.prefill, 0, 0],
        };
    }

    fn book(&mut self, (state, group): StateInGroup, clocks: &Clocks, others: TimelineState) {
        let mut add = |cause: TimelineState, time: Time| self.states[cause as usize] += time;
        let passed = clocks.now - self.since;
        match state {
            None => {
                let mut rest = passed;
                for (limit, (clock, base)) in clocks.groups[group as usize].iter().zip(&self.base).enumerate() {
                    add(TimelineState::NAMES[limit].0, clock - base);
                    rest -= clock - base;
                }
                add(others, rest);
            }
            Some(TimelineState::Prefill) => {
                let shared = clocks.several - self.base[0];
                add(TimelineState::PrefillShared, shared);
                add(TimelineState::Prefill, passed - shared);
            }
            Some(TimelineState::Decode) => {
                let shared = clocks.prefill - self.base[1];
                add(TimelineState::DecodeShared, shared);
                add(TimelineState::Decode, passed - shared);
            }
            Some(state) => add(state, passed),
        }
    }

    /// Records that the sequence holds `blocks` from now on.
    pub(crate) fn hold(&mut self, blocks: usize, clocks: &Clocks) {
        self.block_us += self.held * (clocks.now - self.held_since);
        (self.held, self.held_since) = (blocks as u64, clocks.now);
    }

    /// Adds what the sequence's session kept for it, in blocks multiplied by microseconds.
    pub(crate) fn keep(&mut self, block_us: u64) {
        self.block_us += block_us;
    }

    /// Records a preemption. `by` is the request that needed the blocks, or `None` if it was the sequence itself.
    pub(crate) fn preempt(&mut self, reason: PreemptionReason, by: Option<u64>, swapped: bool) {
        self.preempted_for[reason as usize] += 1;
        self.swaps += u32::from(swapped);
        if self.preempted_by.len() < NAMED {
            self.preempted_by.extend(by);
        }
    }

    /// Records tokens that were computed for the sequence.
    pub(crate) fn compute(&mut self, tokens: u32) {
        self.computed_tokens += u64::from(tokens);
    }

    /// Records tokens that are recomputed.
    pub(crate) fn recompute(&mut self, tokens: u32) {
        self.recomputed_tokens += u64::from(tokens);
    }

    /// Adds parts of the times of steps, whose energy is not divided yet.
    pub(crate) fn add_unmetered(&mut self, ns: u64) {
        self.compute_ns += ns;
        self.unmetered_ns += ns;
    }

    /// Begins to meter: the time until now takes no energy.
    pub(crate) fn begin_meter(&mut self) {
        self.unmetered_ns = 0;
    }

    /// Adds the energy of the time since the last call, and returns it.
    pub(crate) fn meter(&mut self, window: &Window) -> u64 {
        let energy = window.share(std::mem::take(&mut self.unmetered_ns));
        self.energy_uj += energy;
        energy
    }

    /// The sequence's energy in microjoules, as far as it is divided.
    pub(crate) fn energy_uj(&self) -> u64 {
        self.energy_uj
    }

    /// The sequence's parts of the times of steps, without those that its slot still counts.
    pub(crate) fn compute_ns(&self) -> u64 {
        self.compute_ns
    }

    /// Records a draft of `drafted` tokens, of which the answer contains `accepted`.
    pub(crate) fn draft(&mut self, drafted: u32, accepted: u32) {
        self.draft_tokens += drafted;
        self.accepted_draft_tokens += accepted;
    }

    /// Computed tokens in runs that have ended.
    pub(crate) fn computed_tokens(&self) -> u64 {
        self.computed_tokens
    }

    /// The part of a timeline that is in the account of a sequence in `state`, up to now.
    pub(crate) fn read(&self, state: StateInGroup, clocks: &Clocks, others: TimelineState) -> Timeline {
        let mut copy = Self { since: self.since, base: self.base, states: self.states, ..Self::default() };
        copy.book(state, clocks, others);
        Timeline {
            states: copy.states,
            block_us: self.block_us + self.held * (clocks.now - self.held_since),
            recomputed_tokens: self.recomputed_tokens,
            draft_tokens: self.draft_tokens,
            accepted_draft_tokens: self.accepted_draft_tokens,
            swaps: self.swaps,
            preempted_by: self.preempted_by.clone(),
            preempted_for: self.preempted_for,
            ..Timeline::default()
        }
    }
}
