//! One request in flight: its tokens, and how many of them the model has seen.

mod chunks;

use crate::error::Rejected;
use crate::group::Member;
use crate::kv::SeqBlocks;
use crate::phase::{Phase, Stage};
use crate::place::Place;
use crate::request::{ArrivalNumber, FinishReason, Request, SeqId, Time, Token};
use crate::timeline::{Account, Clocks, TimelineState};
use std::sync::Arc;

/// Preemptions after which a request is protected: none of its policy takes its slot, and it is the last to lose its blocks.
const PROTECTED_AFTER: u32 = 2;
/// Preemptions of one request, at most.
pub(crate) const MAX_PREEMPTIONS: u32 = 8;

/// A request and its progress. There is no prefill or decode mode: the tokens
/// computed against the length say what a step has to do.
///
/// In the order of use: what a decode step touches lies in the first two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Sequence {
    phase: Phase,
    progress: Progress,
    tokens: Vec<Token>,
    spec: Spec,
    pub(crate) blocks: SeqBlocks,
    member: Member,
    /// A guess at the tokens after the last one.
    draft: Vec<Token>,
    run: Run,
    times: Times,
    pub(crate) place: Place,
    family: Family,
    /// Apart, since it is large, and looked at only when something changes.
    pub(crate) account: Box<Account>,
}

/// How far a sequence is.
#[derive(Debug)]
struct Progress {
    /// Leading tokens whose KV is, or by a planned step will be, in its blocks.
    computed: u32,
    /// While `computed` is below, the next token is the last of all, and neither needs a block nor completes one.
    fast_path_limit: u32,
    /// On the fast path: where the cache keeps the next token.
    next_kv_slot: u32,
    /// Tokens that planned steps will sample: known to be coming, not what they are.
    pending: u32,
    /// Longest it can get, prompt and output.
    limit: u32,
    preemptions: u32,
    /// Whether its draft is part of a planned step: the length is unknown until the commit.
    drafting: bool,
}

/// What was asked for: it never changes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Spec {
    pub(crate) tag: u64,
    /// The first of its stop tokens: most have one at most.
    stop: Option<Token>,
    more_stops: Box<[Token]>,
    pub(crate) prompt_len: u32,
    pub(crate) priority: i32,
    pub(crate) weight: u32,
    pub(crate) predicted: Option<u32>,
    pub(crate) arrival_number: ArrivalNumber,
    pub(crate) deadline: Option<Time>,
    pub(crate) ttft_deadline: Option<Time>,
}

/// A sequence's time in the batch since it was admitted last.
#[derive(Debug, Default)]
struct Run {
    /// Prompt tokens that the cache had when it was first admitted.
    cached_tokens: u32,
    /// Tokens that were computed when it was admitted last.
    computed_from: u32,
    /// Tokens whose KV it lost, and must compute again.
    recompute_tokens: u32,
    /// Tokens that it had to compute when it was queued, as far as the cache was looked at.
    uncached: u32,
}

/// When what happened.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) arrived: Time,
    pub(crate) started: Option<Time>,
    pub(crate) first_token: Option<Time>,
    /// When its deadlines are checked next.
    pub(crate) check_at: Option<Time>,
}

/// The other answers to the same prompt.
#[derive(Debug, Default)]
struct Family {
    parent: Option<SeqId>,
    /// Forks that wait for its prompt to be computed.
    waiting: Vec<SeqId>,
}

impl Sequence {
    /// Checks a request on its own; what the pool can hold is the scheduler's business.
    pub(crate) fn new(request: Request, arrival_number: ArrivalNumber, max_model_len: u32, now: Time) -> Result<Self, Rejected> {
        let (prompt, new) = (request.prompt.len() as u64, u64::from(request.max_new_tokens));
        if prompt == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        if new == 0 {
            return Err(Rejected::NoNewTokens);
        }
        if prompt + new > u64::from(max_model_len) {
            return Err(Rejected::TooLong { prompt, new, limit: max_model_len.into() });
        }
        let limit = (prompt + new) as u32;
        Ok(Self {
            phase: Phase::New,
            progress: Progress { computed: 0, fast_path_limit: 0, next_kv_slot: 0, pending: 0, limit, preemptions: 0, drafting: false },
            tokens: request.prompt,
            spec: Spec {
                tag: request.tag,
                stop: request.stop.first().copied(),
                more_stops: request.stop.get(1..).unwrap_or_default().into(),
                prompt_len: prompt as u32,
                priority: request.priority,
                weight: request.weight.max(1),
                predicted: request.predicted_tokens,
                arrival_number,
                deadline: request.deadline,
                ttft_deadline: request.ttft_deadline,
            },
            blocks: SeqBlocks::new(request.salt),
            member: Member::default(),
            draft: Vec::new(),
            run: Run { uncached: prompt as u32, ..Run::default() },
            times: Times { arrived: now, started: None, first_token: None, check_at: None },
            place: Place::default(),
            family: Family::default(),
            account: Box::new(Account::open(now)),
        })
    }

