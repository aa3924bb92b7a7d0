//! The time of steps, divided among their sequences.
//!
//! A step's time is divided in proportion to the predicted parts of its chunks (see [`StepParts`]). Times that belong to
//! slots are kept here, side by side, so that a step touches no sequence for them.

use crate::batch::Chunk;
use crate::cost::StepParts;
use crate::request::SeqId;

/// The time of a slot's sequence that its account does not have yet.
#[derive(Clone, Copy, Debug, Default)]
struct SlotTime {
    seq: SeqId,
    ns: u64,
}

/// The step time of running sequences, in nanoseconds.
#[derive(Debug)]
pub(crate) struct Compute {
    slots: Vec<SlotTime>,
    /// Time of all committed steps.
    total: u64,
    /// Time of chunks whose sequences had ended before the commit.
    ended: u64,
}

impl Compute {
    pub(crate) fn new(slots: u32) -> Self {
        Self { slots: vec![SlotTime::default(); slots as usize], total: 0, ended: 0 }
    }

    /// Begins to count for a sequence that was given a slot.
    pub(crate) fn begin(&mut self, slot: u32, seq: SeqId) {
        self.slots[slot as usize] = SlotTime { seq, ns: 0 };
    }

    /// A slot's time.
    pub(crate) fn of(&self, slot: u32) -> u64 {
        self.slots[slot as usize].ns
    }

    /// Ends a sequence's slot and returns its time.
    pub(crate) fn end(&mut self, slot: u32) -> u64 {
        std::mem::take(&mut self.slots[slot as usize]).ns
    }

    /// Returns the time of each slot's sequence, and counts from zero.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = (SeqId, u64)> {
        self.slots.iter_mut().filter(|slot| slot.ns > 0).map(|slot| (slot.seq, std::mem::take(&mut slot.ns)))
    }

    /// Divides a step of `ns` among its chunks. The parts sum to `ns`. `elsewhere` takes the part of a chunk whose
    /// sequence has lost its slot since the plan, and returns false if the sequence has ended.
    pub(crate) fn divide(&mut self, chunks: &[Chunk], parts: &StepParts, ns: u64, mut elsewhere: impl FnMut(SeqId, u64) -> bool) {
        self.total += ns;
        let mut left = ns;
        for (at, chunk) in chunks.iter().enumerate() {
            let part = if at + 1 == chunks.len() { left } else { parts.of(chunk).min(left) };
            left -= part;
            let slot = &mut self.slots[chunk.slot as usize];
            if slot.seq == chunk.seq {
                slot.ns += part;
            } else if !elsewhere(chunk.seq, part) {
                self.ended += part;
            }
        }
    }

    /// Time of all committed steps.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Time of chunks whose sequences had ended before the commit.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }
}
