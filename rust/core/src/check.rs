//! What must hold between any two calls.

use crate::Scheduler;
use crate::config::Batching;
use crate::ledger::State;
use crate::reservation::Reservation;
use crate::sequence::{MAX_PREEMPTIONS, NO_ROW};

impl Scheduler {
    /// Panics unless every invariant holds. For tests and for idle moments.
    pub fn check(&self) {
        self.pool.check(self.seqs.values().map(|seq| &seq.table));
        self.host.check(self.seqs.values().flat_map(|seq| seq.host.iter().copied()));
        let mut rows: Vec<u32> = self.free_rows.clone();
        let (mut returning, mut swapped, mut parked, mut queued) = (0, 0, 0, (0, 0));
        for (id, seq) in &self.seqs {
            assert!(seq.tokens.len() as u32 <= seq.limit, "longer than it may get");
            assert!(seq.computed <= seq.expected_len() + seq.draft.len() as u32, "computed more than there is");
            assert!(seq.preemptions <= MAX_PREEMPTIONS, "preempted too often");
            let blocks = seq.table.ids().len() as u32;
            assert!(seq.computed <= blocks * self.config.block_size, "computed tokens without a block");
            if self.committed == self.counters.steps {
                assert_eq!((seq.pending, seq.drafting), (0, false), "nothing is in flight");
            }
            if seq.row != NO_ROW {
                assert!(!(seq.stalled && seq.decoding), "a sequence that decodes got no token");
                assert!(!seq.is_last_chance() || self.non_preemptible == Some(id), "two sequences that nobody may preempt");
                assert!(self.running.contains(&id), "a row without a running sequence");
                assert_eq!((seq.saved, seq.host.len()), (0, 0), "runs, and waits in host memory");
                rows.push(seq.row);
                continue;
            }
            assert_eq!((blocks, seq.computed), (0, 0), "a waiting sequence holds blocks");
            assert_eq!(seq.host.len() as u32, seq.saved.div_ceil(self.config.block_size), "host blocks");
            if seq.account.state() == State::Sibling {
                let parent = seq.parent.and_then(|parent| self.seqs.get(parent)).expect("a parked sibling has a parent");
                assert!(parent.forks.contains(&id), "parked, and nobody will fetch it");
                parked += 1;
                continue;
            }
            returning += usize::from(seq.started.is_some());
            swapped += usize::from(seq.saved > 0);
            if seq.started.is_none() && seq.parent.is_none() {
                queued = (queued.0 + 1, queued.1 + u64::from(seq.prompt_len));
            }
        }
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..self.config.max_seqs), "a row is lost or taken twice");
        for (key, id) in self.queue.iter() {
            let seq = self.seqs.get(id).expect("a queued sequence exists");
            assert_eq!((seq.key, seq.row), (key, NO_ROW), "queued under another name, or while it runs");
        }
        let running = self.seqs.values().filter(|seq| seq.row != NO_ROW).count();
        assert_eq!(self.seqs.len(), running + self.queue.len() + parked, "a sequence that neither waits nor runs");
        assert_eq!((returning, swapped, parked), (self.returning, self.swapped, self.parked), "returning, swapped, parked");
        assert_eq!(queued, (self.queued_reqs, self.queued_tokens), "what counts against the queue's limits");
        assert_eq!(self.running_classes.values().sum::<u32>() as usize, running, "classes that run");
        let watched = self.seqs.values().filter(|seq| seq.look_at.is_some()).count();
        assert_eq!(watched, self.deadlines.len(), "deadlines watched");
        for groups in [self.tenants.iter().map(|(_, usage)| *usage).collect::<Vec<_>>(), self.classes.iter().map(|(_, u)| *u).collect()] {
            let (waits, runs) = groups.iter().fold((0, 0), |(waits, runs), usage| (waits + usage.waiting, runs + usage.running));
            assert_eq!((waits as usize, runs as usize), (self.queue.len(), running), "usage of groups");
        }
        if self.config.reservation == Reservation::MaxTokens {
            assert!(self.outstanding() <= self.pool.free(), "blocks that were reserved are gone");
        }
        if self.config.batching == Batching::Continuous {
            assert_eq!(self.boarding, 0);
        }
    }
}
