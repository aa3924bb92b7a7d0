//! Reads of prefixes from storage: when the caller makes them, and how long the reloads of sessions take with them.

use super::Scheduler;
use crate::request::{Preparation, SeqId};
use crate::sequence::Phase;
use crate::sessions::{Reload, Wait};
use slotmap::SecondaryMap;

/// The reads that callers make for requests.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Tags of the requests whose reads have begun since the caller asked.
    begun: Vec<u64>,
    /// Requests whose sessions' turns have come: the tokens that the session had computed before, the expected reload, and the nanoseconds of
    /// all steps until then.
    reloads: SecondaryMap<SeqId, (u32, Reload, u64)>,
}

impl Reads {
    /// Forgets a request that ends. Returns whether its session's turn had come.
    pub(super) fn forget(&mut self, id: SeqId, tag: u64) -> bool {
        self.begun.retain(|&begun| begun != tag);
        self.reloads.remove(id).is_some()
    }
}

impl Scheduler {
    /// Tags of the requests whose prefixes the caller reads from storage from now on, since the last call. Each waits until that is
    /// [done](Self::prepare), even if there is nothing to read.
    pub fn take_reads(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.reads.begun)
    }

    /// Begins a request's preparation. The prefix of a parked session's request is read when its turn has come: before, the blocks would
    /// take the place of those of active sessions, and be evicted until then.
    pub(super) fn begin_preparation(&mut self, id: SeqId, preparation: Preparation) {
        let reads = preparation == Preparation::ReadCache;
        if reads && self.join_session(id) {
            self.wait_for_turn(id, true);
            return;
        }
        self.enter(id, Phase::Preparing(preparation));
        self.waiting.begin_preparation(&self.seqs[id], preparation);
        if reads {
            self.reads.begun.push(self.seqs[id].spec().tag);
        }
    }

    /// Whether the caller reads a waiting request's prefix once its session's turn has come.
    pub(super) fn reads_at_turn(&self, id: SeqId) -> bool {
        self.seqs[id].phase() == Phase::WaitSession { reads: true }
    }

    /// Begins the read for a request whose session's turn has come.
    pub(super) fn begin_reload(&mut self, wait: Wait) {
        let reload = self.reload(wait);
        self.reads.reloads.insert(wait.seq, (wait.known, reload, self.accounts.step_time()));
        self.waiting.begin_reload(&self.seqs[wait.seq]);
        self.begin_preparation(wait.seq, Preparation::ReadCache);
    }

    /// Records that the prefix of a request was read. Returns whether its session's turn had come before.
    pub(super) fn end_read(&mut self, id: SeqId) -> bool {
        let seq = &self.seqs[id];
        self.reads.begun.retain(|&tag| tag != seq.spec().tag);
        let Some((known, reload, steps)) = self.reads.reloads.remove(id) else { return false };
        let (cached, ..) = self.kv.on_device_and_host(&seq.blocks);
        // While steps run for others, the read takes no time from anyone.
        let elapsed = (self.accounts.now() - seq.account.since()) as f64;
        let idle = (elapsed - (self.accounts.step_time() - steps) as f64 / 1000.0).max(0.0);
        let took = idle + self.computing(known, cached);
        self.sessions.end_read(reload, took);
        true
    }

    /// What a waiting request's session had computed before for it and is not on the device.
    pub(super) fn reload(&mut self, Wait { seq, known, .. }: Wait) -> Reload {
        let (cached, end, kept) = self.kv.on_device_and_host(&self.seqs[seq].blocks);
        let (computing, rest) = (self.computing(known, cached), self.computing(known, end));
        let reads = self.reads_at_turn(seq) && self.sessions.reads_pay();
        let rest = if reads { self.sessions.expected_reload(rest) } else { rest };
        Reload { takes: self.copy_time(kept as u32) + rest, computing, reads }
    }

    /// Microseconds to compute the first `known` tokens of a context whose first `cached` blocks are in the cache.
    fn computing(&self, known: u32, cached: usize) -> f64 {
        let from = cached as f64 * f64::from(self.config.block_size);
        self.model.prefill(from, (f64::from(known) - from).max(0.0))
    }
}
