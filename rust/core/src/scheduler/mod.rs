//! The scheduler: chooses the sequences of the next step and their tokens.
//!
//! Each part of the state has its own file. This file and the files below it only make decisions.

mod add;
mod admit;
mod background;
mod candidate;
mod check;
mod decode;
mod explain;
mod fill;
mod finish;
mod forecast;
mod hold;
mod host;
mod limit;
mod preempt;
mod prefill;
mod prefix_lookup;
mod reads;
mod reorder;
mod shared_service;
mod snapshot;
mod states;
mod stats;
mod stored;
mod turns;

use self::reads::Reads;
use crate::batch::{Outputs, Running};
use crate::config::Config;
use crate::error::ConfigError;
use crate::ledger::{Accounts, Timeline, Usage};
use crate::memory::{BlockHash, BlockHasher, Kv, KvSizes};
use crate::policy::{CacheUse, Rules};
use crate::queue::{Deadlines, Waiting};
use crate::request::{FinishReason, SeqId, Time, Token};
use crate::sequence::{Held, Phase, Sequence};
use crate::sessions::Sessions;
use crate::step::{StepPlan, Steps};
use crate::step_time::{BackgroundCost, StepModel};
use slotmap::SlotMap;
use std::sync::Arc;

/// Plans each step. The caller calls [`plan`](Self::plan), runs the step and calls [`commit`](Self::commit).
///
/// The caller may plan a step while the previous step is still running, because lengths are known ahead of the tokens.
/// Steps must run in the order of their plans, each after its block copies. A block freed by one call may be written by
/// the next plan's step, and not by an earlier step.
///
/// ```
/// use chairlift_core::{Config, FinishReason, Outputs, Request, Scheduler};
///
/// let mut scheduler = Scheduler::new(Config::default())?;
/// scheduler.add(Request { tag: 1, prompt: vec![5, 6, 7], max_new_tokens: 2, ..Request::default() }, 0)?;
/// let (mut now, mut outputs) = (0, Outputs::default());
/// // The first step computes the prompt, the second one the first token.
/// for tokens in [3, 1] {
///     let plan = scheduler.plan(now).expect("the request can run");
///     assert_eq!(plan.chunks[0].len, tokens);
///     now += 20_000; // the caller runs the model, and samples token 9
///     scheduler.commit(plan, &[9], now, &mut outputs);
/// }
/// assert_eq!(outputs.tokens[0].finish, Some(FinishReason::Length));
/// assert_eq!(outputs.ended[0].output_tokens, 2);
/// assert!(scheduler.plan(now).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    rules: Rules,
    seqs: SlotMap<SeqId, Sequence>,
    waiting: Waiting,
    running: Running,
    held: Held,
    sessions: Sessions,
    kv: Kv,
    accounts: Accounts,
    deadlines: Deadlines,
    model: StepModel,
    background: BackgroundCost,
    steps: Steps,
    reads: Reads,
    /// Whether plans admit no waiting requests while others run: see [`close_queue`](Self::close_queue).
    closed: bool,
    /// Sequences that ended by themselves, with their tokens, if they are wanted.
    finished: Option<Vec<(SeqId, Vec<Token>)>>,
}

