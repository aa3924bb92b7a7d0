//! The way in: what may wait, and who of those that wait gets a row and blocks.

use crate::batch::{Seated, StepPlan};
use crate::config::Batching;
use crate::ledger::{Account, Cause, State};
use crate::policy::Policy;
use crate::queue::Walk;
use crate::request::{Request, SeqId, Time};
use crate::sequence::{NO_ROW, Sequence};
use crate::share::PROMPT_TOKEN;
use crate::{Chain, Rejected, Scheduler};
use std::sync::Arc;

/// How many that do not fit are looked at, at most, for one that does.
const LOOK_AHEAD: usize = 64;
/// How often one that does not fit lets others go past it.
const MOST_PASSED: u32 = 256;
/// Blocks by which a running sequence is thought to grow while others come and go.
const GROWTH: usize = 8;
/// Blocks beyond its tokens that a protected sequence is admitted with.
const RESERVE: u32 = 8;
/// One that did not fit is measured anew every so many plans: its prefix may be in the cache by then.
const MEASURED_FOR: u64 = 64;
/// Tokens that an output is thought to have, if it may, before any has ended.
const UNKNOWN_OUTPUT: f64 = 256.0;

impl Scheduler {
    /// Puts a request into the queue, or says why it cannot run, or cannot wait.
    /// `now` is when it came: that may be before the last call, while a step was under way.
    pub fn add(&mut self, request: Request, now: Time) -> Result<SeqId, Rejected> {
        self.clocks.tick(now);
        let tenant = Arc::clone(&request.tenant);
        let seq = Sequence::new(request, self.next_ticket, self.config.max_model_len, now)?;
        // The last token's KV is never needed.
        let (needed, have) = ((seq.limit - 1).div_ceil(self.config.block_size), self.config.usable_blocks());
        if needed > have {
            let fits = u64::from(have) * u64::from(self.config.block_size) + 1;
            return Err(Rejected::NeverFits { needed: needed.into(), have: have.into(), fits });
        }
        self.check_queue(seq.prompt_len)?;
        self.queued_reqs += 1;
        self.queued_tokens += u64::from(seq.prompt_len);
        let id = self.insert(seq, &tenant, State::Fresh);
        self.enqueue(id, false);
        self.fresh.push(id);
        Ok(id)
    }

    /// Adds a sibling of a request that lives: the same prompt, limits and
    /// stops under another tag. It waits until the prompt is computed, and then
    /// shares its blocks; the last, partly filled one is copied. `None` if the
    /// request has ended. Siblings do not count against the queue's limits.
    pub fn fork(&mut self, parent: SeqId, tag: u64, now: Time) -> Option<SeqId> {
        let seq = self.seqs.get(parent)?;
        self.clocks.tick(now);
        let tenant = Arc::clone(self.tenants.name(seq.tenant));
        let waits = !seq.decoding && seq.first_token.is_none();
        let request = seq.sibling(tag, Arc::clone(&tenant));
        let mut seq = Sequence::new(request, self.next_ticket, self.config.max_model_len, now).expect("its parent was sound");
        seq.parent = Some(parent);
        let id = self.insert(seq, &tenant, if waits { State::Sibling } else { State::Fresh });
        if waits {
            self.parked += 1;
            self.seqs[parent].forks.push(id);
        } else {
            self.enqueue(id, false);
            self.fresh.push(id);
        }
        Some(id)
    }

