//! Predicts waits and steps by the step-time model.

use super::Scheduler;
use crate::request::Time;
use crate::sequence::Sequence;
use crate::step_time::Load;

/// Assumed number of output tokens, up to the request's limit, before any request has ended.
const UNKNOWN_OUTPUT: f64 = 256.0;

impl Scheduler {
    /// Predicted wait in microseconds of a request that arrives now.
    ///
    /// The estimate assumes that prompts use the steps' tokens one after another. Slots become free as outputs end, and
    /// waiting requests take them in order, each for a mean output. Requests that wait for the turns of their sessions do not count. O(slots).
    pub fn predicted_wait(&self) -> Time {
        let before = self.waiting.foreground() + self.waiting.kinds().on_parent - self.sessions.forks_in_line();
        if (before == 0 && self.running.has_slot()) || !self.model.knows() {
            return 0;
        }
        let slots = self.running.slots() as usize;
        let mut left: Vec<f64> = self.running_seqs().map(|seq| self.expected_output_left(seq)).collect();
        let running = left.len().max(1) as f64;
        let usual = self.accounts.mean_output().unwrap_or_else(|| left.iter().sum::<f64>() / running);
        left.resize(slots, 0.0);
        let (_, next, _) = left.select_nth_unstable_by(before % slots, f64::total_cmp);
        let outputs = (*next + usual * (before / slots) as f64) * self.model.mean_step();
        let backlog = self.waiting.next_backlog();
        let each = backlog.prompt_tokens as f64 / f64::from(backlog.reqs.max(1));
        (self.model.prefill(0.0, each) * f64::from(backlog.reqs) + outputs) as Time
    }

    /// Sets the nanoseconds that a prompt token takes at another server, for a caller whose steps do not last as long as their prompts.
    ///
    /// Reloads of sessions are spread from now on: that server evicts contexts in an order of its own, and keeps fewer of active sessions if
    /// others come back close together.
    pub fn set_upstream_token_time(&mut self, ns: u64, now: Time) {
        self.accounts.tick(now);
        self.model.set_token_time(ns);
        self.sessions.spread_reloads();
    }

    /// Predicted duration of the latest planned step, in microseconds.
    pub fn predicted_step(&self) -> Time {
        self.model.step(self.steps.load()) as Time
    }

    /// Predicted microseconds to finish the prompts in progress. O(slots).
    pub fn prefill_backlog(&self) -> Time {
        let prompts = self.running_seqs().filter(|seq| seq.uncomputed() > 1);
        prompts.map(|seq| self.model.prefill(seq.computed().into(), seq.uncomputed().into())).sum::<f64>() as Time
    }

    /// Expected further tokens of a running sequence, from its caller's prediction or the mean output of recent
    /// requests. A sequence beyond its expected length counts as a new one.
    fn expected_output_left(&self, seq: &Sequence) -> f64 {
        let most = f64::from(seq.predicted_left());
        if seq.request().predicted_tokens.is_some() {
            return most;
        }
        let usual = self.accounts.mean_output().unwrap_or(UNKNOWN_OUTPUT);
        let left = usual - f64::from(seq.output_tokens());
        most.min(if left > 0.0 { left } else { usual })
    }

    /// Predicted microseconds of the next step, and the number of requests whose first step it is. `None` before the model
    /// has observed enough steps.
    ///
    /// The estimate assumes that all waiting prompts begin for which there are slots, none of them cached, as far as the
    /// configured target allows. O(slots).
    pub fn next_step(&self) -> Option<(Time, u32)> {
        if !self.model.knows() {
            return None;
        }
        let waiting = self.waiting.next_backlog();
        let begins = waiting.reqs.min(self.running.free_slots() as u32);
        let each = waiting.prompt_tokens as f64 / f64::from(waiting.reqs.max(1));
        let (mut load, mut tokens) = (Load::default(), each * f64::from(begins));
        let mut prefill = self.model.prefill(0.0, each) * f64::from(begins);
        for seq in self.running_seqs() {
            let (computed, left) = (seq.computed(), seq.uncomputed());
            if left <= 1 {
                load.decode_seqs += 1;
                load.context_tokens += u64::from(computed);
            } else {
                tokens += f64::from(left);
                prefill += self.model.prefill(computed.into(), left.into());
            }
        }
        let room = f64::from(self.config.max_num_batched_tokens.saturating_sub(load.decode_seqs));
        let part = if tokens > room { room / tokens } else { 1.0 };
        let alone = self.model.decode_step(&load);
        let target = if self.config.target_itl > 0 { alone.max(self.config.target_itl as f64) } else { f64::MAX };
        Some(((alone + prefill * part).min(target) as Time, begins))
    }
}
