//! A sequence's place in the queue.

use crate::policy::Key;
use crate::request::{SeqId, Time};

/// A block that a waiting sequence awaits because it would extend the sequence's cached prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AwaitedBlock {
    /// Index of the block in the sequence.
    pub(crate) block: usize,
    /// The sequence that computes the blocks up to this one.
    pub(crate) computed_by: Option<SeqId>,
}

/// A waiting sequence's position in the queue, and its rejections there.
#[derive(Debug, Default)]
pub(crate) struct QueueEntry {
    key: Key,
    needs_blocks: Option<usize>,
    rejected_in: Option<u64>,
    rejected_since: Option<Time>,
    bypassed: u32,
    awaited: Option<AwaitedBlock>,
}

impl QueueEntry {
    /// Position in the order of the policy. The latest position if the sequence runs.
    pub(crate) fn key(&self) -> Key {
        self.key
    }

    pub(crate) fn set_key(&mut self, key: Key) {
        self.key = key;
    }

    /// Free blocks, beyond those held back, that the sequence lacked at its latest rejection.
    pub(crate) fn needs_blocks(&self) -> Option<usize> {
        self.needs_blocks
    }

    pub(crate) fn set_needs_blocks(&mut self, blocks: usize) {
        self.needs_blocks = Some(blocks);
    }

    /// Records that plan number `plan` rejected the sequence.
    pub(crate) fn reject(&mut self, plan: u64) {
        self.rejected_in = Some(plan);
    }

    /// Whether plan number `plan` has already rejected the sequence.
    pub(crate) fn was_rejected_in(&self, plan: u64) -> bool {
        self.rejected_in == Some(plan)
    }

    /// Time of the first plan in which the sequence did not fit. Set to `now` if unset.
    pub(crate) fn rejected_since(&mut self, now: Time) -> Time {
        *self.rejected_since.get_or_insert(now)
    }

    /// Whether the sequence did not fit in a plan.
    pub(crate) fn was_blocked(&self) -> bool {
        self.rejected_since.is_some()
    }

    /// Records that a later sequence was admitted first.
    pub(crate) fn bypass(&mut self) {
        self.bypassed += 1;
    }

    /// Number of later sequences admitted since the sequence first did not fit.
    pub(crate) fn bypassed(&self) -> u32 {
        self.bypassed
    }

    pub(crate) fn awaited(&self) -> Option<AwaitedBlock> {
        self.awaited
    }

    /// Whether the sequence waits for a running prompt to compute its next blocks.
    pub(crate) fn awaits_prompt(&self) -> bool {
        self.awaited.is_some_and(|awaited| awaited.computed_by.is_some())
    }

    pub(crate) fn set_awaited(&mut self, awaited: Option<AwaitedBlock>) {
        self.awaited = awaited;
    }

    /// Resets the rejections when the sequence is admitted.
    pub(crate) fn admit(&mut self) {
        (self.needs_blocks, self.rejected_since, self.bypassed) = (None, None, 0);
    }
}
