//! The order of work: who runs in the next step, and with how many tokens.
//!
//! The state has owners, each in a file of its own: what is here, and in the
//! files below, only decides who does what next.

mod add;
mod admit;
mod check;
mod decode;
mod estimate;
mod explain;
mod fill;
mod finish;
mod preempt;
mod prefill;
mod reorder;
mod snapshot;
mod stats;

use crate::accounts::Accounts;
use crate::batch::{Outputs, StepPlan};
use crate::config::Config;
use crate::cost::StepModel;
use crate::deadlines::Deadlines;
use crate::error::ConfigError;
use crate::group::Usage;
use crate::hash::{BlockHash, BlockHasher};
use crate::kv::Kv;
use crate::phase::Phase;
use crate::request::{FinishReason, SeqId, Time, Token};
use crate::running::Running;
use crate::sequence::Sequence;
use crate::steps::Steps;
use crate::timeline::Timeline;
use crate::waiting::Waiting;
use slotmap::SlotMap;
use std::sync::Arc;

/// Decides each step: [`plan`](Self::plan), run, [`commit`](Self::commit).
///
/// A plan may be made while the step before is still running: lengths are
/// known ahead, only tokens are not. Steps must run in the order of their
/// plans, each after its block copies; a block freed by one call may be
/// written by the next plan's step, and by no earlier one.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    seqs: SlotMap<SeqId, Sequence>,
    waiting: Waiting,
    running: Running,
    kv: Kv,
    accounts: Accounts,
    deadlines: Deadlines,
    model: StepModel,
    steps: Steps,
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
        let hasher = BlockHasher::new(key);
        Ok(Self {
            seqs: SlotMap::with_key(),
            waiting: Waiting::new(&config),
            running: Running::new(config.max_seqs),
            kv: Kv::new(config.num_blocks, config.host_blocks, config.block_size, config.prefix_caching, hasher),
            accounts: Accounts::new(&config),
            deadlines: Deadlines::default(),
            model: StepModel::default(),
            steps: Steps::default(),
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
    /// timelines to `ended`. To be called before each plan.
    pub fn expire(&mut self, now: Time, ended: &mut Vec<Timeline>) {
        if !self.has_due(now) {
            return;
        }
        self.accounts.tick(now);
        while let Some(id) = self.deadlines.next_due(now) {
            let due = self.due(&self.seqs[id]);
            let missed = due.is_some_and(|due| due <= now);
            self.deadlines.watch(id, &mut self.seqs[id], due.filter(|_| !missed));
            if missed {
                self.accounts.count_expired();
                ended.push(self.leave_early(id, FinishReason::Deadline));
            }
        }
    }

    /// Proposes the tokens after a sequence's last one, to be checked in its
    /// next step: commit keeps those that the model would have sampled itself.
    /// False, and nothing happens, unless the sequence is decoding with no
    /// step in flight.
    pub fn draft(&mut self, id: SeqId, tokens: &[Token]) -> bool {
        self.seqs.get_mut(id).is_some_and(|seq| seq.propose(tokens))
    }

    /// The sequences that [`draft`](Self::draft) takes, with their tokens and how many of them it takes.
    pub fn decoding(&self) -> impl Iterator<Item = (SeqId, &[Token], usize)> {
        let running = self.running.iter().filter_map(|id| Some((id, self.seqs.get(id)?)));
        running.filter_map(|(id, seq)| Some((id, seq.tokens(), seq.draft_room()?)))
    }

    /// Chooses the next step, or `None` when nothing can run before a commit,
    /// an addition, or [`wake_at`](Self::wake_at).
    ///
    /// Decodes come first, so that none waits for a prompt (Sarathi-Serve,
    /// OSDI'24); then prompts begun and the queue in the order of the policy,
    /// as long as tokens, slots and blocks allow. In a step that preempted only
    /// those are admitted for whom that was done.
    pub fn plan(&mut self, now: Time) -> Option<StepPlan> {
        self.accounts.tick(now);
        self.steps.begin();
        let backlog = self.waiting.len() > self.waiting.new_len();
        self.queue_new();
        self.running.begin_plan(self.accounts.now());
        self.reorder_ready();
        let mut plan = self.steps.plan(self.accounts.now());
        let room = self.make_room(&mut plan);
        let mut budget = self.config.max_tokens;
        self.plan_decodes(&mut plan, &mut budget, room.spare);
        self.bound_prefill(&plan, &mut budget, backlog);
        self.plan_prefills(&mut plan, &mut budget, room.reserved);
        self.accounts.run_step(plan.chunks.len(), plan.load.prefill_tokens > 0);
        if plan.chunks.is_empty() {
            let stall = self.stall();
            self.note_backlog(stall);
            self.steps.abandon(plan, stall);
            return None;
        }
        self.note_step(&plan);
        self.note_backlog(None);
        self.steps.launch(self.model.step(&plan.load) as u64);
        Some(plan)
    }

    /// When [`plan`](Self::plan), having given nothing, may give something
    /// with no other call before: a batch's timeout or somebody's deadline.
    pub fn wake_at(&self) -> Option<Time> {
        self.waiting.batch_opens_at().into_iter().chain(self.deadlines.next_at()).min()
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
        self.accounts.tick(now);
        let ran = self.steps.commit(&plan, self.accounts.now());
        self.model.observe(&plan.load, ran.took);
        self.note_use(&plan.load, ran.from);
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
        if !self.steps.in_flight() {
            self.accounts.run_step(0, false);
        }
        self.steps.end(plan, !self.seqs.is_empty());
    }

    /// A sequence's tokens so far, and how many of them are its prompt.
    pub fn tokens(&self, id: SeqId) -> Option<(&[Token], usize)> {
        self.seqs.get(id).map(|seq| (seq.tokens(), seq.spec().prompt_len as usize))
    }

    /// Whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// What each tenant used, those that were not seen for long left out.
    pub fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, &Usage)> {
        self.accounts.tenants()
    }

    /// What each class used, likewise.
    pub fn classes(&self) -> impl Iterator<Item = (&i32, &Usage)> {
        self.accounts.classes()
    }

    /// A sequence that has not ended.
    pub(crate) fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(id)
    }

    /// The tokens of one, for a replay that makes some up.
    pub(crate) fn tokens_mut(&mut self, id: SeqId) -> Option<&mut [Token]> {
        self.seqs.get_mut(id).map(Sequence::tokens_mut)
    }

    /// Requests that have arrived, forks included.
    pub(crate) fn arrived(&self) -> u64 {
        self.waiting.next_arrival()
    }

    /// The tenant of a sequence.
    pub(crate) fn tenant(&self, seq: &Sequence) -> &Arc<str> {
        self.accounts.tenant(seq.member())
    }

    /// The names of a sequence's full blocks.
    pub(crate) fn block_names<'a>(&'a self, seq: &'a Sequence) -> impl Iterator<Item = BlockHash> + 'a {
        self.kv.names(&seq.blocks, seq.tokens())
    }

    /// Computes the names of a sequence's full blocks that have none yet.
    pub(crate) fn name_blocks(&mut self, id: SeqId) {
        if let Some(seq) = self.seqs.get_mut(id) {
            let (blocks, tokens) = seq.blocks_and_tokens();
            self.kv.name(blocks, tokens);
        }
    }

    /// Whether a deadline has come, so that [`expire`](Self::expire) has something to do.
    pub(crate) fn has_due(&self, now: Time) -> bool {
        self.deadlines.next_at().is_some_and(|at| at <= now)
    }

    /// Books a sequence's time so far, and begins another phase.
    fn enter(&mut self, id: SeqId, phase: Phase) {
        self.accounts.enter(&mut self.seqs[id], phase);
    }

    /// The sequences that have a slot, in the order of their admission.
    fn running_seqs(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter_map(|id| self.seqs.get(id)).filter(|seq| seq.is_running())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for seq in self.seqs.values_mut() {
            self.kv.free_all(&mut seq.blocks);
        }
    }
}
