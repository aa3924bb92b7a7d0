//! Adds requests and forks, and applies the limits of the queue.

use super::Scheduler;
use crate::error::Rejected;
use crate::request::{Preparation, Request, SeqId, Time};
use crate::sequence::{Phase, Sequence};

impl Scheduler {
    /// Adds a request to the queue. Returns an error if the request can never run or the queue is full. `now` is the
    /// arrival time, which may be earlier than the previous call, because a request can arrive during a step. A resumed
    /// request is treated like one that returns from a preemption. A request with a [`Preparation`] joins the queue when
    /// that is [done](Self::prepare); [`take_reads`](Self::take_reads) tells when its prefix is to be read. A refused request leaves no
    /// trace but a count: the clocks do not advance, because a journal lacks it.
    pub fn add(&mut self, request: Request, now: Time) -> Result<SeqId, Rejected> {
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
        self.accounts.tick(now);
        let id = self.insert(seq);
        match self.seqs[id].request().preparation {
            Some(preparation) => self.begin_preparation(id, preparation),
            None => self.enqueue_new(id),
        }
        Ok(id)
    }

    /// Records that a request's preparation is done. The request waits for the `next` one, or joins the queue, in the order
    /// of its arrival. Returns false if the request has ended, or waits for no preparation.
    pub fn prepare(&mut self, id: SeqId, next: Option<Preparation>, now: Time) -> bool {
        let Some(done) = self.seqs.get(id).and_then(Sequence::preparation) else { return false };
        self.accounts.tick(now);
        let had_turn = done == Preparation::ReadCache && self.end_read(id);
        let seq = &mut self.seqs[id];
        if !seq.has_started() && !had_turn {
            seq.account.submit(self.accounts.now());
        }
        if let Some(preparation) = next {
            self.begin_preparation(id, preparation);
        } else {
            self.enter(id, Phase::New);
            // A request whose prefix is read has joined its session before.
            if done == Preparation::ReadCache { self.enqueue_joined(id) } else { self.enqueue_new(id) }
        }
        self.waiting.end_preparation(&self.seqs[id], done);
        if had_turn {
            self.waiting.end_reload(&self.seqs[id]);
        }
        true
    }

    /// Adds a sequence to the queue that no plan has seen, unless it waits for its session's turn.
    fn enqueue_new(&mut self, id: SeqId) {
        if self.join_session(id) {
            self.wait_for_turn(id, false);
        } else {
            self.enqueue_joined(id);
        }
    }

    /// Adds a sequence to the queue that no plan has seen.
    fn enqueue_joined(&mut self, id: SeqId) {
        self.enqueue(id, false);
        self.waiting.add_new(id);
    }

    /// Adds a fork of a live request: the same prompt, limits and stop tokens under another tag. The fork waits until
    /// the request is prepared and its prompt is computed, and then shares its blocks. A partly filled last block is
    /// copied. Returns `None` if the request has ended. Forks do not count against the queue's limits.
    pub fn fork(&mut self, parent: SeqId, tag: u64, now: Time) -> Option<SeqId> {
        let seq = self.seqs.get(parent)?;
        self.accounts.tick(now);
        let waits = seq.preparation().is_some() || !seq.is_decoding() && seq.times().first_token.is_none();
        let request = seq.fork_request(tag);
        // A fork of a fork that waits for a request in the line, or for one that may come there, waits for that request too.
        let outside = |first: &Sequence| first.waits_for_session() || first.preparation().is_some();
        let waits_there = |first: &SeqId| seq.phase() == Phase::WaitingOnParent && outside(&self.seqs[*first]);
        let parent = seq.parent().filter(waits_there).unwrap_or(parent);
        let arrival_number = self.waiting.next_arrival();
        let mut seq = Sequence::new(request, arrival_number, self.config.max_model_len, now).expect("its parent was sound");
        seq.make_fork(parent, waits);
        let id = self.insert(seq);
        self.join_parents_session(id, parent);
        if waits {
            self.waiting.wait_on_parent();
            self.seqs[parent].add_waiting_fork(id);
        } else {
            self.enqueue_new(id);
        }
        Some(id)
    }

    /// Registers a sequence with its tenant and class.
    fn insert(&mut self, mut seq: Sequence) -> SeqId {
        let (member, new) = self.accounts.enroll(&seq.request().tenant, seq.request().priority);
        seq.join(member, self.accounts.user(member.tenant));
        if new && self.rules.takes_turns() {
            self.waiting.shares_mut().introduce(member.tenant);
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
        let checked = full("requests", u64::from(backlog.reqs) + 1, self.config.max_num_queued_reqs.into()).and_then(|()| {
            // A request that finds the queue empty is never rejected for its length.
            let limit = self.config.max_num_queued_tokens.max(prompt.into());
            full("prompt tokens", backlog.prompt_tokens + u64::from(prompt), limit)
        });
        checked.map_err(|(what, queued, limit)| {
            self.accounts.counters.rejected_queue_full += 1;
            Rejected::QueueFull { what, queued, limit, retry_after: self.predicted_wait() }
        })
    }
}
