//! The requests that wait: in which order, how many of which kind, and for which batch.

use crate::awaited::Awaited;
use crate::config::{Batching, Config};
use crate::hash::BlockHash;
use crate::phase::Phase;
use crate::policy::Key;
use crate::queue::{Queue, Walk};
use crate::request::{ArrivalNumber, SeqId, Time};
use crate::sequence::Sequence;

/// Requests that never ran, forks not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) reqs: u32,
    pub(crate) prompt_tokens: u64,
}

/// How many wait, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds {
    /// In the queue, after they ran.
    pub(crate) returning: usize,
    /// Of those, with their KV in host memory.
    pub(crate) swapped: usize,
    /// Forks that wait for their parents' prompts; they are in no queue.
    pub(crate) on_parent: usize,
}

/// Which of the waiting may start, where sequences run in batches (static and dynamic batching).
#[derive(Debug, Default)]
struct Gate {
    /// Members of the batch that have not started.
    remaining: u32,
    /// When the batch starts, full or not.
    opens_at: Option<Time>,
}

/// The requests that wait.
#[derive(Debug)]
pub(crate) struct Waiting {
    queue: Queue,
    /// Added since the last plan.
    new: Vec<SeqId>,
    kinds: Kinds,
    backlog: Backlog,
    awaited: Awaited,
    gate: Gate,
    /// Requests that this plan has found not to fit.
    rejected: Vec<SeqId>,
    /// Requests that have arrived, forks included.
    arrived: ArrivalNumber,
}

