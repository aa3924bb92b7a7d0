//! The time of steps, divided among their sequences.
//!
//! A step's time is divided in proportion to the predicted parts of its chunks (see [`StepParts`]). Times that belong to
//! slots are kept here, side by side, so that a step touches no sequence for them.

use crate::request::{SeqId, Time};
use crate::step::{Chunk, StepPlan};
use crate::step_time::StepModel;

/// The parts of a step's time that its chunks take: each an equal part of the fixed time, and the predicted time of its
/// own tokens and context. By tokens alone while no time is predicted. In units of 2^-16 ns, because conversions from
/// floating point would double the cost of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepParts {
    fixed: u64,
    decode_row: u64,
    context_token: u64,
    prefill_token: u64,
    prefill_pair: u64,
}

impl StepParts {
    const UNIT: f64 = 65_536.0;

    /// Divides a step that took `took` microseconds.
    pub(crate) fn new(model: &StepModel, plan: &StepPlan, took: Time) -> Self {
        let (predicted, whole) = (model.step(&plan.load), took as f64 * 1000.0 * Self::UNIT);
        let parts = model.coefficients_of(&plan.load).map(|part| part * whole / predicted);
        if predicted > 0.0 {
            let fixed = (parts[0] / plan.chunks.len() as f64) as u64;
            let [_, prefill_token, decode_row, context_token, prefill_pair] = parts.map(|part| part as u64);
            return Self { fixed, decode_row, context_token, prefill_token, prefill_pair };
        }
        let token = (whole / f64::from(plan.load.tokens())) as u64;
        Self { fixed: 0, decode_row: token, context_token: 0, prefill_token: token, prefill_pair: 0 }
    }

    /// A chunk's part in nanoseconds.
    #[inline]
    pub(crate) fn of(&self, chunk: &Chunk) -> u64 {
        let (start, len) = (u64::from(chunk.start), u64::from(chunk.len));
        let tokens = if chunk.len == chunk.drafted + 1 {
            len.wrapping_mul(self.decode_row)
        } else {
            let pairs = len.wrapping_mul(start + len / 2).wrapping_mul(self.prefill_pair);
            len.wrapping_mul(self.prefill_token).wrapping_add(pairs)
        };
        self.fixed.wrapping_add(tokens).wrapping_add((start + len).wrapping_mul(self.context_token)) >> 16
    }
}

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

    /// Divides a step of `ns` among its chunks. The parts sum to `ns`. `take` takes the part of a chunk whose
    /// sequence has lost its slot since the plan, and returns false if the sequence has ended.
    pub(crate) fn divide(&mut self, chunks: &[Chunk], parts: &StepParts, ns: u64, mut take: impl FnMut(SeqId, u64) -> bool) {
        self.total += ns;
        let mut left = ns;
        for (at, chunk) in chunks.iter().enumerate() {
            let part = if at + 1 == chunks.len() { left } else { parts.of(chunk).min(left) };
            left -= part;
            let slot = &mut self.slots[chunk.slot as usize];
            if slot.seq == chunk.seq {
                slot.ns += part;
            } else if !take(chunk.seq, part) {
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
