//! Waiting requests: their order, their counts and their batch.

use super::awaited::Awaited;
use super::order::{Queue, Walk};
use super::shares::Shares;
use crate::config::Batching;
use crate::memory::BlockHash;
use crate::policy::{Key, Rules};
use crate::request::{ArrivalNumber, Preparation, SeqId, Tier, Time};
use crate::sequence::{Phase, Sequence};

/// Maximum number of sequences moved within the order in one plan. Later plans move the rest.
const MAX_MOVED: usize = 16;

/// Requests that have not run yet, without forks and background requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) reqs: u32,
    pub(crate) prompt_tokens: u64,
}

impl Backlog {
    fn add(&mut self, seq: &Sequence) {
        if seq.counts_as_queued() {
            self.reqs += 1;
            self.prompt_tokens += u64::from(seq.spec().prompt_len);
        }
    }

    fn remove(&mut self, seq: &Sequence) {
        if seq.counts_as_queued() {
            self.reqs -= 1;
            self.prompt_tokens -= u64::from(seq.spec().prompt_len);
        }
    }
}

/// Number of waiting sequences of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds {
    /// Queued sequences that ran before.
    pub(crate) returning: usize,
    /// Queued sequences with KV in host memory.
    pub(crate) swapped: usize,
    /// Forks that wait for their parent's prompt. They are not in the queue.
    pub(crate) on_parent: usize,
    /// Sequences that wait for their session's turn. They are not in the queue.
    pub(crate) on_session: usize,
    /// Sequences that wait for each preparation. They are not in the queue.
    pub(crate) preparing: [usize; Preparation::COUNT],
    /// Queued sequences of each tier.
    tiers: [usize; Tier::COUNT],
}

impl Kinds {
    /// Sequences that wait and are not in the queue.
    pub(crate) fn outside_queue(&self) -> usize {
        self.on_parent + self.on_session + self.preparing.iter().sum::<usize>()
    }
}

/// Limits which waiting sequences may start under static and dynamic batching.
#[derive(Debug, Default)]
struct Gate {
    /// Sequences of the batch that have not started.
    remaining: u32,
    /// When the batch starts even if it is not full.
    opens_at: Option<Time>,
}

/// The waiting requests.
#[derive(Debug)]
pub(crate) struct Waiting {
    queue: Queue,
    /// Requests added since the last plan.
    new: Vec<SeqId>,
    kinds: Kinds,
    backlog: Backlog,
    /// The part of the backlog that waits for turns of sessions.
    in_line: Backlog,
    awaited: Awaited,
    /// Number of sequences that this plan may still move within the order.
    moves_left: usize,
    gate: Gate,
    /// Requests that did not fit in this plan.
    rejected: Vec<SeqId>,
    /// Number of requests that have arrived, including forks.
    arrived: ArrivalNumber,
}

