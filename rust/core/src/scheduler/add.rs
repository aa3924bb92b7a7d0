//! Adds requests and forks, and applies the limits of the queue.

use super::Scheduler;
use crate::error::Rejected;
use crate::request::{Request, SeqId, Time};
use crate::sequence::Sequence;

/// Assumed number of output tokens, up to the request's limit, before any request has ended.
const UNKNOWN_OUTPUT: f64 = 256.0;

impl Scheduler {
    /// Adds a request to the queue. Returns an error if the request can never run or the queue is full. `now` is the
    /// arrival time, which may be earlier than the previous call, because a request can arrive during a step. A resumed
    /// request is treated like one that returns from a preemption.
    pub fn add(&mut self, request: Request, now: Time) -> Result<SeqId, Rejected> {
        self.accounts.tick(now);
        let resumes = request.resumed.is_some();
        let seq = Sequence::new(request, self.waiting.next_arrival(), self.config.max_model_len, now)?;
        // The last token needs no KV.
        let (needed, have) = ((seq.limit() - 1).div_ceil(self.config.block_size), self.config.usable_blocks());
        if needed > have {
            let fits = u64::from(have) * u64::from(self.config.block_size) + 1;
            return Err(Rejected::NeverFits { needed: needed.into(), have: have.into(), fits });
        }
        if !resumes && !seq.is_background() {
            self.check_queue(seq.spec().prompt_len)?;
        }
        if let Some(continues) = seq.request().continues {
            self.held.begin(continues.held)?;
        }
        let id = self.insert(seq);
        self.enqueue(id, false);
        self.waiting.add_new(id);
        Ok(id)
    }

    /// Adds a fork of a live request: the same prompt, limits and stop tokens under another tag. The fork waits until
    /// the prompt is computed and then shares its blocks. A partly filled last block is copied. Returns `None` if the
    /// request has ended. Forks do not count against the queue's limits.
    pub fn fork(&mut self, parent: SeqId, tag: u64, now: Time) -> Option<SeqId> {
        let seq = self.seqs.get(parent)?;
        self.accounts.tick(now);
        let waits = !seq.is_decoding() && seq.times().first_token.is_none();
        let request = seq.fork_request(tag);
        let arrival_number = self.waiting.next_arrival();
        let mut seq = Sequence::new(request, arrival_number, self.config.max_model_len, now).expect("its parent was sound");
        seq.make_fork(parent, waits);
        let id = self.insert(seq);
        if waits {
            self.waiting.wait_on_parent();
            self.seqs[parent].add_waiting_fork(id);
        } else {
            self.enqueue(id, false);
            self.waiting.add_new(id);
        }
        Some(id)
    }

    /// Predicted wait in microseconds of a request that arrives now.
    ///
    /// The estimate assumes that prompts use the steps' tokens one after another. Slots become free as outputs end, and
    /// waiting requests take them in order, each for a mean output. O(slots).
    pub fn predicted_wait(&self) -> Time {
        let before = self.waiting.foreground() + self.waiting.kinds().on_parent;
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
        let backlog = self.waiting.backlog();
        let each = backlog.prompt_tokens as f64 / f64::from(backlog.reqs.max(1));
        (self.model.prefill(0.0, each) * f64::from(backlog.reqs) + outputs) as Time
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

    /// Registers a sequence with its tenant and class.
    fn insert(&mut self, mut seq: Sequence) -> SeqId {
        let (member, new) = self.accounts.enroll(&seq.request().tenant, seq.request().priority);
        seq.join(member, self.accounts.user(member.tenant));
        if new && self.rules.takes_turns() {
            self.waiting.introduce_tenant(member.tenant);
        }
        self.waiting.arrive();
        let id = self.seqs.insert(seq);
        let due = self.due(&self.seqs[id]);
        self.deadlines.watch(id, &mut self.seqs[id], due);
        id
    }

    fn check_queue(&mut self, prompt: u32) -> Result<(), Rejected> {
        let full = |what, queued: u64, limit: u64| if queued > limit { Err((what, queued, limit)) } else { Ok(()) };
        let backlog = self.waiting.backlog();
        let checked = full("requests", u64::from(backlog.reqs) + 1, self.config.max_queued_reqs.into()).and_then(|()| {
            // A request that finds the queue empty is never rejected for its length.
            let limit = self.config.max_queued_tokens.max(prompt.into());
            full("prompt tokens", backlog.prompt_tokens + u64::from(prompt), limit)
        });
        checked.map_err(|(what, queued, limit)| {
            self.accounts.count_queue_full();
            Rejected::QueueFull { what, queued, limit, retry_after: self.predicted_wait() }
        })
    }
}