    /// The request of another answer to the same prompt.
    pub(crate) fn fork_request(&self, tag: u64, tenant: Arc<str>) -> Request {
        Request {
            tag,
            prompt: self.tokens[..self.spec.prompt_len as usize].to_vec(),
            max_new_tokens: self.progress.limit - self.spec.prompt_len,
            stop: self.spec.stop.into_iter().chain(self.spec.more_stops.iter().copied()).collect(),
            salt: Arc::clone(self.blocks.salt()),
            priority: self.spec.priority,
            tenant,
            weight: self.spec.weight,
            deadline: self.spec.deadline,
            ttft_deadline: self.spec.ttft_deadline,
            predicted_tokens: self.spec.predicted,
        }
    }

    /// Makes it a fork of `parent`. It waits for the parent's prompt, if that is not computed.
    pub(crate) fn make_fork(&mut self, parent: SeqId, waits: bool) {
        self.family.parent = Some(parent);
        self.phase = if waits { Phase::WaitingOnParent } else { Phase::New };
    }

    /// Has it belong to these groups.
    pub(crate) fn join(&mut self, member: Member) {
        self.member = member;
    }

    /// Books the time in the present phase, and begins another. `others` is what the timeline calls a wait for other groups.
    pub(crate) fn enter(&mut self, phase: Phase, clocks: &Clocks, others: TimelineState) {
        self.account.enter(self.phase.state(), phase.state(), clocks, self.member.group, others);
        self.phase = phase;
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Its slot of the batch, if it runs.
    #[inline]
    pub(crate) fn slot(&self) -> Option<u32> {
        if let Phase::Running { slot, .. } = self.phase { Some(slot) } else { None }
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Whether it has generated a token since it was admitted last.
    #[inline]
    pub(crate) fn is_decoding(&self) -> bool {
        matches!(self.phase, Phase::Running { stage: Stage::Decode, .. })
    }

    /// Whether the last step had no tokens for it.
    pub(crate) fn is_stalled(&self) -> bool {
        matches!(self.phase, Phase::Running { stage: Stage::Stalled, .. })
    }

    /// What it does in the batch until it decodes.
    pub(crate) fn prefill_stage(&self) -> Stage {
        if self.run.recompute_tokens > 0 { Stage::Recompute } else { Stage::Prefill }
    }

    /// What it begins with when it is admitted: one whose KV comes back from the host may go on decoding.
    pub(crate) fn first_stage(&self) -> Stage {
        match self.phase {
            Phase::Swapped { tokens } if self.times.first_token.is_some() && tokens as usize + 1 == self.tokens.len() => Stage::Decode,
            _ => self.prefill_stage(),
        }
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    pub(crate) fn member(&self) -> Member {
        self.member
    }

    pub(crate) fn times(&self) -> &Times {
        &self.times
    }

    /// When its deadlines are to be checked next, if it has any.
    pub(crate) fn check_at(&mut self, at: Option<Time>) {
        self.times.check_at = at;
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// What it has of the cache, to be changed by what its tokens are.
    #[inline]
    pub(crate) fn blocks_and_tokens(&mut self) -> (&mut SeqBlocks, &[Token]) {
        (&mut self.blocks, &self.tokens)
    }

    /// Changes the tokens: a replay makes some up.
    pub(crate) fn tokens_mut(&mut self) -> &mut [Token] {
        &mut self.tokens
    }

    /// Tokens known, prompt and output.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn limit(&self) -> u32 {
        self.progress.limit
    }

    #[inline]
    pub(crate) fn computed(&self) -> u32 {
        self.progress.computed
    }

    /// Tokens that are known, and computed by planned steps.
    #[inline]
    pub(crate) fn known(&self) -> u32 {
        self.progress.computed.min(self.len())
    }

    /// Tokens that planned steps will sample.
    #[inline]
    pub(crate) fn pending(&self) -> u32 {
        self.progress.pending
    }

    #[inline]
    pub(crate) fn preemptions(&self) -> u32 {
        self.progress.preemptions
    }

    #[inline]
    pub(crate) fn is_drafting(&self) -> bool {
        self.progress.drafting
    }

    pub(crate) fn draft(&self) -> &[Token] {
        &self.draft
    }

    /// Whether the next token is the last one it may compute, or its length is open until a commit.
    #[inline]
    pub(crate) fn has_nothing_to_plan(&self) -> bool {
        self.expected_len() == self.progress.limit || self.progress.drafting
    }

    /// Its length once every planned step has sampled.
    #[inline]
    pub(crate) fn expected_len(&self) -> u32 {
        self.len() + self.progress.pending
    }

    /// Tokens that it can compute before another is sampled.
    pub(crate) fn uncomputed(&self) -> u32 {
        self.expected_len() - self.progress.computed
    }

    /// Whether it was preempted so often that only a lack of blocks can preempt it again.
    pub(crate) fn is_protected(&self) -> bool {
        self.progress.preemptions >= PROTECTED_AFTER
    }

    /// Whether it must not be preempted again: it runs only as the one that nobody preempts.
    pub(crate) fn is_last_chance(&self) -> bool {
        self.progress.preemptions >= MAX_PREEMPTIONS
    }

    /// Whether it has run before.
    pub(crate) fn has_started(&self) -> bool {
        self.times.started.is_some()
    }

    /// Whether it counts against the queue's limits while it waits: forks, and those that ran, do not.
    pub(crate) fn counts_as_queued(&self) -> bool {
        self.times.started.is_none() && self.family.parent.is_none()
    }

    pub(crate) fn parent(&self) -> Option<SeqId> {
        self.family.parent
    }

    /// Forks that wait for its prompt.
    pub(crate) fn waiting_forks(&self) -> &[SeqId] {
        &self.family.waiting
    }

    pub(crate) fn add_waiting_fork(&mut self, id: SeqId) {
        self.family.waiting.push(id);
    }

    pub(crate) fn take_waiting_forks(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.family.waiting)
    }

    /// Tokens that it has generated.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.len() - self.spec.prompt_len
    }

    /// Tokens that it is thought to generate still.
    pub(crate) fn predicted_left(&self) -> u32 {
        let longest = self.progress.limit - self.spec.prompt_len;
        self.spec.predicted.unwrap_or(longest).min(longest).saturating_sub(self.output_tokens()).max(1)
    }

    pub(crate) fn cached_tokens(&self) -> u32 {
        self.run.cached_tokens
    }

    /// Tokens that were computed when it was admitted last.
    pub(crate) fn computed_from(&self) -> u32 {
        self.run.computed_from
    }

    /// Tokens computed for it so far, those computed again included.
    pub(crate) fn computed_in_all(&self) -> u64 {
        self.account.computed_tokens() + u64::from(self.progress.computed - self.run.computed_from)
    }

    /// Whether it computes again what it had lost.
    pub(crate) fn is_recomputing(&self) -> bool {
        self.run.recompute_tokens > 0 && !self.is_decoding()
    }

    /// Tokens that the cache lacked when it was looked at last.
    pub(crate) fn uncached(&self) -> u32 {
        self.run.uncached
    }

    /// Takes from its chain of cached blocks how many tokens it has to compute.
    pub(crate) fn measure_uncached(&mut self, block_size: u32) {
        let cached = self.blocks.cached_len() * block_size as usize;
        self.run.uncached = (self.tokens.len() - cached).max(1) as u32;
    }

    /// Makes room for all that it will sample, so that decoding does not allocate.
    pub(crate) fn reserve_tokens(&mut self) {
        self.tokens.reserve_exact(self.progress.limit as usize - self.tokens.len());
    }

    /// Begins a run with so many tokens computed; gives how many of them it computes again.
    pub(crate) fn start(&mut self, computed: u32, now: Time) -> u32 {
        self.place.admit();
        self.progress.computed = computed;
        self.run.computed_from = computed;
        if self.times.started.is_none() {
            self.times.started = Some(now);
            self.run.cached_tokens = computed;
            return 0;
        }
        let again = self.run.recompute_tokens.saturating_sub(computed);
        self.account.recompute(again);
        again
    }

    /// Ends a run: what it had computed is gone, but for a copy in host memory.
    pub(crate) fn preempt(&mut self, swapped: bool) {
        let Run { computed_from, recompute_tokens, .. } = self.run;
        self.account.compute(self.progress.computed - computed_from);
        self.run.recompute_tokens = if swapped { 0 } else { recompute_tokens.max(self.progress.computed) };
        (self.progress.computed, self.run.computed_from) = (0, 0);
        self.progress.preemptions += 1;
        self.draft.clear();
    }

    /// Notes when it generated its first token.
    pub(crate) fn note_first_token(&mut self, now: Time) {
        self.times.first_token.get_or_insert(now);
    }

    /// Appends a sampled token, and says whether that ends the request.
    #[inline]
    pub(crate) fn push(&mut self, token: Token) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.spec.stop == Some(token) || (!self.spec.more_stops.is_empty() && self.spec.more_stops.contains(&token)) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u32 == self.progress.limit).then_some(FinishReason::Length)
    }
}