impl Waiting {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            queue: Queue::new(rules),
            new: Vec::new(),
            kinds: Kinds::default(),
            backlog: Backlog::default(),
            in_line: Backlog::default(),
            awaited: Awaited::default(),
            moves_left: MAX_MOVED,
            gate: Gate::default(),
            rejected: Vec::new(),
            arrived: 0,
        }
    }

    /// The arrival number of the next request.
    pub(crate) fn next_arrival(&self) -> ArrivalNumber {
        self.arrived
    }

    /// Counts an arrived request.
    pub(crate) fn arrive(&mut self) {
        self.arrived += 1;
    }

    /// Number of requests in the queue.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Number of requests in the queue, without background requests.
    pub(crate) fn foreground(&self) -> usize {
        self.queue.len() - self.kinds.tiers[Tier::Background as usize]
    }

    pub(crate) fn kinds(&self) -> Kinds {
        self.kinds
    }

    /// The most urgent tier with queued sequences.
    pub(crate) fn most_urgent_tier(&self) -> Option<Tier> {
        Tier::NAMES.iter().find(|(tier, _)| self.kinds.tiers[*tier as usize] > 0).map(|&(tier, _)| tier)
    }

    /// Whether sequences of several tiers are queued, without the background.
    pub(crate) fn has_several_tiers(&self) -> bool {
        self.kinds.tiers[..Tier::Background as usize].iter().filter(|&&queued| queued > 0).count() > 1
    }

    /// Requests that have not run yet, without forks and background requests.
    pub(crate) fn backlog(&self) -> Backlog {
        self.backlog
    }

    /// The backlog without requests that wait for the turns of their sessions.
    pub(crate) fn next_backlog(&self) -> Backlog {
        let Backlog { reqs, prompt_tokens } = self.backlog;
        Backlog { reqs: reqs - self.in_line.reqs, prompt_tokens: prompt_tokens - self.in_line.prompt_tokens }
    }

    /// Counts a sequence that enters the queue. [`place`](Self::place) then adds it to the order.
    pub(crate) fn count(&mut self, seq: &Sequence) {
        self.kinds.returning += usize::from(seq.has_started());
        self.kinds.swapped += usize::from(seq.phase().swapped_tokens() > 0);
        self.kinds.tiers[seq.request().tier as usize] += 1;
        self.backlog.add(seq);
    }

    /// Counts a sequence that its caller prepares.
    pub(crate) fn begin_preparation(&mut self, seq: &Sequence, preparation: Preparation) {
        self.kinds.preparing[preparation as usize] += 1;
        self.backlog.add(seq);
    }

    /// Removes a sequence that its caller has prepared, or that ends before.
    pub(crate) fn end_preparation(&mut self, seq: &Sequence, preparation: Preparation) {
        self.kinds.preparing[preparation as usize] -= 1;
        self.backlog.remove(seq);
    }

    /// Counts a sequence that waits for its session's turn.
    pub(crate) fn begin_session_wait(&mut self, seq: &Sequence) {
        self.kinds.on_session += 1;
        self.backlog.add(seq);
        self.in_line.add(seq);
        self.queue.begin_session_wait(seq.member().tenant);
    }

    /// Removes a sequence whose session's turn begins, or that ends before.
    pub(crate) fn end_session_wait(&mut self, seq: &Sequence) {
        self.kinds.on_session -= 1;
        self.backlog.remove(seq);
        self.in_line.remove(seq);
        self.queue.end_session_wait(seq.member().tenant);
    }

    /// Lets the tenant of a sequence wait for as long as its prefix is read, because its session's turn has come.
    pub(crate) fn begin_reload(&mut self, seq: &Sequence) {
        self.queue.begin_session_wait(seq.member().tenant);
    }

    /// Records that the prefix is read, or that the sequence ends before.
    pub(crate) fn end_reload(&mut self, seq: &Sequence) {
        self.queue.end_session_wait(seq.member().tenant);
    }

    /// Adds a sequence to the order. `returns` is set if the sequence ran before.
    pub(crate) fn place(&mut self, seq: &mut Sequence, id: SeqId, key: Key, returns: bool) {
        seq.queue_entry.set_key(key);
        self.queue.push(key, id, returns);
    }

    /// Lets a plan move sequences within the order.
    pub(crate) fn begin_moves(&mut self) {
        self.moves_left = MAX_MOVED;
    }

    /// Counts a sequence that this plan moves. Returns false if the plan may move no more.
    pub(crate) fn take_move(&mut self) -> bool {
        let may = self.moves_left > 0;
        self.moves_left -= usize::from(may);
        may
    }

    /// Moves a sequence within the order of its group.
    pub(crate) fn reorder(&mut self, seq: &mut Sequence, id: SeqId, key: Key) {
        self.queue.reorder(seq.queue_entry.key(), key, id);
        seq.queue_entry.set_key(key);
    }

    /// Removes a sequence from the queue.
    pub(crate) fn remove(&mut self, seq: &mut Sequence) {
        self.queue.remove(seq.queue_entry.key());
        self.awaited.leave(seq);
        self.kinds.returning -= usize::from(seq.has_started());
        self.kinds.swapped -= usize::from(seq.phase().swapped_tokens() > 0);
        self.kinds.tiers[seq.request().tier as usize] -= 1;
        self.backlog.remove(seq);
    }

    /// Records a request added since the last plan.
    pub(crate) fn add_new(&mut self, id: SeqId) {
        self.new.push(id);
    }

    /// Number of requests added since the last plan.
    pub(crate) fn new_len(&self) -> usize {
        self.new.len()
    }

    /// Takes the requests added since the last plan.
    pub(crate) fn take_new(&mut self) -> impl Iterator<Item = SeqId> {
        self.new.drain(..)
    }

    /// Counts a fork that waits for its parent.
    pub(crate) fn wait_on_parent(&mut self) {
        self.kinds.on_parent += 1;
    }

    /// Removes a fork that waited for its parent.
    pub(crate) fn leave_parent(&mut self) {
        self.kinds.on_parent -= 1;
    }

    /// The first sequence in serving order.
    pub(crate) fn first(&mut self) -> Option<SeqId> {
        self.queue.first()
    }

    /// The sequence that arrived first.
    pub(crate) fn oldest(&self) -> Option<SeqId> {
        self.queue.oldest()
    }

    /// The next sequence of a walk in the order of the policy.
    pub(crate) fn next(&mut self, walk: &mut Walk) -> Option<SeqId> {
        self.queue.next(walk)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, SeqId)> + '_ {
        self.queue.iter()
    }

    /// The tenants' virtual counters.
    pub(crate) fn shares(&self) -> &Shares {
        self.queue.shares()
    }

    pub(crate) fn shares_mut(&mut self) -> &mut Shares {
        self.queue.shares_mut()
    }

    /// Makes a sequence await one of its blocks: see [`Awaited::enter`].
    pub(crate) fn await_block(&mut self, seq: &mut Sequence, id: SeqId, block: usize, computed_by: Option<SeqId>) {
        self.awaited.enter(seq, id, block, computed_by);
    }

    /// Clears the block that a sequence awaits.
    pub(crate) fn await_nothing(&mut self, seq: &mut Sequence) {
        self.awaited.leave(seq);
    }

    /// Records that a block is cached, or that no sequence computes it any more.
    pub(crate) fn block_ready(&mut self, name: BlockHash) {
        self.awaited.ready(name);
    }

    /// The next sequence whose awaited block is ready. `None` if this plan may move no more sequences.
    pub(crate) fn next_ready(&mut self) -> Option<SeqId> {
        if self.moves_left == 0 {
            return None;
        }
        let id = self.awaited.next()?;
        self.moves_left -= 1;
        Some(id)
    }

    /// Whether [`next_ready`](Self::next_ready) will return this sequence. For tests.
    pub(crate) fn will_be_ready(&self, seq: &Sequence) -> bool {
        self.awaited.will_return(seq)
    }

    /// Clears the list of requests that do not fit, at the start of a plan.
    pub(crate) fn clear_rejected(&mut self) {
        self.rejected.clear();
    }

    /// Records that a request does not fit.
    pub(crate) fn reject(&mut self, id: SeqId) {
        self.rejected.push(id);
    }

    /// Requests that did not fit in this plan.
    pub(crate) fn rejected(&self) -> &[SeqId] {
        &self.rejected
    }

    /// Opens a batch under static and dynamic batching if no sequence runs. Under dynamic batching, the batch also
    /// waits until it is full or its timeout has passed. `oldest` is the arrival time of the oldest waiting request. Under
    /// continuous batching, requests wait until `gathers_until`.
    pub(crate) fn open_batch(&mut self, batching: Batching, idle: bool, oldest: Option<Time>, gathers_until: Option<Time>, now: Time) {
        self.gate.opens_at = None;
        let (size, timeout) = match batching {
            Batching::Continuous => {
                self.gate.opens_at = gathers_until.filter(|&until| now < until);
                return;
            }
            Batching::Static { size } => (size, 0),
            Batching::Dynamic { size, timeout } => (size, timeout),
        };
        let waiting = (self.queue.len() - self.kinds.returning) as u32;
        self.gate.remaining = self.gate.remaining.min(waiting);
        if self.gate.remaining > 0 || waiting == 0 || !idle {
            return;
        }
        let opens_at = oldest.map_or(0, |oldest| oldest.saturating_add(timeout));
        if waiting >= size || self.kinds.returning > 0 || now >= opens_at {
            self.gate.remaining = size.min(waiting);
        } else {
            self.gate.opens_at = Some(opens_at);
        }
    }

    /// When a dynamic batch starts even if it is not full.
    pub(crate) fn batch_opens_at(&self) -> Option<Time> {
        self.gate.opens_at
    }

    /// Sequences of the batch that have not started.
    pub(crate) fn batch_remaining(&self) -> u32 {
        self.gate.remaining
    }

    /// Records that a sequence of the batch has started.
    pub(crate) fn start_batch_member(&mut self) {
        self.gate.remaining = self.gate.remaining.saturating_sub(1);
    }

    /// Panics unless the queue agrees with the sequences. `get` returns live sequences.
    pub(crate) fn check<'a>(&self, get: impl Fn(SeqId) -> Option<&'a Sequence>, all: impl Iterator<Item = &'a Sequence>) {
        for (key, id) in self.queue.iter() {
            let seq = get(id).expect("a queued sequence exists");
            assert_eq!((seq.queue_entry.key(), seq.slot()), (key, None), "queued under another name, or while it runs");
        }
        let (mut kinds, mut backlog, mut in_line) = (Kinds::default(), Backlog::default(), Backlog::default());
        for seq in all {
            match seq.phase() {
                Phase::WaitingOnParent => {
                    kinds.on_parent += 1;
                    continue;
                }
                Phase::Preparing(preparation) => kinds.preparing[preparation as usize] += 1,
                Phase::WaitSession { .. } => {
                    kinds.on_session += 1;
                    in_line.add(seq);
                }
                _ => {
                    kinds.returning += usize::from(seq.has_started());
                    kinds.swapped += usize::from(seq.phase().swapped_tokens() > 0);
                    kinds.tiers[seq.request().tier as usize] += 1;
                }
            }
            backlog.add(seq);
        }
        assert_eq!((kinds, backlog, in_line), (self.kinds, self.backlog, self.in_line), "how many wait, by kind");
    }
}