    /// Microseconds that a request arriving now would wait, as far as can be told.
    ///
    /// Prompts take the tokens of steps one after the other. Rows get free as the outputs in them end, and those that wait take them in turn,
    /// each for a usual output. O(rows).
    pub(crate) fn predicted_wait(&self) -> Time {
        let ahead = self.queue.len() + self.parked;
        if (ahead == 0 && !self.free_rows.is_empty()) || !self.model.knows() {
            return 0;
        }
        let rows = self.config.max_seqs as usize;
        let mut left: Vec<f64> = self.seated().map(|seq| self.expected_output_left(seq)).collect();
        let running = left.len().max(1) as f64;
        let usual = if self.mean_output > 0.0 { self.mean_output } else { left.iter().sum::<f64>() / running };
        left.resize(rows, 0.0);
        let (_, next, _) = left.select_nth_unstable_by(ahead % rows, f64::total_cmp);
        let outputs = (*next + usual * (ahead / rows) as f64) * self.model.mean_step();
        let each = self.queued_tokens as f64 / f64::from(self.queued_reqs.max(1));
        (self.model.prefill(0.0, each) * f64::from(self.queued_reqs) + outputs) as Time
    }

    /// Tokens that a running sequence should still generate: what its caller predicted, or what outputs have had of late. One that has had
    /// more than that is taken for a new one.
    fn expected_output_left(&self, seq: &Sequence) -> f64 {
        let most = f64::from(seq.predicted_left());
        if seq.predicted.is_some() {
            return most;
        }
        let usual = if self.mean_output > 0.0 { self.mean_output } else { UNKNOWN_OUTPUT };
        let left = usual - f64::from(seq.output_tokens());
        most.min(if left > 0.0 { left } else { usual })
    }

    /// Enters a sequence under its tenant and class.
    fn insert(&mut self, mut seq: Sequence, tenant: &Arc<str>, state: State) -> SeqId {
        let (number, new) = self.tenants.enter(tenant);
        seq.tenant = number;
        (seq.class, _) = self.classes.enter(&seq.priority);
        seq.group = match self.config.policy {
            policy if policy.has_tenants() => seq.tenant,
            policy if policy.has_classes() => seq.class,
            _ => 0,
        };
        if new && self.config.policy.has_tenants() {
            self.queue.shares.introduce(number);
        }
        self.clocks.admit_group(seq.group);
        *seq.account = Account::open(seq.arrived, state);
        self.next_ticket += 1;
        let id = self.seqs.insert(seq);
        let due = self.due(&self.seqs[id]);
        self.watch(id, due);
        id
    }

    fn check_queue(&mut self, prompt: u32) -> Result<(), Rejected> {
        let full = |what, queued: u64, limit: u64| if queued > limit { Err((what, queued, limit)) } else { Ok(()) };
        let checked = full("requests", u64::from(self.queued_reqs) + 1, self.config.max_queued_reqs.into())
            // One that finds nobody waiting is never too long to wait.
            .and_then(|()| full("prompt tokens", self.queued_tokens + u64::from(prompt), self.config.max_queued_tokens.max(prompt.into())));
        checked.map_err(|(what, queued, limit)| {
            self.counters.rejected_queue_full += 1;
            Rejected::QueueFull { what, queued, limit, retry_after: self.predicted_wait() }
        })
    }

    /// Puts a sequence into the queue; `returns` if it ran before.
    pub(crate) fn enqueue(&mut self, id: SeqId, returns: bool) {
        let seq = &mut self.seqs[id];
        self.tenants.usage(seq.tenant).waiting += 1;
        self.classes.usage(seq.class).waiting += 1;
        self.returning += usize::from(seq.started.is_some());
        self.swapped += usize::from(seq.saved > 0);
        if self.config.prefix_caching {
            self.pool.name_blocks(&seq.salt, &seq.tokens, &mut seq.names);
            if matches!(self.config.policy, Policy::Deadline | Policy::Shortest | Policy::Prefix) {
                seq.chain = Chain::root(&seq.salt);
                self.look_up(id);
            }
        }
        self.place(id, returns);
    }