impl Scheduler {
    /// Creates a scheduler without requests. The key of block names is public, so a client can choose tokens whose names
    /// collide. Use [`keyed`](Self::keyed) where clients choose tokens.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Self::keyed(config, 0)
    }

    /// Like [`new`](Self::new), with a secret `key` for block names. Decisions do not depend on the key.
    pub fn keyed(config: Config, key: u128) -> Result<Self, ConfigError> {
        config.check()?;
        let rules = config.scheduling_policy.rules();
        let hasher = BlockHasher::new(key);
        let Config { num_kv_blocks: blocks, host_blocks, state_slots, state_tokens, block_size, .. } = config;
        let sizes = KvSizes { blocks, host_blocks, state_slots, state_tokens, block_size };
        Ok(Self {
            rules,
            seqs: SlotMap::with_key(),
            waiting: Waiting::new(rules),
            running: Running::new(config.max_num_seqs),
            held: Held::default(),
            sessions: Sessions::new(rules.takes_turns()),
            kv: Kv::new(sizes, config.enable_prefix_caching, hasher),
            accounts: Accounts::new(config.max_num_seqs, rules),
            deadlines: Deadlines::default(),
            model: StepModel::of_experts(config.experts),
            background: BackgroundCost::default(),
            steps: Steps::default(),
            reads: Reads::default(),
            closed: false,
            finished: None,
            config,
        })
    }

    /// The scheduler's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the policy decides.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The step-time model learned so far.
    pub fn model(&self) -> &StepModel {
        &self.model
    }

    /// Ends every request that missed its deadline, and every request that the policy drops before: see
    /// [`Policy::drop_at`](crate::Policy::drop_at). Appends their timelines to `ended`. Call it before each plan.
    pub fn expire(&mut self, now: Time, ended: &mut Vec<Timeline>) {
        if !self.has_due(now) {
            return;
        }
        self.accounts.tick(now);
        self.accounts.divide_energy(&mut self.seqs);
        while let Some(id) = self.deadlines.next_due(now) {
            let due = self.due(&self.seqs[id]);
            let missed = due.is_some_and(|due| due <= now);
            self.deadlines.watch(id, &mut self.seqs[id], due.filter(|_| !missed));
            if missed {
                self.accounts.counters.expired += 1;
                ended.push(self.leave_early(id, FinishReason::Deadline));
            }
        }
    }

    /// Drafts the tokens after a sequence's last token. The next step verifies them, and the commit keeps those that
    /// the model would have sampled. Returns false and does nothing unless the sequence is decoding with no step in
    /// flight.
    pub fn draft(&mut self, id: SeqId, tokens: &[Token]) -> bool {
        self.seqs.get_mut(id).is_some_and(|seq| seq.propose(tokens))
    }

    /// Sequences that accept a [`draft`](Self::draft), with their tokens and the maximum number of drafted tokens.
    pub fn decoding(&self) -> impl Iterator<Item = (SeqId, &[Token], usize)> {
        let running = self.running.iter().filter_map(|id| Some((id, self.seqs.get(id)?)));
        running.filter_map(|(id, seq)| Some((id, seq.tokens(), seq.draft_room()?)))
    }

    /// Plans the next step. Returns `None` if nothing can run before a commit, an added request or [`wake_at`](Self::wake_at).
    ///
    /// Decodes come first, so that no decode waits for a prompt (Sarathi-Serve, OSDI'24). Prompts in progress and the
    /// queue follow in the order of the policy, as long as tokens, slots and blocks allow. A step that preempted
    /// sequences admits only the requests they were preempted for.
    pub fn plan(&mut self, now: Time) -> Option<Box<StepPlan>> {
        self.accounts.tick(now);
        self.steps.begin();
        let keeps = self.keeps_on_host();
        self.kv.begin_plan(self.steps.planned(), keeps, self.steps.owes_reads());
        let backlog = self.waiting.foreground() > self.waiting.new_len();
        self.queue_new();
        self.take_turns();
        self.running.begin_plan();
        if self.rules.cache == CacheUse::Followed {
            self.reorder_ready();
        }
        let mut plan = self.steps.plan(self.accounts.now());
        let room = self.make_room(&mut plan);
        plan.tokens_left = self.config.max_num_batched_tokens;
        self.plan_decodes(&mut plan, room.spare);
        self.bound_prefill(&mut plan, backlog);
        self.plan_prefills(&mut plan, room.reserved);
        self.accounts.run_step(plan.chunks.len(), plan.load.prefill_tokens > 0);
        self.accounts.counters.swapped_blocks += self.kv.end_plan(&mut plan.swap_out) as u64;
        if plan.chunks.is_empty() {
            let stall = self.stall();
            self.note_backlog(stall);
            self.steps.abandon(plan, stall);
            return None;
        }
        self.plan_states(&mut plan);
        self.note_step(&plan);
        self.note_backlog(None);
        self.steps.launch(plan.load);
        Some(plan)
    }

    /// After [`plan`](Self::plan) returned `None`, the time at which it may return a step without another call: a batch
    /// timeout, a deadline or a session's turn.
    pub fn wake_at(&self) -> Option<Time> {
        self.waiting.batch_opens_at().into_iter().chain(self.deadlines.next_at()).chain(self.next_turn_at()).min()
    }

    /// Takes in the sampled tokens of the oldest uncommitted plan.
    ///
    /// `sampled` has one token per sampled position in the order of `sample_at`. [`NO_TOKEN`](crate::NO_TOKEN) ends the
    /// request with [`FinishReason::Stop`]. Another negative token means that the model gave none, and the request ends
    /// with [`FinishReason::Error`]. Chunks of sequences that have ended since planning
    /// are skipped. `outputs` is overwritten.
    ///
    /// Panics if plans are committed out of order or `sampled` is too short.
    pub fn commit(&mut self, plan: Box<StepPlan>, sampled: &[i32], now: Time, outputs: &mut Outputs) {
        self.accounts.tick(now);
        let ran = self.steps.commit(&plan, self.accounts.now());
        self.accounts.divide_step(&plan, ran.took, &self.model, &mut self.seqs);
        self.accounts.divide_energy(&mut self.seqs);
        self.background.observe(&plan.foreground, &plan.load, &self.model, ran.took, self.accounts.now());
        let predicted = self.model.observe(&plan.load, ran.took);
        self.note_use(&plan.load, ran.from, predicted);
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
        let errors = outputs.ended.iter().filter(|ended| ended.finish == Some(FinishReason::Error)).count();
        let none = outputs.ended.iter().filter(|ended| ended.finish != Some(FinishReason::Error) && ended.output_tokens == 0).count();
        self.accounts.count_outputs((outputs.tokens.len() - errors) as u64, none as u64);
        if !self.steps.in_flight() {
            self.accounts.run_step(0, false);
        }
        self.steps.end(plan, !self.seqs.is_empty());
    }

    /// Records the energy that a meter measured since the last call, in microjoules. The first call begins the metering. The next call that ends a step or a
    /// sequence divides it among the sequences whose steps ran since the last such call, by the time of their parts of these
    /// steps. Energy of the time between steps is idle. Before a sequence ends, read the meter: its later energy is idle.
    pub fn read_meter(&mut self, energy: u64, now: Time) {
        self.accounts.read_meter(energy, now, &mut self.seqs);
    }

    /// Whether a sequence may end in the commit of these tokens.
    pub fn may_end(&self, plan: &StepPlan, sampled: &[i32]) -> bool {
        let mut at = 0;
        plan.chunks.iter().filter(|chunk| chunk.samples).any(|chunk| {
            let sampled = &sampled[at..at + 1 + chunk.drafted as usize];
            at += sampled.len();
            self.seqs.get(chunk.seq).is_some_and(|seq| seq.may_end(sampled))
        })
    }

    /// A sequence's tokens so far, and its prompt length.
    pub fn tokens(&self, id: SeqId) -> Option<(&[Token], usize)> {
        self.seqs.get(id).map(|seq| (seq.tokens(), seq.spec().prompt_len as usize))
    }

    /// Whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Usage of each tenant. Tenants that were idle for long are left out.
    pub fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, &Usage)> {
        self.accounts.tenants()
    }

    /// Usage of each class. Classes that were idle for long are left out.
    pub fn classes(&self) -> impl Iterator<Item = (&i32, &Usage)> {
        self.accounts.classes()
    }

    /// Returns a live sequence.
    pub(crate) fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(id)
    }

    /// The tokens of a sequence, writable for a replay that generates tokens.
    pub(crate) fn tokens_mut(&mut self, id: SeqId) -> Option<&mut [Token]> {
        self.seqs.get_mut(id).map(Sequence::tokens_mut)
    }

    /// Requests that have arrived, forks included.
    pub(crate) fn arrived(&self) -> u64 {
        self.waiting.next_arrival()
    }

    /// Keeps the tokens of sequences that stop or reach their length from now on, for [`take_finished`](Self::take_finished).
    pub(crate) fn keep_finished(&mut self) {
        self.finished.get_or_insert_default();
    }

    /// The sequences that finished since the last call, with their tokens.
    pub(crate) fn take_finished(&mut self) -> Vec<(SeqId, Vec<Token>)> {
        self.finished.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The tenant and the cache salt of a sequence.
    pub(crate) fn owner(&self, id: SeqId) -> Option<(Arc<str>, Arc<[u8]>)> {
        let seq = self.seqs.get(id)?;
        Some((self.tenant(seq).clone(), Arc::clone(&seq.blocks.scope().salt)))
    }

    /// The tenant of a sequence.
    fn tenant(&self, seq: &Sequence) -> &Arc<str> {
        self.accounts.tenant_name(seq.member().tenant)
    }

    /// The names of a sequence's full blocks after the first `from`.
    pub(crate) fn block_names<'a>(&'a self, seq: &'a Sequence, from: usize) -> impl Iterator<Item = BlockHash> + 'a {
        self.kv.names(&seq.blocks, seq.tokens(), from)
    }

    /// Whether a deadline check is due, so that [`expire`](Self::expire) has work.
    pub(crate) fn has_due(&self, now: Time) -> bool {
        self.deadlines.next_at().is_some_and(|at| at <= now)
    }

    /// Closes a sequence's current phase in its timeline and begins `phase`.
    fn enter(&mut self, id: SeqId, phase: Phase) {
        self.seqs[id].enter(phase, &self.accounts);
    }

    /// The sequences with a slot, in the order of admission.
    fn running_seqs(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter_map(|id| self.seqs.get(id)).filter(|seq| seq.is_running())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for seq in self.seqs.values_mut() {
            self.kv.free_all(&mut seq.blocks);
        }
        self.held.free_all(&mut self.kv);
    }
}
