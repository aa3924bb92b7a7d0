//! Counters and gauges for operators.

use super::Scheduler;
use crate::ledger::{Counters, Occupancy, Stats, TimelineState};
use crate::queue::Kinds;
use crate::request::{Preparation, Time};
use crate::sequence::Sequence;
use crate::step::Stall;
use crate::step_time::Load;

impl Scheduler {
    /// The current occupancy. O(1), so it can be read at every step.
    pub fn occupancy(&self) -> Occupancy {
        let waiting = self.waiting.len() + self.waiting.kinds().outside_queue();
        Occupancy { running: self.seqs.len() - waiting, waiting, blocks: self.kv.held() }
    }

    /// Number of block names computed and looked up so far. It is the same on every machine.
    pub fn block_lookups(&self) -> u64 {
        self.kv.lookups()
    }

    /// Counters and gauges. O(slots).
    pub fn stats(&self) -> Stats {
        let Occupancy { running, waiting, .. } = self.occupancy();
        let (mut used_tokens, mut held_kv_slots) = (0, 0);
        for seq in self.running_seqs() {
            used_tokens += seq.computed() as usize;
            held_kv_slots += seq.blocks.held() * self.config.block_size as usize;
        }
        let (swapped, host) = (self.waiting.kinds().swapped, self.kv.host());
        Stats {
            counters: self.counters(),
            running,
            waiting: waiting - swapped,
            swapped,
            slots: self.config.max_num_seqs as usize,
            total_blocks: self.kv.limit(),
            free_blocks: self.kv.free(),
            used_tokens,
            held_kv_slots,
            host_blocks: host.0,
            free_host_blocks: host.1,
            state_slots: self.config.state_slots as usize,
            saved_states: self.kv.saved_states(),
            queued_prompt_tokens: self.waiting.backlog().prompt_tokens,
            stall: self.steps.stall(),
            waiting_by_state: self.waiting_by_state(),
            predicted_wait: self.predicted_wait(),
            predicted_turn_wait: self.predicted_turn_wait(),
            predicted_prefill: self.model.prefill(0.0, 1024.0) as u64,
            predicted_step: self.predicted_step(),
            saturation: self.saturation(self.accounts.now()),
        }
    }

    fn counters(&self) -> Counters {
        let (step_ns, energy) = (self.accounts.step_time(), self.accounts.energy());
        Counters {
            steps: self.steps.planned(),
            step_us: step_ns / 1000,
            energy_uj: energy.map(|(total, _)| total),
            idle_energy_uj: energy.map(|(_, idle)| idle),
            ..self.accounts.counters
        }
    }

    fn waiting_by_state(&self) -> [usize; TimelineState::COUNT] {
        let mut by_state = [0; TimelineState::COUNT];
        let Kinds { returning, swapped, on_parent, on_session, preparing, .. } = self.waiting.kinds();
        by_state[TimelineState::WaitFork as usize] = on_parent;
        by_state[TimelineState::WaitSession as usize] = on_session;
        by_state[TimelineState::Grammar as usize] = preparing[Preparation::Grammar as usize];
        by_state[TimelineState::ReadCache as usize] = preparing[Preparation::ReadCache as usize];
        by_state[TimelineState::Swapped as usize] = swapped;
        by_state[TimelineState::Preempted as usize] = returning - swapped;
        let waiting = self.waiting.len() - returning;
        // If no group is blocked, new sequences wait for the next plan and all others for the policy's order.
        let (cause, count) = match self.accounts.blocked() {
            None => (TimelineState::WaitStep, self.waiting.new_len()),
            Some((group, cause)) => (cause, self.accounts.waiting_of(group).unwrap_or(waiting)),
        };
        by_state[cause as usize] = count.min(waiting);
        by_state[self.accounts.others() as usize] = waiting - count.min(waiting);
        by_state
    }

    /// Work that arrived in the ten seconds before `now` divided by the work that could be served in that time, in
    /// thousandths. The value is 1000 or more while the queue grows.
    pub fn saturation(&self, now: Time) -> u32 {
        self.accounts.saturation_permille(now)
    }

    /// Records the queue left by a plan, plus the remaining part of prompts in progress that got no tokens: a
    /// half-computed prompt counts as half a request. Requests that wait for their batch to fill do not count.
    pub(super) fn note_backlog(&mut self, stall: Option<Stall>) {
        let stalled = self.running.prompts().iter().filter_map(|&id| self.seqs.get(id)).filter(|seq| seq.is_stalled());
        let left = |seq: &Sequence| 1.0 - f64::from(seq.computed()) / f64::from(seq.expected_len());
        let stalled = if self.running.prompts().is_empty() { 0 } else { stalled.map(left).sum::<f64>().ceil() as usize };
        let waiting = if stall == Some(Stall::Batch) { 0 } else { (self.waiting.len() + stalled) as u64 };
        let (arrived, now) = (self.waiting.next_arrival(), self.accounts.now());
        self.accounts.saturation().planned(waiting, arrived, now);
    }

    /// Records a step that began at `from`, ended now and was `predicted` to take so many microseconds.
    ///
    /// While requests wait, steps are as full as possible and use all of the capacity. Otherwise more sequences could
    /// have shared the step's fixed cost, so only the used part of the step counts.
    pub(super) fn note_use(&mut self, load: &Load, from: Time, predicted: f64) {
        let backlogged = self.accounts.saturation().is_backlogged();
        let share = if backlogged { 1.0 } else { self.model.share(predicted, self.fullness(load)) };
        let now = self.accounts.now();
        self.accounts.saturation().used(from, now, share);
    }

    /// The largest utilisation among slots, blocks and step tokens, 0 to 1.
    fn fullness(&self, load: &Load) -> f64 {
        let part = |some: u32, all: u32| f64::from(some) / f64::from(all.max(1));
        let occupancy = self.occupancy();
        part(occupancy.running as u32, self.config.max_num_seqs)
            .max(part(occupancy.blocks as u32, self.kv.limit() as u32))
            .max(part(load.tokens(), self.config.max_num_batched_tokens))
            .min(1.0)
    }
}