    /// Gives a waiting sequence its place in the order.
    pub(crate) fn place(&mut self, id: SeqId, returns: bool) {
        let seq = &self.seqs[id];
        let rank = match self.config.policy {
            Policy::Deadline => self.due(seq),
            Policy::Shortest => self.work_left(seq),
            Policy::Prefix => u64::from(u32::MAX - (seq.tokens.len() as u32 - seq.uncached)),
            Policy::Fcfs | Policy::Priority | Policy::Fair | Policy::Vtc => 0,
        };
        let key = self.config.policy.key(seq.priority, seq.tenant, rank, seq.ticket);
        let seq = &mut self.seqs[id];
        seq.key = key;
        self.queue.push(key, id, returns);
        if self.config.policy == Policy::Prefix {
            let next = seq.chain.len();
            self.await_block(id, next);
        }
    }

    /// Takes a waiting sequence out of the queue.
    pub(crate) fn dequeue(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        self.queue.remove(seq.key);
        self.awaited.leave(seq);
        self.tenants.usage(seq.tenant).waiting -= 1;
        self.classes.usage(seq.class).waiting -= 1;
        self.returning -= usize::from(seq.started.is_some());
        self.swapped -= usize::from(seq.saved > 0);
        if seq.started.is_none() && seq.parent.is_none() {
            self.queued_reqs -= 1;
            self.queued_tokens -= u64::from(seq.prompt_len);
        }
    }

    /// Lets the siblings that waited for a sequence's prompt into the queue.
    pub(crate) fn release_forks(&mut self, id: SeqId) {
        for child in std::mem::take(&mut self.seqs[id].forks) {
            if self.seqs.contains_key(child) {
                self.parked -= 1;
                self.enter(child, State::Waiting);
                self.enqueue(child, false);
            }
        }
    }

    /// Admits waiting sequences while tokens, rows and blocks allow; no more
    /// than `promised`, the first ones, if others were preempted in this step.
    /// If somebody is `barred`, the elder by what keeps it out, nobody is.
    pub(crate) fn plan_waiting(&mut self, plan: &mut StepPlan, budget: &mut u32, promised: u32, barred: Option<(u32, Cause)>) {
        let mut left = if plan.preempted.is_empty() { u32::MAX } else { promised };
        let (mut turned_back, mut looked, mut walk) = (barred, 0, Walk::default());
        self.skipped.clear();
        while barred.is_none() && left > 0 && *budget > 0 && !self.free_rows.is_empty() && looked < LOOK_AHEAD {
            let Some(id) = self.queue.next(&mut walk) else { break };
            if self.seqs[id].looked_at == self.looks {
                continue; // turned back in this step already, before the walk began anew
            }
            left -= 1;
            match self.admit(id, plan, budget) {
                Ok(()) => {
                    self.skipped.iter().for_each(|&passed| self.seqs[passed].passed += 1);
                    if self.skipped.iter().any(|&passed| self.seqs[passed].passed >= MOST_PASSED) {
                        break;
                    }
                    // Service changes whose turn it is.
                    if self.config.policy.has_tenants() {
                        walk = Walk::default();
                    }
                }
                Err(cause) => {
                    let seq = &mut self.seqs[id];
                    if cause != Cause::WaitOrder {
                        turned_back.get_or_insert((seq.group, cause));
                    }
                    looked += 1;
                    seq.looked_at = self.looks;
                    if cause == Cause::WaitBatch && self.returning == 0 {
                        break;
                    }
                    if cause == Cause::WaitBlocks && seq.pending == 0 {
                        let since = *seq.turned_back.get_or_insert(self.clocks.now());
                        if seq.passed >= MOST_PASSED || self.clocks.now() - since > self.config.ageing {
                            break;
                        }
                        self.skipped.push(id);
                    }
                }
            }
        }
        let limit = match () {
            () if !plan.preempted.is_empty() => Cause::WaitBlocks,
            () if self.free_rows.is_empty() => Cause::WaitRows,
            () => Cause::WaitTokens,
        };
        // With tokens and rows left, those that wait are held back by their order.
        let free = *budget > 0 && !self.free_rows.is_empty() && plan.preempted.is_empty();
        let turn = turned_back.or_else(|| self.queue.first().filter(|_| !free).map(|id| (self.seqs[id].group, limit)));
        self.clocks.hold(turn);
    }

