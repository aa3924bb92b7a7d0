//! Snapshots of the scheduler's state.

use super::Scheduler;
use crate::ledger::{SlotSeen, Snapshot, StepSeen, WaitSeen};
use crate::memory::BlockUse;
use crate::request::{Tier, Time};
use crate::sequence::Sequence;
use crate::step::StepPlan;
use std::sync::Arc;

impl Scheduler {
    /// The state at `now`, with at most `max_waiting` waiting requests and `max_cells` cells. For some seconds from now
    /// on, the scheduler records steps for the next snapshot. O(sequences + blocks).
    pub fn snapshot(&mut self, now: Time, max_waiting: usize, max_cells: usize) -> Snapshot {
        let (cells, blocks_per_cell) = self.cells(max_cells);
        let queued = self.waiting.iter().map(|(_, id)| &self.seqs[id]);
        let outside = self.seqs.values().filter(|seq| seq.preparation().is_some() || seq.waits_for_session());
        let mut waiting_by_tier = [0; Tier::COUNT];
        for seq in self.seqs.values().filter(|seq| seq.slot().is_none()) {
            waiting_by_tier[seq.request().tier as usize] += 1;
        }
        Snapshot {
            slots: self.running_seqs().map(|seq| self.slot_seen(seq, now)).collect(),
            waiting: queued.chain(outside).take(max_waiting).map(|seq| self.wait_seen(seq, now)).collect(),
            waiting_by_tier,
            cells,
            blocks_per_cell,
            steps: self.accounts.recent().take(now),
        }
    }

    /// Records the sequences of a step if a snapshot was taken recently.
    pub(super) fn note_step(&mut self, plan: &StepPlan) {
        if !self.accounts.recent().wants(plan.planned) {
            return;
        }
        let mut slots = vec![b' '; self.config.max_num_seqs as usize];
        for slot in self.running_seqs().filter_map(Sequence::slot) {
            slots[slot as usize] = b'-';
        }
        for chunk in &plan.chunks {
            slots[chunk.slot as usize] = match () {
                () if self.seqs[chunk.seq].is_recomputing() => b'r',
                () if chunk.start < self.seqs[chunk.seq].spec().prompt_len => b'p',
                () => b'd',
            };
        }
        let step = StepSeen {
            step: plan.step,
            planned: plan.planned,
            slots,
            tokens: plan.chunks.iter().map(|chunk| chunk.len).sum(),
            waiting: self.waiting.len() + self.waiting.kinds().outside_queue(),
            admitted: plan.admitted.iter().map(|one| (one.slot, one.tag)).collect(),
            preempted: plan.preempted.clone(),
        };
        self.accounts.recent().note(step);
    }

    fn slot_seen(&self, seq: &Sequence, now: Time) -> SlotSeen {
        SlotSeen {
            slot: seq.slot().expect("it runs"),
            tag: seq.spec().tag,
            tenant: Arc::clone(self.tenant(seq)),
            priority: seq.request().priority,
            tier: seq.request().tier,
            state: seq.phase().state().expect("it runs"),
            prompt_tokens: seq.spec().prompt_len,
            computed_tokens: seq.computed(),
            output_tokens: seq.output_tokens(),
            blocks: seq.blocks.held(),
            age: now.saturating_sub(seq.times().arrived),
        }
    }

    fn wait_seen(&self, seq: &Sequence, now: Time) -> WaitSeen {
        let state = seq.phase().state().unwrap_or_else(|| match self.accounts.blocked() {
            Some((group, cause)) if group == seq.member().group => cause,
            _ => self.accounts.others(),
        });
        let since = if seq.has_started() { seq.account.since() } else { seq.times().arrived };
        WaitSeen {
            tag: seq.spec().tag,
            tenant: Arc::clone(self.tenant(seq)),
            priority: seq.request().priority,
            tier: seq.request().tier,
            state,
            prompt_tokens: seq.spec().prompt_len,
            output_tokens: seq.output_tokens(),
            waited: now.saturating_sub(since),
        }
    }

    /// The holder of each block, without the scratch block, and the number of blocks per cell.
    fn cells(&self, max: usize) -> (Vec<u32>, usize) {
        let cell = |block| match block {
            BlockUse::Free => Snapshot::FREE,
            BlockUse::Cached => Snapshot::CACHED,
            BlockUse::Shared => Snapshot::SHARED,
            BlockUse::Held => Snapshot::HELD,
        };
        let mut blocks: Vec<u32> = self.kv.uses().map(cell).collect();
        for seq in self.running_seqs() {
            for id in seq.blocks.ids() {
                let block = &mut blocks[id.0 as usize - 1];
                if *block == Snapshot::HELD {
                    *block += seq.slot().expect("it runs");
                }
            }
        }
        for id in self.held.iter().flat_map(|seq| seq.blocks.ids()) {
            let block = &mut blocks[id.0 as usize - 1];
            if *block == Snapshot::HELD {
                *block = Snapshot::CACHED;
            }
        }
        let to_a_cell = blocks.len().div_ceil(max.max(1)).max(1);
        if to_a_cell == 1 {
            return (blocks, 1);
        }
        let cells = blocks.chunks_mut(to_a_cell).map(|cell| {
            cell.sort_unstable();
            cell.chunk_by(|one, next| one == next).max_by_key(|same| same.len()).map_or(Snapshot::FREE, |same| same[0])
        });
        (cells.collect(), to_a_cell)
    }
}
