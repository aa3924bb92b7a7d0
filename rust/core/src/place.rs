//! A sequence's place among those that wait.

use crate::policy::Key;
use crate::request::{SeqId, Time};

/// A block that a waiting sequence awaits, since its cached prefix would be longer with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AwaitedBlock {
    /// Its number in the sequence.
    pub(crate) block: usize,
    /// Who computes the blocks up to it.
    pub(crate) computed_by: Option<SeqId>,
}

/// Where a sequence waits, and how it has fared there.
#[derive(Debug, Default)]
pub(crate) struct Place {
    key: Key,
    needs_blocks: Option<usize>,
    rejected_in: Option<u64>,
    rejected_since: Option<Time>,
    bypassed: u32,
    awaited: Option<AwaitedBlock>,
}

impl Place {
    /// Its place in the order of the policy: the latest, if it runs.
    pub(crate) fn key(&self) -> Key {
        self.key
    }

    pub(crate) fn set_key(&mut self, key: Key) {
        self.key = key;
    }

    /// Free blocks, beyond those held back, that it lacked when it was rejected last.
    pub(crate) fn needs_blocks(&self) -> Option<usize> {
        self.needs_blocks
    }

    pub(crate) fn set_needs_blocks(&mut self, blocks: usize) {
        self.needs_blocks = Some(blocks);
    }

    /// Notes that the plan of that number rejected it.
    pub(crate) fn reject(&mut self, plan: u64) {
        self.rejected_in = Some(plan);
    }

    /// Whether the plan of that number has rejected it already.
    pub(crate) fn was_rejected_in(&self, plan: u64) -> bool {
        self.rejected_in == Some(plan)
    }

    /// Since when it does not fit, which is now at the latest.
    pub(crate) fn rejected_since(&mut self, now: Time) -> Time {
        *self.rejected_since.get_or_insert(now)
    }

    /// Notes that a later one was admitted before it.
    pub(crate) fn bypass(&mut self) {
        self.bypassed += 1;
    }

    /// How many were admitted before it since it does not fit.
    pub(crate) fn bypassed(&self) -> u32 {
        self.bypassed
    }

    pub(crate) fn awaited(&self) -> Option<AwaitedBlock> {
        self.awaited
    }

    pub(crate) fn set_awaited(&mut self, awaited: Option<AwaitedBlock>) {
        self.awaited = awaited;
    }

    /// Forgets how it fared: it was admitted.
    pub(crate) fn admit(&mut self) {
        (self.needs_blocks, self.rejected_since, self.bypassed) = (None, None, 0);
    }
}