    /// Moves a waiting sequence to a row, with blocks for all its tokens,
    /// cached ones first, and plans its first chunk; or says what keeps it out.
    pub(crate) fn admit(&mut self, id: SeqId, plan: &mut StepPlan, budget: &mut u32) -> Result<(), Cause> {
        if self.config.batching != Batching::Continuous && self.boarding == 0 && self.seqs[id].started.is_none() {
            return Err(Cause::WaitBatch);
        }
        let room = self.pool.free().saturating_sub(self.held_back(id));
        let seq = &mut self.seqs[id];
        let measured = !(self.looks + seq.ticket).is_multiple_of(MEASURED_FOR);
        let non_preemptible = self.non_preemptible.is_some();
        // A token still on its way was sampled before the sequence lost its blocks.
        if seq.pending > 0 || (measured && seq.needs_free > room) || (seq.is_last_chance() && non_preemptible) {
            return Err(Cause::WaitBlocks);
        }
        let taken = if seq.saved > 0 { self.swap_in(id, room, plan) } else { self.take_blocks(id, room, plan) };
        taken?;
        self.seat(id, plan);
        self.plan_piece(id, 0, plan, budget);
        Ok(())
    }

    /// Blocks that stay free beside so many that run, so that they can grow:
    /// few need less than the watermark.
    pub(crate) fn headroom(&self, running: usize) -> usize {
        (self.config.watermark as usize).min(GROWTH * running)
    }

    /// Gives a sequence its row.
    fn seat(&mut self, id: SeqId, plan: &mut StepPlan) {
        self.dequeue(id);
        let seq = &mut self.seqs[id];
        seq.saved = 0;
        seq.row = self.free_rows.pop().expect("the caller looked");
        // Room for all it will sample, so that decoding does not allocate.
        seq.tokens.reserve_exact(seq.limit as usize - seq.tokens.len());
        seq.table.reserve(seq.limit.div_ceil(self.config.block_size) as usize);
        if self.config.prefix_caching {
            seq.names.reserve_exact((seq.limit / self.config.block_size) as usize - seq.names.len());
        }
        let len = u64::from(seq.prompt_len);
        if seq.started.is_none() {
            seq.started = Some(self.clocks.now());
            seq.cached_tokens = seq.computed;
            self.boarding = self.boarding.saturating_sub(1);
            self.counters.prompt_tokens += len;
            if self.config.prefix_caching && seq.parent.is_none() {
                self.counters.prefix_queries += len;
                self.counters.prefix_hits += u64::from(seq.computed);
            }
            if self.config.policy.has_tenants() {
                self.queue.shares.charge(seq.tenant, PROMPT_TOKEN * (len - u64::from(seq.computed)), seq.weight);
            }
        } else {
            let again = u64::from(seq.lost.saturating_sub(seq.computed));
            seq.account.recomputed_tokens += again;
            self.counters.recomputed_tokens += again;
        }
        seq.computed_from = seq.computed;
        (seq.needs_free, seq.turned_back, seq.passed) = (0, None, 0);
        let queued = seq.started.unwrap_or(seq.arrived) - seq.arrived;
        plan.seated.push(Seated { row: seq.row, seq: id, tag: seq.tag, cached_tokens: seq.cached_tokens, queued });
        self.tenants.usage(seq.tenant).running += 1;
        self.classes.usage(seq.class).running += 1;
        *self.running_classes.entry(seq.priority).or_default() += 1;
        if seq.is_protected() {
            self.non_preemptible.get_or_insert(id);
        }
        self.running.push(id);
        self.reserved.invalidate();
        self.admitted += 1;
        let state = seq.running_state();
        self.enter(id, state);
        self.hold_blocks(id);
    }

