//! The order of work: who runs in the next step, and with how many tokens.

use crate::batch::StepPlan;
use crate::batch::{Output, Outputs};
use crate::group::{Groups, Usage};
use crate::host::HostPool;
use crate::ledger::{Cause, Clocks, Ledger, State};
use crate::prefix::Awaited;
use crate::queue::Queue;
use crate::request::{FinishReason, SeqId, Ticket, Time, Token};
use crate::reservation::Reserved;
use crate::saturation::Saturation;
use crate::sequence::{NO_ROW, Sequence};
use crate::share::{OUTPUT_TOKEN, PreemptionBudget};
use crate::snapshot::Watch;
use crate::stats::{Counters, Stall};
use crate::{BlockHasher, BlockId, BlockPool, Chunk, Config, ConfigError, StepModel};
use slotmap::SlotMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Requests that ended whose ledgers are kept.
const EXPLAINED: usize = 10_000;

/// Decides each step: [`plan`](Self::plan), run, [`commit`](Self::commit).
///
/// A plan may be made while the step before is still running: lengths are
/// known ahead, only tokens are not. Steps must run in the order of their
/// plans, each after its block copies; a block freed by one call may be
/// written by the next plan's step, and by no earlier one.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) pool: BlockPool,
    pub(crate) host: HostPool,
    pub(crate) seqs: SlotMap<SeqId, Sequence>,
    pub(crate) queue: Queue,
    /// In the order of their admission. May name sequences that ended or were
    /// preempted: the next plan drops them.
    pub(crate) running: Vec<SeqId>,
    pub(crate) free_rows: Vec<u32>,
    /// Copies to the host that an empty plan could not carry out.
    swaps_due: Vec<(BlockId, u32)>,
    /// How many of each class run.
    pub(crate) running_classes: BTreeMap<i32, u32>,
    /// Requests with deadlines, by when to look at them next.
    pub(crate) deadlines: BTreeMap<(Time, Ticket), SeqId>,
    pub(crate) tenants: Groups<Arc<str>>,
    pub(crate) classes: Groups<i32>,
    pub(crate) clocks: Clocks,
    pub(crate) model: StepModel,
    pub(crate) awaited: Awaited,
    pub(crate) reserved: Reserved,
    /// Added since the last plan.
    pub(crate) fresh: Vec<SeqId>,
    /// Siblings that wait for their parents' prompts; they are in no queue.
    pub(crate) parked: usize,
    /// Sequences in the queue that ran before, and those of them with KV in host memory.
    pub(crate) returning: usize,
    pub(crate) swapped: usize,
    /// Prompt tokens of requests that never ran, siblings not counted, and how many they are.
    pub(crate) queued_tokens: u64,
    pub(crate) queued_reqs: u32,
    /// What a request generates, on average of late.
    pub(crate) mean_output: f64,
    /// Members of the batch that have not boarded yet (static and dynamic batching).
    pub(crate) boarding: u32,
    /// The one that runs because it had waited too long.
    pub(crate) elder: Option<SeqId>,
    /// The sequence that nobody preempts, so that one always ends.
    pub(crate) non_preemptible: Option<SeqId>,
    pub(crate) preemption_budget: PreemptionBudget,
    /// Who was refused a running one's place, and how many had been admitted then.
    pub(crate) refused: Option<(SeqId, u64)>,
    pub(crate) admitted: u64,
    /// Plans made, empty ones too.
    pub(crate) looks: u64,
    pub(crate) stall: Option<Stall>,
    pub(crate) wake_at: Option<Time>,
    pub(crate) predicted_step: u64,
    pub(crate) next_ticket: Ticket,
    pub(crate) committed: u64,
    last_commit: Time,
    /// Whether there was more to do after the last commit: the next step began then.
    goes_on: bool,
    pub(crate) saturation: Saturation,
    pub(crate) counters: Counters,
    pub(crate) finished: VecDeque<Ledger>,
    pub(crate) watch: Watch,
    /// Plans spent, and lists in use while a step is planned: kept for their memory.
    spare: Vec<StepPlan>,
    pub(crate) found: Vec<BlockId>,
    pub(crate) partial: Vec<SeqId>,
    pub(crate) skipped: Vec<SeqId>,
}

