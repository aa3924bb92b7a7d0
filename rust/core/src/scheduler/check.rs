//! The invariants that hold between any two calls.

use super::Scheduler;
use crate::config::Batching;
use crate::policy::{CacheUse, Grouping};
use crate::request::SeqId;
use crate::sequence::{AwaitedBlock, MAX_PREEMPTIONS, Phase, Sequence};

impl Scheduler {
    /// Panics unless every invariant holds. Intended for tests and idle times.
    pub fn check(&self) {
        for (id, seq) in &self.seqs {
            self.check_sequence(id, seq);
        }
        let all = || self.seqs.values();
        let running = all().filter(|seq| seq.is_running()).count();
        let outside_queue = self.waiting.kinds().outside_queue();
        assert_eq!(self.seqs.len(), running + self.waiting.len() + outside_queue, "a sequence that neither waits nor runs");
        self.kv.check(all().map(|seq| &seq.blocks).chain(self.held.iter().map(|seq| &seq.blocks)));
        self.sessions.check(self.waiting.kinds().on_session);
        self.held.check(self.config.block_size);
        self.waiting.check(|id| self.seqs.get(id), all().filter(|seq| !seq.is_running()));
        self.running.check(self.seqs.iter().filter(|(_, seq)| seq.is_running()));
        self.accounts.check(self.waiting.len(), running, all().map(|seq| (&*seq.account, seq.slot())));
        let watched = all().filter(|seq| seq.times().check_at.is_some()).count();
        assert_eq!(watched, self.deadlines.len(), "deadlines watched");
        if let Some(reserved) = self.reserved_blocks() {
            assert!(reserved <= self.kv.free(), "blocks that were reserved are gone");
        }
        if self.config.batching == Batching::Continuous {
            assert_eq!(self.waiting.batch_remaining(), 0);
        }
    }

    fn check_sequence(&self, id: SeqId, seq: &Sequence) {
        let size = self.config.block_size;
        assert!(seq.len() <= seq.limit(), "longer than it may get");
        assert!(seq.computed() <= seq.expected_len() + seq.draft().len() as u32, "computed more than there is");
        assert!(seq.preemptions() <= MAX_PREEMPTIONS || seq.is_background(), "preempted too often");
        assert!(seq.computed() <= seq.blocks.held() as u32 * size, "computed tokens without a block");
        let swapped = seq.phase().swapped_tokens();
        assert_eq!(seq.blocks.host().len() as u32, swapped.div_ceil(size), "host blocks");
        if !self.steps.in_flight() {
            assert_eq!((seq.pending(), seq.is_drafting()), (0, false), "nothing is in flight");
        }
        if !seq.is_running() {
            assert_eq!((seq.blocks.held(), seq.computed()), (0, 0), "a waiting sequence holds blocks");
        } else if self.rules.grouping == Grouping::Classes && !seq.is_background() {
            assert_eq!(seq.queue_entry.key().group, seq.request().priority.into(), "the class of a running sequence");
        }
        if let Some(AwaitedBlock { block, computed_by: Some(other) }) = seq.queue_entry.awaited() {
            let computed = self.seqs.get(other).is_some_and(|other| other.computes(block));
            assert!(computed || self.waiting.will_be_ready(seq), "awaits a prompt that does not run");
        } else if self.rules.cache == CacheUse::Followed && !seq.is_running() {
            assert!(!seq.queue_entry.key().awaits_prompt, "comes last without awaiting a prompt");
        }
        if seq.phase() == Phase::WaitingOnParent {
            let parent = seq.parent().and_then(|parent| self.seqs.get(parent)).expect("its parent lives");
            assert!(parent.waiting_forks().contains(&id), "a fork that nobody will fetch");
            assert_eq!(seq.session(), parent.session(), "a fork of another session");
        }
    }
}
