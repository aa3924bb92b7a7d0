//! What an operator wants to know.

use super::Scheduler;
use crate::cost::Load;
use crate::request::Time;
use crate::sequence::Sequence;
use crate::stats::{Counters, Occupancy, Stall, Stats};
use crate::timeline::{STATES, TimelineState};
use crate::waiting::Kinds;

impl Scheduler {
    /// How full it is now. O(1), so that every step can be looked at.
    pub fn occupancy(&self) -> Occupancy {
        let waiting = self.waiting.len() + self.waiting.kinds().on_parent;
        let blocks = self.config.usable_blocks() as usize - self.kv.free();
        Occupancy { running: self.seqs.len() - waiting, waiting, blocks }
    }

    /// Block names computed and looked up so far: work that is the same on every machine.
    pub fn block_lookups(&self) -> u64 {
        self.kv.lookups()
    }

    /// Counters, and what is true now. O(slots).
    pub fn stats(&self) -> Stats {
        let Occupancy { running, waiting, .. } = self.occupancy();
        let (mut used_tokens, mut held_slots) = (0, 0);
        for seq in self.running_seqs() {
            used_tokens += seq.computed() as usize;
            held_slots += seq.blocks.held() * self.config.block_size as usize;
        }
        let (swapped, host) = (self.waiting.kinds().swapped, self.kv.host());
        Stats {
            counters: Counters { steps: self.steps.planned(), ..*self.accounts.counters() },
            running,
            waiting: waiting - swapped,
            swapped,
            slots: self.config.max_seqs as usize,
            total_blocks: self.config.usable_blocks() as usize,
            free_blocks: self.kv.free(),
            used_tokens,
            held_slots,
            host_blocks: host.0,
            free_host_blocks: host.1,
            queued_prompt_tokens: self.waiting.backlog().prompt_tokens,
            stall: self.steps.stall(),
            waiting_by_state: self.waiting_by_state(),
            predicted_wait: self.predicted_wait(),
            predicted_step: self.steps.predicted(),
            saturation: self.saturation(self.accounts.now()),
        }
    }

    fn waiting_by_state(&self) -> [usize; STATES] {
        let mut by_state = [0; STATES];
        let Kinds { returning, swapped, on_parent } = self.waiting.kinds();
        by_state[TimelineState::WaitFork as usize] = on_parent;
        by_state[TimelineState::Swapped as usize] = swapped;
        by_state[TimelineState::Preempted as usize] = returning - swapped;
        let waiting = self.waiting.len() - returning;
        // Without a turn all wait for the next plan that are new, and the others for their order.
        let (cause, count) = match self.accounts.turn() {
            None => (TimelineState::WaitStep, self.waiting.new_len()),
            Some((group, cause)) => (cause, self.accounts.waiting_of(group).unwrap_or(waiting)),
        };
        by_state[cause as usize] = count.min(waiting);
        by_state[self.accounts.others() as usize] = waiting - count.min(waiting);
        by_state
    }

    /// Work that arrived in the ten seconds before `now`, over the work that could be served in them, in thousandths:
    /// 1000 and more when the queue grows.
    pub fn saturation(&self, now: Time) -> u32 {
        self.accounts.saturation_permille(now)
    }

    /// Notes the queue that a plan left behind, with what is left of the prompts that have begun and got no tokens:
    /// one that is half computed counts as half a request. Requests that wait for their batch to fill are no backlog.
    pub(super) fn note_backlog(&mut self, stall: Option<Stall>) {
        let stalled = self.running.prompts().iter().filter_map(|&id| self.seqs.get(id)).filter(|seq| seq.is_stalled());
        let left = |seq: &Sequence| 1.0 - f64::from(seq.computed()) / f64::from(seq.expected_len());
        let stalled = stalled.map(left).sum::<f64>().ceil() as usize;
        let waiting = if stall == Some(Stall::Batch) { 0 } else { (self.waiting.len() + stalled) as u64 };
        let (arrived, now) = (self.waiting.next_arrival(), self.accounts.now());
        self.accounts.saturation().planned(waiting, arrived, now);
    }

    /// Notes a step that ended now and had begun at `from`.
    ///
    /// While requests wait, steps are as full as they can be: all of the
    /// capacity is in use. Otherwise others could have shared the step's fixed
    /// cost, so that only counts for the part of the step that was taken.
    pub(super) fn note_use(&mut self, load: &Load, from: Time) {
        let backlogged = self.accounts.saturation().is_backlogged();
        let share = if backlogged { 1.0 } else { self.model.share(load, self.fullness(load)) };
        let now = self.accounts.now();
        self.accounts.saturation().used(from, now, share);
    }

    /// The fullest of slots, blocks and a step's tokens, 0 to 1.
    fn fullness(&self, load: &Load) -> f64 {
        let part = |some: usize, all: usize| some as f64 / all.max(1) as f64;
        let occupancy = self.occupancy();
        let tokens = load.tokens() as usize;
        part(occupancy.running, self.config.max_seqs as usize)
            .max(part(occupancy.blocks, self.config.usable_blocks() as usize))
            .max(part(tokens, self.config.max_tokens as usize))
            .min(1.0)
    }
}