impl Scheduler {
    /// A scheduler with nothing to do. Anybody can find tokens whose block names collide: where clients choose them, use
    /// [`keyed`](Self::keyed).
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Self::keyed(config, 0)
    }

    /// The same with a secret `key` for block names. Decisions do not depend on it.
    pub fn keyed(config: Config, key: u128) -> Result<Self, ConfigError> {
        config.check()?;
        let mut clocks = Clocks::default();
        clocks.admit_group(0);
        Ok(Self {
            pool: BlockPool::new(config.num_blocks, config.block_size as usize, BlockHasher::new(key)),
            host: HostPool::new(config.host_blocks),
            seqs: SlotMap::with_key(),
            queue: Queue::new(config.policy),
            running: Vec::with_capacity(2 * config.max_seqs as usize),
            free_rows: (0..config.max_seqs).rev().collect(),
            swaps_due: Vec::new(),
            running_classes: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            tenants: Groups::new(),
            classes: Groups::new(),
            clocks,
            model: StepModel::default(),
            awaited: Awaited::default(),
            reserved: Reserved::default(),
            fresh: Vec::new(),
            parked: 0,
            returning: 0,
            swapped: 0,
            queued_tokens: 0,
            queued_reqs: 0,
            mean_output: 0.0,
            boarding: 0,
            elder: None,
            non_preemptible: None,
            preemption_budget: PreemptionBudget::default(),
            refused: None,
            admitted: 0,
            looks: 0,
            stall: None,
            wake_at: None,
            predicted_step: 0,
            next_ticket: 0,
            committed: 0,
            last_commit: 0,
            goes_on: false,
            saturation: Saturation::default(),
            counters: Counters::default(),
            finished: VecDeque::new(),
            watch: Watch::default(),
            spare: Vec::new(),
            found: Vec::new(),
            partial: Vec::new(),
            skipped: Vec::new(),
            config,
        })
    }

    /// The limits it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it has learned of the machine.
    pub fn model(&self) -> &StepModel {
        &self.model
    }

    /// Ends a request without further output, in whatever state it is, and
    /// frees what it holds. False if it has ended already.
    pub fn abort(&mut self, id: SeqId, now: Time) -> bool {
        self.end(id, FinishReason::Abort, now)
    }

    /// As [`abort`](Self::abort), for a caller who has what it asked for: a
    /// stop string, say, which only it can see. It counts as a stop.
    pub fn stop(&mut self, id: SeqId, now: Time) -> bool {
        self.end(id, FinishReason::Stop, now)
    }

    /// As [`abort`](Self::abort), for one that cannot be computed: it counts as failed.
    pub fn fail(&mut self, id: SeqId, now: Time) -> bool {
        self.end(id, FinishReason::Error, now)
    }

    /// Ends every request that missed its deadline, and, under
    /// [`Policy::Deadline`](crate::Policy::Deadline), every one that cannot make it any more; adds their
    /// ledgers to `ended`. To be called before each plan.
    pub fn expire(&mut self, now: Time, ended: &mut Vec<Ledger>) {
        if !self.has_due(now) {
            return;
        }
        self.clocks.tick(now);
        while let Some((&(at, ticket), &id)) = self.deadlines.first_key_value().filter(|((at, _), _)| *at <= now) {
            self.deadlines.remove(&(at, ticket));
            let due = self.due(&self.seqs[id]);
            self.seqs[id].look_at = None;
            if due > now {
                self.watch(id, due);
                continue;
            }
            self.counters.expired += 1;
            ended.push(self.leave_early(id, FinishReason::Deadline));
        }
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
        seq.quick_until = 0;
        true
    }

    /// Chooses the next step, or `None` when nothing can run before a commit,
    /// an addition, or [`wake_at`](Self::wake_at).
    ///
    /// Decodes come first, so that none waits for a prompt (Sarathi-Serve,
    /// OSDI'24); then prompts begun and the queue in the order of the policy,
    /// as long as tokens, rows and blocks allow. In a step that preempted only
    /// those are admitted for whom that was done.
    pub fn plan(&mut self, now: Time) -> Option<StepPlan> {
        self.clocks.tick(now);
        self.looks += 1;
        let backlog = self.queue.len() > self.fresh.len();
        for id in self.fresh.drain(..) {
            if let Some(seq) = self.seqs.get_mut(id).filter(|seq| seq.account.state() == State::Fresh) {
                seq.account.enter(State::Waiting, &self.clocks, seq.group, Cause::WaitOrder);
            }
        }
        self.preemption_budget.grow(self.clocks.now());
        self.reserved.invalidate();
        self.follow_awaited();
        let mut plan = self.spare.pop().unwrap_or_default().reuse(self.counters.steps, self.clocks.now());
        plan.swap_out.append(&mut self.swaps_due);
        let way = self.make_room(&mut plan);
        let mut budget = self.config.max_tokens;
        self.plan_decodes(&mut plan, &mut budget, way.spare);
        self.bound_prefill(&plan, &mut budget, backlog);
        self.plan_prefills(&mut plan, &mut budget, way.promised);
        self.clocks.step(plan.chunks.len(), plan.load.prefill_tokens > 0);
        if plan.chunks.is_empty() {
            self.name_stall();
            self.note_backlog();
            self.goes_on &= self.committed < self.counters.steps;
            // Whoever lost its blocks for want of room still needs their copies.
            self.swaps_due.append(&mut plan.swap_out);
            self.spare.push(plan);
            return None;
        }
        self.note_step(&plan);
        self.stall = None;
        self.note_backlog();
        self.counters.steps += 1;
        self.predicted_step = self.model.step(&plan.load) as u64;
        Some(plan)
    }

    /// When [`plan`](Self::plan), having given nothing, may give something
    /// with no other call before: a batch's timeout or somebody's deadline.
    pub fn wake_at(&self) -> Option<Time> {
        let deadline = self.deadlines.first_key_value().map(|(&(at, _), _)| at);
        self.wake_at.into_iter().chain(deadline).min()
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
        self.clocks.tick(now);
        self.committed += 1;
        self.model.observe(&plan.load, self.clocks.now() - plan.planned.max(self.last_commit));
        let began = if self.goes_on { self.last_commit } else { plan.planned.max(self.last_commit) };
        self.note_use(&plan.load, began);
        self.last_commit = self.clocks.now();
        outputs.tokens.clear();
        outputs.ended.clear();
        let mut at = 0;
        for chunk in &plan.chunks {
            if chunk.samples {
                let sampled = &sampled[at..at + 1 + chunk.drafted as usize];
                at += sampled.len();
                self.commit_chunk(chunk, sampled, outputs);
            }
        }
        if self.committed == self.counters.steps {
            self.clocks.step(0, false);
        }
        self.goes_on = !self.seqs.is_empty();
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

    /// What each tenant used, those that were not seen for long left out.
    pub fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, &Usage)> {
        self.tenants.iter()
    }

    /// What each class used, likewise.
    pub fn classes(&self) -> impl Iterator<Item = (&i32, &Usage)> {
        self.classes.iter()
    }

    pub(crate) fn sequence(&self, id: SeqId) -> &Sequence {
        &self.seqs[id]
    }

    /// What a sequence waits for when it is not its group's turn.
    pub(crate) fn others(&self) -> Cause {
        if self.config.policy.has_tenants() { Cause::WaitShare } else { Cause::WaitOrder }
    }

    /// Books a sequence's time so far, and begins another state.
    pub(crate) fn enter(&mut self, id: SeqId, state: State) {
        let others = self.others();
        let seq = &mut self.seqs[id];
        seq.account.enter(state, &self.clocks, seq.group, others);
    }

    /// Whether a deadline has come, so that [`expire`](Self::expire) has something to do.
    pub(crate) fn has_due(&self, now: Time) -> bool {
        self.deadlines.first_key_value().is_some_and(|(&(at, _), _)| at <= now)
    }

    /// The ticket and tag of a sequence that has not ended.
    pub(crate) fn numbers(&self, id: SeqId) -> Option<(Ticket, u64)> {
        self.seqs.get(id).map(|seq| (seq.ticket, seq.tag))
    }

    /// Appends what one chunk sampled, up to the first drafted token that the
    /// model would not have chosen, or the request's end.
    fn commit_chunk(&mut self, chunk: &Chunk, sampled: &[i32], outputs: &mut Outputs) {
        let Some(seq) = self.seqs.get_mut(chunk.seq) else { return };
        seq.pending -= 1;
        let before = outputs.tokens.len();
        let mut finish = deliver(seq, sampled[0], outputs);
        for (i, &token) in sampled.iter().enumerate().skip(1) {
            if finish.is_some() || seq.draft.get(i - 1) != Some(&(sampled[i - 1] as Token)) {
                break;
            }
            finish = deliver(seq, token, outputs);
        }
        let given = (outputs.tokens.len() - before) as u64 - u64::from(finish == Some(FinishReason::Error));
        self.counters.generated_tokens += given;
        if self.config.policy.has_tenants() {
            self.queue.shares.charge(seq.tenant, OUTPUT_TOKEN * given, seq.weight);
        }
        let mut forks = false;
        if !seq.decoding {
            seq.first_token.get_or_insert(self.clocks.now());
            forks = !seq.forks.is_empty();
            if seq.preemptions == chunk.preemptions {
                seq.decoding = true;
                seq.account.enter(State::Decode, &self.clocks, seq.group, Cause::WaitOrder);
            }
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
            None => {
                if seq.seal_at <= seq.computed.min(seq.tokens.len() as u32) {
                    self.seal(chunk.seq, self.counters.steps - 1);
                }
                if forks {
                    self.release_forks(chunk.seq);
                }
            }
            Some(reason) => {
                if reason == FinishReason::Error {
                    self.pool.forget(&seq.table, 0);
                }
                let ledger = self.remove(chunk.seq, reason);
                outputs.ended.push(ledger);
            }
        }
    }

    /// Names the blocks of a sequence that, once `step` has run, are full of known tokens.
    pub(crate) fn seal(&mut self, id: SeqId, step: u64) {
        let seq = &mut self.seqs[id];
        let size = self.config.block_size;
        let known = seq.computed.min(seq.tokens.len() as u32);
        while seq.seal_at <= known {
            let (from, to) = ((seq.seal_at - size) as usize, seq.seal_at as usize);
            let block = seq.chain.len();
            if seq.names.len() == block {
                self.pool.name_block(&seq.salt, &seq.tokens[from..to], &mut seq.names);
            }
            let name = seq.names[block];
            self.pool.seal(&seq.table, &mut seq.chain, name, &seq.tokens[from..to], step);
            self.awaited.ready(name);
            seq.seal_at += size;
        }
    }

    /// Ends a request by its caller's word.
    pub(crate) fn end(&mut self, id: SeqId, reason: FinishReason, now: Time) -> bool {
        if !self.seqs.contains_key(id) {
            return false;
        }
        self.clocks.tick(now);
        self.leave_early(id, reason);
        true
    }

    /// Ends a request between steps. Its blocks lose the names that rest on
    /// steps not yet committed: should those fail, nobody would take them back.
    fn leave_early(&mut self, id: SeqId, reason: FinishReason) -> Ledger {
        self.pool.forget(&self.seqs[id].table, self.committed);
        self.remove(id, reason)
    }

    /// Frees all that a sequence holds, forgets it, and closes its account.
    fn remove(&mut self, id: SeqId, reason: FinishReason) -> Ledger {
        self.release_forks(id);
        let seq = &self.seqs[id];
        let ledger = self.ledger(seq, Some(reason));
        if seq.row == NO_ROW {
            if seq.account.state() == State::Sibling {
                self.parked -= 1;
            } else {
                self.dequeue(id);
            }
        } else {
            self.unseat(id);
        }
        let mut seq = self.seqs.remove(id).expect("the caller looked");
        self.pool.release(&mut seq.table);
        self.host.release(&mut seq.host);
        if let Some(at) = seq.look_at {
            self.deadlines.remove(&(at, seq.ticket));
        }
        self.tenants.usage(seq.tenant).book(&ledger);
        self.classes.usage(seq.class).book(&ledger);
        self.tenants.leave(seq.tenant);
        self.classes.leave(seq.class);
        if matches!(reason, FinishReason::Stop | FinishReason::Length) {
            let gain = if self.mean_output == 0.0 { 1.0 } else { 0.05 };
            self.mean_output += gain * (f64::from(ledger.output_tokens) - self.mean_output);
        }
        if self.finished.len() == EXPLAINED {
            self.finished.pop_front();
        }
        self.finished.push_back(ledger.clone());
        ledger
    }

    /// The sequences that have a row, in the order of their admission.
    pub(crate) fn seated(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter_map(|&id| self.seqs.get(id)).filter(|seq| seq.row != NO_ROW)
    }

    /// A sequence's account up to now.
    pub(crate) fn ledger(&self, seq: &Sequence, finish: Option<FinishReason>) -> Ledger {
        let (causes, block_us) = seq.account.read(&self.clocks, seq.group, self.others());
        Ledger {
            tag: seq.tag,
            finish,
            arrived: seq.arrived - seq.account.prepared(),
            submitted: seq.arrived,
            started: seq.started,
            first_token: seq.first_token,
            ended: self.clocks.now(),
            causes,
            prompt_tokens: seq.prompt_len,
            cached_tokens: seq.cached_tokens,
            output_tokens: seq.output_tokens(),
            computed_tokens: seq.account.computed_tokens + u64::from(seq.computed - seq.computed_from),
            recomputed_tokens: seq.account.recomputed_tokens,
            preemptions: seq.preemptions,
            swaps: seq.account.swaps,
            preempted_by: seq.account.preempted_by.clone(),
            preempted_for: seq.account.preempted_for,
            block_us,
            tenant: Arc::clone(self.tenants.name(seq.tenant)),
            priority: seq.priority,
        }
    }
}

/// Takes in a sampled token, negative for none; says whether the request ends with it.
#[inline]
fn deliver(seq: &mut Sequence, token: i32, outputs: &mut Outputs) -> Option<FinishReason> {
    let finish = if token >= 0 { seq.push(token as Token) } else { Some(FinishReason::Error) };
    outputs.tokens.push(Output { tag: seq.tag, token: token as Token, finish });
    finish
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for seq in self.seqs.values_mut() {
            self.pool.release(&mut seq.table);
        }
    }
}