impl Waiting {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            queue: Queue::new(config.policy),
            new: Vec::new(),
            kinds: Kinds::default(),
            backlog: Backlog::default(),
            awaited: Awaited::default(),
            gate: Gate::default(),
            rejected: Vec::new(),
            arrived: 0,
        }
    }

    /// The number of the next request to arrive.
    pub(crate) fn next_arrival(&self) -> ArrivalNumber {
        self.arrived
    }

    /// Notes that a request has arrived.
    pub(crate) fn arrive(&mut self) {
        self.arrived += 1;
    }

    /// Requests in the queue.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn kinds(&self) -> Kinds {
        self.kinds
    }

    /// Requests that never ran, forks not counted.
    pub(crate) fn backlog(&self) -> Backlog {
        self.backlog
    }

    /// Counts a sequence that enters the queue; [`place`](Self::place) puts it there.
    pub(crate) fn count(&mut self, seq: &Sequence) {
        self.kinds.returning += usize::from(seq.has_started());
        self.kinds.swapped += usize::from(seq.phase().swapped_tokens() > 0);
        if seq.counts_as_queued() {
            self.backlog.reqs += 1;
            self.backlog.prompt_tokens += u64::from(seq.spec().prompt_len);
        }
    }

    /// Puts a sequence into the order; `returns` if it ran.
    pub(crate) fn place(&mut self, seq: &mut Sequence, id: SeqId, key: Key, returns: bool) {
        seq.place.set_key(key);
        self.queue.push(key, id, returns);
    }

    /// Moves a sequence to another place in the order of its group.
    pub(crate) fn reorder(&mut self, seq: &mut Sequence, id: SeqId, key: Key) {
        self.queue.reorder(seq.place.key(), key, id);
        seq.place.set_key(key);
    }

    /// Takes a sequence out of the queue.
    pub(crate) fn remove(&mut self, seq: &mut Sequence) {
        self.queue.remove(seq.place.key());
        self.awaited.leave(seq);
        self.kinds.returning -= usize::from(seq.has_started());
        self.kinds.swapped -= usize::from(seq.phase().swapped_tokens() > 0);
        if seq.counts_as_queued() {
            self.backlog.reqs -= 1;
            self.backlog.prompt_tokens -= u64::from(seq.spec().prompt_len);
        }
    }

    /// Notes that a request was added since the last plan.
    pub(crate) fn add_new(&mut self, id: SeqId) {
        self.new.push(id);
    }

    /// How many were added since the last plan.
    pub(crate) fn new_len(&self) -> usize {
        self.new.len()
    }

    /// Those that were added since the last plan, which they are no longer.
    pub(crate) fn take_new(&mut self) -> impl Iterator<Item = SeqId> {
        self.new.drain(..)
    }

    /// Counts a fork that waits for its parent.
    pub(crate) fn wait_on_parent(&mut self) {
        self.kinds.on_parent += 1;
    }

    /// Takes such a fork back.
    pub(crate) fn leave_parent(&mut self) {
        self.kinds.on_parent -= 1;
    }

    /// Whose turn it is.
    pub(crate) fn first(&mut self) -> Option<SeqId> {
        self.queue.first()
    }

    /// The one that arrived first.
    pub(crate) fn oldest(&self) -> Option<SeqId> {
        self.queue.oldest()
    }

    /// The next one of a walk in the order of the policy.
    pub(crate) fn next(&mut self, walk: &mut Walk) -> Option<SeqId> {
        self.queue.next(walk)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, SeqId)> + '_ {
        self.queue.iter()
    }

    /// Gives a number to a tenant that was never served.
    pub(crate) fn introduce_tenant(&mut self, tenant: u32) {
        self.queue.shares_mut().introduce(tenant);
    }

    /// Notes service given to a tenant.
    #[inline]
    pub(crate) fn charge(&mut self, tenant: u32, service: u64, weight: u32) {
        self.queue.shares_mut().charge(tenant, service, weight);
    }

    /// Service that a tenant was given, for its weight.
    pub(crate) fn service(&self, tenant: u32) -> u64 {
        self.queue.shares().counter(tenant)
    }

    /// Has a sequence await one of its blocks: see [`Awaited::enter`].
    pub(crate) fn await_block(&mut self, seq: &mut Sequence, id: SeqId, block: usize, computed_by: Option<SeqId>) {
        self.awaited.enter(seq, id, block, computed_by);
    }

    /// Forgets what a sequence awaits.
    pub(crate) fn await_nothing(&mut self, seq: &mut Sequence) {
        self.awaited.leave(seq);
    }

    /// Notes that a block is in the cache, or that nobody computes it any more.
    pub(crate) fn block_ready(&mut self, name: BlockHash) {
        self.awaited.ready(name);
    }

    /// The next sequence whose block is ready.
    pub(crate) fn next_ready(&mut self) -> Option<SeqId> {
        self.awaited.next()
    }

    /// Begins a plan's list of requests that do not fit.
    pub(crate) fn clear_rejected(&mut self) {
        self.rejected.clear();
    }

    /// Notes that a request does not fit.
    pub(crate) fn reject(&mut self, id: SeqId) {
        self.rejected.push(id);
    }

    /// Requests that this plan has found not to fit.
    pub(crate) fn rejected(&self) -> &[SeqId] {
        &self.rejected
    }

    /// Lets a batch start, where sequences run in batches: when nobody runs,
    /// and, if it is to wait for others, when it has waited. `oldest` is when
    /// the first of those that wait arrived.
    pub(crate) fn open_batch(&mut self, batching: Batching, idle: bool, oldest: Option<Time>, now: Time) {
        self.gate.opens_at = None;
        let (size, timeout) = match batching {
            Batching::Continuous => return,
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

    /// When a batch starts that waits for others.
    pub(crate) fn batch_opens_at(&self) -> Option<Time> {
        self.gate.opens_at
    }

    /// Members of the batch that have not started.
    pub(crate) fn batch_remaining(&self) -> u32 {
        self.gate.remaining
    }

    /// Notes that a member of the batch has started.
    pub(crate) fn start_batch_member(&mut self) {
        self.gate.remaining = self.gate.remaining.saturating_sub(1);
    }

    /// Panics unless the queue agrees with the sequences, of which `get` gives those that have not ended.
    pub(crate) fn check<'a>(&self, get: impl Fn(SeqId) -> Option<&'a Sequence>, all: impl Iterator<Item = &'a Sequence>) {
        for (key, id) in self.queue.iter() {
            let seq = get(id).expect("a queued sequence exists");
            assert_eq!((seq.place.key(), seq.slot()), (key, None), "queued under another name, or while it runs");
        }
        let (mut kinds, mut backlog) = (Kinds::default(), Backlog::default());
        for seq in all {
            if seq.phase() == Phase::WaitingOnParent {
                kinds.on_parent += 1;
                continue;
            }
            kinds.returning += usize::from(seq.has_started());
            kinds.swapped += usize::from(seq.phase().swapped_tokens() > 0);
            if seq.counts_as_queued() {
                backlog.reqs += 1;
                backlog.prompt_tokens += u64::from(seq.spec().prompt_len);
            }
        }
        assert_eq!((kinds, backlog), (self.kinds, self.backlog), "how many wait, by kind");
    }
}