    /// Takes a running sequence's row.
    pub(crate) fn unseat(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        self.free_rows.push(seq.row);
        (seq.row, seq.quick_until, seq.stalled) = (NO_ROW, 0, false);
        if self.config.policy == Policy::Prefix {
            // Who waited for what it was to compute waits in vain.
            seq.names.iter().for_each(|&name| self.awaited.ready(name));
        }
        self.reserved.invalidate();
        // There is more room now than when somebody was refused.
        self.refused = None;
        self.tenants.usage(seq.tenant).running -= 1;
        self.classes.usage(seq.class).running -= 1;
        let count = self.running_classes.get_mut(&seq.priority).expect("it runs");
        *count -= 1;
        if *count == 0 {
            self.running_classes.remove(&seq.priority);
        }
        self.elder = self.elder.filter(|&elder| elder != id);
        self.non_preemptible = self.non_preemptible.filter(|&first| first != id);
    }

    /// Books how many blocks a sequence holds from now on.
    pub(crate) fn hold_blocks(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        seq.account.hold(seq.table.ids().len(), &self.clocks);
    }

    /// Gives a sequence blocks for all its tokens, from the cache where it has them.
    fn take_blocks(&mut self, id: SeqId, room: usize, plan: &mut StepPlan) -> Result<(), Cause> {
        let block_size = self.config.block_size as usize;
        let len = self.seqs[id].tokens.len();
        if self.is_being_computed(id) {
            return Err(Cause::WaitOrder);
        }
        let known = self.seqs[id].chain.len();
        let tail = self.find_blocks(id, len, plan.step);
        // Some of what was found before may have left the cache.
        if self.seqs[id].chain.len() < known && self.is_being_computed(id) {
            return Err(Cause::WaitOrder);
        }
        // The last token always runs, or there would be nothing to sample
        // from. If its block was found it is written again, so in a copy when
        // others hold it, and not at all when there is nothing to copy yet.
        let mut rewritten = self.found.last().copied().filter(|_| self.found.len() * block_size == len);
        let mut copy = rewritten.is_some_and(|last| self.pool.holders(last) > 0);
        let seq = &mut self.seqs[id];
        if copy && rewritten.is_some_and(|last| !self.pool.complete_before(last, plan.step)) {
            self.found.clear();
            seq.chain = self.pool.find(&seq.salt, &seq.names[..(len - 1) / block_size], &seq.tokens, &mut self.found);
            (rewritten, copy) = (None, false);
        }
        let blocks = self.share_found(id, room, usize::from(copy))?;
        let seq = &mut self.seqs[id];
        if copy {
            plan.copies.push(self.pool.unshare_last(&mut seq.table));
        } else if let Some(last) = rewritten {
            self.pool.rewrite(last, plan.step);
        }
        let grown = self.pool.grow(&mut seq.table, blocks);
        assert!(grown, "counted before");
        seq.computed = (self.found.len() * block_size).min(len - 1) as u32;
        if let Some(from) = tail {
            // What its parent's prompt left in a block partly filled.
            plan.copies.push((from, seq.table.ids()[self.found.len()]));
            seq.computed = len as u32 - 1;
        }
        Ok(())
    }

    /// Gives a sequence the blocks found for it, if there is `room` for all the
    /// blocks that it gets now, and for so many `copies`; says how many it gets.
    pub(crate) fn share_found(&mut self, id: SeqId, room: usize, copies: usize) -> Result<usize, Cause> {
        let blocks = self.blocks_at_admission(id);
        let revived = self.found.iter().filter(|&&found| self.pool.holders(found) == 0).count();
        let seq = &mut self.seqs[id];
        seq.needs_free = revived + blocks - self.found.len() + copies;
        if seq.needs_free > room {
            return Err(Cause::WaitBlocks);
        }
        for &found in &self.found {
            self.pool.share(&mut seq.table, found);
        }
        if self.config.prefix_caching {
            seq.seal_at = (self.found.len() as u32 + 1) * self.config.block_size;
        }
        Ok(blocks)
    }

