//! The order of work: who runs in the next step, and with how many tokens.

use crate::batch::{Chunk, Seated, StepPlan};
use crate::queue::{Queue, Ticket};
use crate::sequence::{FinishReason, NO_ROW, Output, Outputs, Request, SeqId, Sequence, Time, Token};
use crate::{BlockId, BlockPool, Chain, Config, ConfigError, Rejected};
use slotmap::SlotMap;

/// Counters since the start, and what is true now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that hold a row.
    pub running: usize,
    /// Sequences in the queue.
    pub waiting: usize,
    /// Blocks that sequences can hold.
    pub total_blocks: usize,
    /// Of those, blocks that nobody holds.
    pub free_blocks: usize,
    /// Steps planned.
    pub steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Prompt tokens looked for in the prefix cache, once a request.
    pub prefix_queries: u64,
    /// Of those, tokens found.
    pub prefix_hits: u64,
    /// Tokens sampled.
    pub generated_tokens: u64,
    /// Times that a sequence lost its blocks.
    pub preemptions: u64,
}

/// Decides each step: [`plan`](Self::plan), run, [`commit`](Self::commit).
///
/// A plan may be made while the step before is still running: lengths are
/// known ahead, only tokens are not. Steps must run in the order of their
/// plans, each after its block copies; a block freed by one call may be
/// written by the next plan's step, and by no earlier one.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    pool: BlockPool,
    seqs: SlotMap<SeqId, Sequence>,
    queue: Queue,
    /// Longest-running first; the last one is the first to lose its blocks.
    /// May name sequences that ended: the next plan drops them.
    running: Vec<SeqId>,
    free_rows: Vec<u32>,
    /// Plans spent, kept for their memory.
    spare: Vec<StepPlan>,
    found: Vec<BlockId>,
    next_ticket: Ticket,
    committed: u64,
    counters: Stats,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            pool: BlockPool::new(config.num_blocks, config.block_size as usize),
            seqs: SlotMap::with_key(),
            queue: Queue::default(),
            running: Vec::with_capacity(config.max_seqs as usize),
            free_rows: (0..config.max_seqs).rev().collect(),
            spare: Vec::new(),
            found: Vec::new(),
            next_ticket: 0,
            committed: 0,
            counters: Stats::default(),
            config,
        })
    }

    /// The limits it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Puts a request at the end of the queue, or says why it can never run.
    pub fn add(&mut self, request: Request, now: Time) -> Result<SeqId, Rejected> {
        let seq = Sequence::new(request, self.next_ticket, self.config.max_model_len, now)?;
        // The last token's KV is never needed.
        let (needed, have) = ((seq.limit - 1).div_ceil(self.config.block_size), self.config.usable_blocks());
        if needed > have {
            let fits = u64::from(have) * u64::from(self.config.block_size) + 1;
            return Err(Rejected::NeverFits { needed: needed.into(), have: have.into(), fits });
        }
        self.next_ticket += 1;
        let ticket = seq.ticket;
        let id = self.seqs.insert(seq);
        self.queue.push(ticket, id);
        Ok(id)
    }

    /// Ends a request without further output, in whatever state it is, and
    /// frees what it holds. False if it has ended already.
    pub fn abort(&mut self, id: SeqId, _now: Time) -> bool {
        if let Some(seq) = self.seqs.get(id) {
            self.pool.forget(&seq.table, self.committed);
        }
        self.remove(id)
    }

    /// Proposes the tokens after a sequence's last one, to be checked in its
    /// next step: commit keeps those that the model would have sampled itself.
    /// False, and nothing happens, unless the sequence is decoding with no
    /// step in flight.
    pub fn draft(&mut self, id: SeqId, tokens: &[Token]) -> bool {
        let Some(seq) = self.seqs.get_mut(id) else { return false };
        let len = seq.tokens.len() as u32;
        if seq.row == NO_ROW || seq.pending > 0 || seq.computed + 1 != len {
            return false;
        }
        let room = (seq.limit - len - 1) as usize;
        seq.draft.clear();
        seq.draft.extend(tokens.iter().take(room));
        true
    }

    /// Chooses the next step, or `None` when nothing can run before a commit or an addition.
    ///
    /// Running sequences come first, so that a decode never waits for a
    /// prompt (Sarathi-Serve, OSDI'24), then the queue's head as long as
    /// tokens, rows and blocks allow; nobody is admitted in a step that
    /// preempted.
    pub fn plan(&mut self, now: Time) -> Option<StepPlan> {
        let mut plan = self.spare.pop().unwrap_or_default().reuse(self.counters.steps);
        let mut budget = self.config.max_tokens;
        self.plan_running(&mut plan, &mut budget);
        self.plan_waiting(&mut plan, &mut budget, now);
        if plan.chunks.is_empty() {
            self.spare.push(plan);
            return None;
        }
        self.counters.steps += 1;
        Some(plan)
    }

    /// Takes in what a step sampled, for the oldest plan not yet committed.
    ///
    /// `sampled` has one token for each sampled position in the order of
    /// `sample_at`, negative where the model gave none: that request ends with
    /// [`FinishReason::Error`]. Chunks of sequences that ended meanwhile are
    /// skipped. `outputs` is overwritten.
    ///
    /// Panics if plans are committed out of order or `sampled` is too short.
    pub fn commit(&mut self, plan: StepPlan, sampled: &[i32], now: Time, outputs: &mut Outputs) {
        assert_eq!(plan.step, self.committed, "plans must be committed in order");
        self.committed += 1;
        outputs.tokens.clear();
        outputs.ended.clear();
        let mut at = 0;
        for chunk in &plan.chunks {
            if chunk.samples {
                let sampled = &sampled[at..at + 1 + chunk.drafted as usize];
                at += sampled.len();
                self.commit_chunk(chunk, sampled, now, outputs);
            }
        }
        self.spare.push(plan);
    }

    /// A sequence's tokens so far, and how many of them are its prompt.
    pub fn tokens(&self, id: SeqId) -> Option<(&[Token], usize)> {
        self.seqs.get(id).map(|seq| (seq.tokens.as_slice(), seq.prompt_len as usize))
    }

    /// Whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Counters, and what is true now.
    pub fn stats(&self) -> Stats {
        let waiting = self.queue.len();
        Stats {
            running: self.seqs.len() - waiting,
            waiting,
            total_blocks: self.config.usable_blocks() as usize,
            free_blocks: self.pool.free(),
            ..self.counters
        }
    }

    /// Panics unless every invariant holds. For tests and for idle moments.
    pub fn check(&self) {
        self.pool.check(self.seqs.values().map(|seq| &seq.table));
        let mut rows: Vec<u32> = self.free_rows.clone();
        for (id, seq) in &self.seqs {
            assert!(seq.tokens.len() as u32 <= seq.limit, "longer than it may get");
            assert!(seq.computed <= seq.expected_len() + seq.draft.len() as u32, "computed more than there is");
            let blocks = seq.table.ids().len() as u32;
            assert!(seq.computed <= blocks * self.config.block_size, "computed tokens without a block");
            if seq.row == NO_ROW {
                assert_eq!((blocks, seq.computed), (0, 0), "a waiting sequence holds blocks");
            } else {
                assert!(self.running.contains(&id), "a row without a running sequence");
                rows.push(seq.row);
            }
            if self.committed == self.counters.steps {
                assert_eq!((seq.pending, seq.drafting), (0, false), "nothing is in flight");
            }
        }
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..self.config.max_seqs), "a row is lost or taken twice");
        for (ticket, id) in self.queue.iter() {
            let seq = self.seqs.get(id).expect("a queued sequence exists");
            assert_eq!((seq.ticket, seq.row), (ticket, NO_ROW), "queued under another name, or while it runs");
        }
        let waiting = self.seqs.values().filter(|seq| seq.row == NO_ROW).count();
        assert_eq!(waiting, self.queue.len(), "a sequence that neither waits nor runs");
    }

    pub(crate) fn sequence(&self, id: SeqId) -> &Sequence {
        &self.seqs[id]
    }

    /// Gives each running sequence its next chunk, and drops those that ended.
    fn plan_running(&mut self, plan: &mut StepPlan, budget: &mut u32) {
        let (mut at, mut kept) = (0, 0);
        while at < self.running.len() {
            let id = self.running[at];
            at += 1;
            // Preempting shortens `running` behind `at`, never before it, but for `id` itself.
            if self.plan_chunk(id, at, plan, budget) {
                self.running[kept] = id;
                kept += 1;
            }
        }
        self.running.truncate(kept);
    }

    /// Plans what `id` can run now. False if it has ended, or was preempted itself.
    fn plan_chunk(&mut self, id: SeqId, at: usize, plan: &mut StepPlan, budget: &mut u32) -> bool {
        let Some(seq) = self.seqs.get_mut(id) else { return false };
        let expected = seq.expected_len();
        // Nothing left to sample, or the length is open until the commit.
        if *budget == 0 || expected == seq.limit || seq.drafting {
            return true;
        }
        let block_size = self.config.block_size;
        let table_from = seq.table.ids().len() as u32;
        let mut len = (expected - seq.computed).min(*budget);
        // A draft is worth free tokens and blocks, but nobody's eviction.
        let drafted = (seq.draft.len() as u32).min(*budget - len);
        let with_draft = seq.computed + len + drafted;
        if drafted > 0 && self.pool.grow(&mut seq.table, with_draft.div_ceil(block_size) as usize) {
            seq.draft.truncate(drafted as usize);
            seq.drafting = true;
            len += drafted;
        } else {
            seq.draft.clear();
        }
        let end = seq.computed + len;
        if end <= table_from * block_size || self.pool.grow(&mut seq.table, end.div_ceil(block_size) as usize) {
            plan.chunks.push(seq.next_chunk(id, len, table_from));
            seal(&mut self.pool, seq, block_size, plan.step);
        } else {
            if !self.reserve(id, end.div_ceil(block_size) as usize, at, plan) {
                return false;
            }
            let seq = &mut self.seqs[id];
            plan.chunks.push(seq.next_chunk(id, len, table_from));
            seal(&mut self.pool, seq, block_size, plan.step);
        }
        *budget -= len;
        true
    }

    /// Grows a running sequence's table to `blocks`, taking blocks from the
    /// last of those in `running[at..]`. False if it came to `id` itself.
    fn reserve(&mut self, id: SeqId, blocks: usize, at: usize, plan: &mut StepPlan) -> bool {
        while !self.pool.grow(&mut self.seqs[id].table, blocks) {
            let victim = if self.running.len() > at { self.running.pop().expect("not empty") } else { id };
            if !self.seqs.contains_key(victim) {
                continue;
            }
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
        true
    }

    /// Admits waiting sequences while tokens, rows and blocks allow.
    fn plan_waiting(&mut self, plan: &mut StepPlan, budget: &mut u32, now: Time) {
        while plan.preempted.is_empty() && *budget > 0 && !self.free_rows.is_empty() {
            let Some(id) = self.queue.first() else { return };
            if !self.admit(id, plan, now) {
                return;
            }
            let seq = &mut self.seqs[id];
            let len = (seq.tokens.len() as u32 - seq.computed).min(*budget);
            *budget -= len;
            plan.chunks.push(seq.next_chunk(id, len, 0));
            seal(&mut self.pool, seq, self.config.block_size, plan.step);
        }
    }

    /// Moves the queue's head to a row, with blocks for all its tokens, cached
    /// ones first. False if there is no room for it yet.
    fn admit(&mut self, id: SeqId, plan: &mut StepPlan, now: Time) -> bool {
        let headroom = if self.running.is_empty() { 0 } else { self.config.watermark as usize };
        let room = self.pool.free().saturating_sub(headroom);
        let seq = &mut self.seqs[id];
        // A token still on its way was sampled before the sequence lost its blocks.
        if seq.pending > 0 || seq.needs_free > room {
            return false;
        }
        let len = seq.tokens.len();
        let block_size = self.config.block_size as usize;
        let blocks = len.div_ceil(block_size);
        self.found.clear();
        if self.config.prefix_caching {
            seq.chain = self.pool.find(&seq.salt, &seq.tokens, &mut self.found);
        }
        // The last token always runs, or there would be nothing to sample
        // from. If its block was found it is written again, so in a copy when
        // others hold it, and not at all when there is nothing to copy yet.
        let mut rewritten = self.found.last().copied().filter(|_| self.found.len() * block_size == len);
        let mut copy = rewritten.is_some_and(|last| self.pool.holders(last) > 0);
        if copy && rewritten.is_some_and(|last| !self.pool.complete_before(last, plan.step)) {
            self.found.clear();
            seq.chain = self.pool.find(&seq.salt, &seq.tokens[..len - 1], &mut self.found);
            (rewritten, copy) = (None, false);
        }
        let revived = self.found.iter().filter(|&&found| self.pool.holders(found) == 0).count();
        seq.needs_free = revived + blocks - self.found.len() + usize::from(copy);
        if seq.needs_free > room {
            return false;
        }
        seq.needs_free = 0;
        for &found in &self.found {
            self.pool.share(&mut seq.table, found);
        }
        if copy {
            plan.copies.push(self.pool.unshare_last(&mut seq.table));
        } else if let Some(last) = rewritten {
            self.pool.rewrite(last, plan.step);
        }
        let grown = self.pool.grow(&mut seq.table, blocks);
        assert!(grown, "counted before");
        seq.computed = (self.found.len() * block_size).min(len - 1) as u32;
        if self.config.prefix_caching {
            seq.seal_at = (self.found.len() as u32 + 1) * self.config.block_size;
        }
        seq.row = self.free_rows.pop().expect("the caller looked");
        // Room for all it will sample, so that decoding does not allocate.
        seq.tokens.reserve_exact(seq.limit as usize - len);
        let queued = seq.started.unwrap_or(now).saturating_sub(seq.arrived);
        if seq.started.is_none() {
            seq.started = Some(now);
            seq.cached_tokens = seq.computed;
            self.counters.prompt_tokens += len as u64;
            if self.config.prefix_caching {
                self.counters.prefix_queries += len as u64;
                self.counters.prefix_hits += u64::from(seq.computed);
            }
        }
        plan.seated.push(Seated { row: seq.row, seq: id, tag: seq.tag, cached_tokens: seq.cached_tokens, queued });
        self.queue.remove(seq.ticket);
        self.running.push(id);
        true
    }

    /// Takes blocks and row from a running sequence and queues it at its old
    /// place. A token on its way still arrives. Names that rest on steps not
    /// yet committed go: nobody would take them back if those steps fail.
    fn preempt(&mut self, id: SeqId, plan: &mut StepPlan) {
        let seq = &mut self.seqs[id];
        self.pool.forget(&seq.table, self.committed);
        self.pool.release(&mut seq.table);
        self.free_rows.push(seq.row);
        (seq.row, seq.computed) = (NO_ROW, 0);
        seq.chain = Chain::root(&seq.salt);
        seq.draft.clear();
        seq.preemptions += 1;
        self.counters.preemptions += 1;
        plan.preempted.push(seq.tag);
        self.queue.push(seq.ticket, id);
    }

    /// Appends what one chunk sampled, up to the first drafted token that the
    /// model would not have chosen, or the request's end.
    fn commit_chunk(&mut self, chunk: &Chunk, sampled: &[i32], now: Time, outputs: &mut Outputs) {
        let Some(seq) = self.seqs.get_mut(chunk.seq) else { return };
        seq.pending -= 1;
        let mut finish = None;
        for (i, &token) in sampled.iter().enumerate() {
            let token = token as Token;
            finish = if token as i32 >= 0 { seq.push(token) } else { Some(FinishReason::Error) };
            outputs.tokens.push(Output { tag: seq.tag, token, finish });
            self.counters.generated_tokens += u64::from(finish != Some(FinishReason::Error));
            if finish.is_some() || (i < chunk.drafted as usize && seq.draft.get(i) != Some(&token)) {
                break;
            }
        }
        if seq.first_token.is_none() {
            seq.first_token = Some(now);
        }
        // With drafts the length was a guess; but a sequence that lost its blocks since then has nothing computed.
        if chunk.drafted > 0 {
            seq.drafting = false;
            seq.draft.clear();
            if seq.preemptions == chunk.preemptions {
                seq.computed = seq.tokens.len() as u32 - 1;
            }
        }
        match finish {
            // The token is known only now, but its KV may be a later plan's work.
            None => seal(&mut self.pool, seq, self.config.block_size, self.counters.steps - 1),
            Some(reason) => {
                if reason == FinishReason::Error {
                    self.pool.forget(&seq.table, 0);
                }
                outputs.ended.push(seq.ended(now));
                self.remove(chunk.seq);
            }
        }
    }

    /// Frees all that a sequence holds and forgets it. False if it is gone already.
    fn remove(&mut self, id: SeqId) -> bool {
        let Some(mut seq) = self.seqs.remove(id) else { return false };
        self.pool.release(&mut seq.table);
        if seq.row == NO_ROW {
            self.queue.remove(seq.ticket);
        } else {
            self.free_rows.push(seq.row);
        }
        true
    }
}

/// Names the blocks of `seq` that, once `step` has run, are full of known tokens.
fn seal(pool: &mut BlockPool, seq: &mut Sequence, block_size: u32, step: u64) {
    let known = seq.computed.min(seq.tokens.len() as u32);
    while seq.seal_at <= known {
        let block = (seq.seal_at - block_size) as usize..seq.seal_at as usize;
        pool.seal(&seq.table, &mut seq.chain, &seq.tokens[block], step);
        seq.seal_at += block_size;
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for seq in self.seqs.values_mut() {
            self.pool.release(&mut seq.table);
        }
    }
}