    /// Finds the blocks that a sequence can share, into `found`. A sibling
    /// whose parent has all of its prompt also gets the block that the last but
    /// one token of the prompt lies in, for copying.
    fn find_blocks(&mut self, id: SeqId, len: usize, step: u64) -> Option<crate::BlockId> {
        if self.config.prefix_caching {
            // Tokens may have come while it waited.
            let seq = &mut self.seqs[id];
            self.pool.name_blocks(&seq.salt, &seq.tokens, &mut seq.names);
        }
        let seq = &self.seqs[id];
        let whole = (len - 1) / self.config.block_size as usize;
        self.found.clear();
        let parent = seq.parent.and_then(|parent| self.seqs.get(parent));
        let parent = parent.filter(|parent| parent.decoding && parent.row != NO_ROW && seq.started.is_none());
        let chain = if self.config.prefix_caching {
            self.pool.find(&seq.salt, &seq.names, &seq.tokens, &mut self.found)
        } else {
            self.found.extend(parent.iter().flat_map(|parent| &parent.table.ids()[..whole]));
            Chain::root(&seq.salt)
        };
        let partly = !(len - 1).is_multiple_of(self.config.block_size as usize);
        let tail = parent.filter(|_| partly && self.found.len() == whole).map(|parent| parent.table.ids()[whole]);
        let tail = tail.filter(|&tail| self.pool.settled_before(tail, step));
        self.seqs[id].chain = chain;
        tail
    }

    /// The blocks that a sequence gets when it is admitted.
    pub(crate) fn blocks_at_admission(&self, id: SeqId) -> usize {
        let seq = &self.seqs[id];
        let reserve = if seq.is_protected() { RESERVE * self.config.block_size } else { 0 };
        let len = (seq.tokens.len() as u32).saturating_add(reserve).min(seq.limit - 1);
        len.div_ceil(self.config.block_size) as usize
    }

    /// Admits the oldest, if it has waited too long and none such runs: what
    /// keeps it out then keeps out all, until it fits.
    pub(crate) fn admit_elder(&mut self, plan: &mut StepPlan, budget: &mut u32) -> Option<(u32, Cause)> {
        if !self.config.policy.starves() || self.elder.is_some() || *budget == 0 || self.free_rows.is_empty() {
            return None;
        }
        let id = self.queue.oldest()?;
        let seq = &self.seqs[id];
        if self.clocks.now() - seq.arrived <= self.config.ageing || seq.pending > 0 {
            return None;
        }
        let group = seq.group;
        match self.admit(id, plan, budget) {
            Ok(()) => {
                self.elder = Some(id);
                None
            }
            Err(Cause::WaitBlocks) => Some((group, Cause::WaitBlocks)),
            Err(_) => None,
        }
    }

    /// Lets a batch depart, where sequences are batched that way: when nobody
    /// runs, and, if it is to wait for others, when it has waited.
    pub(crate) fn open_batch(&mut self) {
        self.wake_at = None;
        let (size, timeout) = match self.config.batching {
            Batching::Continuous => return,
            Batching::Static { size } => (size, 0),
            Batching::Dynamic { size, timeout } => (size, timeout),
        };
        let waiting = (self.queue.len() - self.returning) as u32;
        self.boarding = self.boarding.min(waiting);
        if self.boarding > 0 || waiting == 0 || !self.running.is_empty() {
            return;
        }
        let departs = self.queue.oldest().map_or(0, |oldest| self.seqs[oldest].arrived.saturating_add(timeout));
        if waiting >= size || self.returning > 0 || self.clocks.now() >= departs {
            self.boarding = size.min(waiting);
        } else {
            self.wake_at = Some(departs);
        }
    }
}
