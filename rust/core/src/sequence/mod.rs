//! A live request: its tokens, its progress and its phase; and held sequences, which keep KV between two requests.
//!
//! This room owns one sequence's state: its phase (and for a waiting one, what it lacks), its next chunk, its draft, its
//! entry in the queue and its account. Held sequences are owned together, least recently used first.
//!
//! A sequence may not know other sequences, except as ids, nor the queue, the batch or the scheduler. It holds its blocks,
//! and only the cache changes them.

mod chunks;
mod family;
mod held;
mod phase;
mod queue_entry;
mod run;

pub(crate) use held::{Held, HeldSeq};
pub(crate) use phase::{Need, Phase, Stage};
pub(crate) use queue_entry::AwaitedBlock;

use crate::error::Rejected;
use crate::ledger::{Account, Accounts, LiveAccounts, Member, QueuePosition, Timeline};
use crate::memory::{CacheOwner, SeqBlocks, User};
use crate::policy::Class;
use crate::request::{ArrivalNumber, FinishReason, Preparation, Request, Resumed, SeqId, Tier, Time, Token, served_tier};
use crate::sessions::SessionRef;
use family::Family;
use queue_entry::QueueEntry;
use run::Run;
use slotmap::SlotMap;
use std::sync::Arc;

/// Preemptions after which a request is protected: the policy no longer lets other requests take its slot, and it is
/// the last to lose its blocks.
const PROTECTED_AFTER: u32 = 2;
/// Extra blocks that a protected sequence gets at admission.
const RESERVE: u32 = 8;
/// Maximum preemptions of one request.
pub(crate) const MAX_PREEMPTIONS: u32 = 8;

/// A request and its progress. There is no prefill or decode mode. The computed tokens and the length determine the
/// work of a step.
///
/// Fields are in the order of use: a decode step touches only the first two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Sequence {
    phase: Phase,
    progress: Progress,
    tokens: Vec<Token>,
    spec: Spec,
    pub(crate) blocks: SeqBlocks,
    member: Member,
    /// Drafted tokens after the last token.
    draft: Vec<Token>,
    run: Run,
    times: Times,
    pub(crate) queue_entry: QueueEntry,
    family: Family,
    session: Option<SessionRef>,
    /// Boxed because it is large and read only when the state changes.
    pub(crate) account: Box<Account>,
}

/// A sequence's progress.
#[derive(Debug)]
struct Progress {
    /// Leading tokens with KV in the sequence's blocks, counting planned steps.
    computed: u32,
    /// While `computed` is below this limit, the next token is the last token, needs no new block and completes no block.
    fast_path_limit: u32,
    /// On the fast path: KV slot of the next token.
    next_kv_slot: u32,
    /// Tokens that planned steps will sample. Their number is known, their values are not.
    pending: u32,
    /// Maximum length, prompt and output.
    limit: u32,
    preemptions: u32,
    /// Whether a planned step contains the draft. The length is then unknown until the commit.
    drafting: bool,
}

/// The request's parameters. Only the class can change. Those of a decode step are first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Spec {
    pub(crate) tag: u64,
    /// The first stop token. Most requests have at most one.
    stop: Option<Token>,
    more_stops: Box<[Token]>,
    pub(crate) prompt_len: u32,
    pub(crate) arrival_number: ArrivalNumber,
    /// The other parameters, without the prompt and the stop tokens.
    request: Request,
}

/// Times of a sequence's events.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) arrived: Time,
    pub(crate) started: Option<Time>,
    pub(crate) first_token: Option<Time>,
    /// When the sequence's deadlines are checked next.
    pub(crate) check_at: Option<Time>,
}

impl Sequence {
    /// Checks the request by itself. The scheduler checks whether it fits into the pool.
    pub(crate) fn new(mut request: Request, arrival_number: ArrivalNumber, max_model_len: u32, now: Time) -> Result<Self, Rejected> {
        let answered = request.resumed.map_or(0, |resumed| resumed.answered);
        let Some(prompt) = request.prompt.len().checked_sub(answered as usize).filter(|&prompt| prompt > 0) else {
            return Err(Rejected::EmptyPrompt);
        };
        if request.max_new_tokens <= answered {
            return Err(Rejected::NoNewTokens);
        }
        let (prompt, new) = (prompt as u64, u64::from(request.max_new_tokens));
        if prompt + new > u64::from(max_model_len) {
            return Err(Rejected::TooLong { prompt, new, limit: max_model_len.into() });
        }
        let limit = (prompt + new) as u32;
        let len = request.prompt.len() as u32;
        let stop = std::mem::take(&mut request.stop);
        request.weight = request.weight.max(1);
        request.tier = served_tier(request.tier, request.priority);
        let (run, times, submitted) = match request.resumed {
            None => (Run::default(), Times { arrived: now, started: None, first_token: None, check_at: None }, now),
            Some(Resumed { cached_tokens, own_cached_tokens, submitted, started, first_token, .. }) => (
                Run { cached_tokens, own_cached_tokens, recompute_tokens: len, ..Run::default() },
                Times { arrived: now, started: Some(started), first_token, check_at: None },
                submitted,
            ),
        };
        Ok(Self {
            phase: Phase::New,
            progress: Progress { computed: 0, fast_path_limit: 0, next_kv_slot: 0, pending: 0, limit, preemptions: 0, drafting: false },
            tokens: std::mem::take(&mut request.prompt),
            blocks: SeqBlocks::new(Arc::clone(&request.scope)),
            spec: Spec {
                tag: request.tag,
                stop: stop.first().copied(),
                more_stops: stop.get(1..).unwrap_or_default().into(),
                prompt_len: prompt as u32,
                arrival_number,
                request,
            },
            member: Member::default(),
            draft: Vec::new(),
            run: Run { uncached: len, ..run },
            times,
            queue_entry: QueueEntry::default(),
            family: Family::default(),
            session: None,
            account: Box::new(Account::open(now, submitted)),
        })
    }

    /// Moves the sequence to another class. `member` has its new groups.
    pub(crate) fn change_class(&mut self, priority: i32, member: Member, accounts: &Accounts) {
        let state = self.phase.state();
        accounts.enter(&mut self.account, (state, self.member.group), (state, member.group));
        self.spec.request.priority = priority;
        self.member = member;
    }

    /// Sets the sequence's groups, and the tenant that is told of the blocks that it used before.
    pub(crate) fn join(&mut self, member: Member, user: User) {
        self.member = member;
        self.blocks.set_user(user);
    }

    /// Closes the current phase in the account and begins `phase`.
    pub(crate) fn enter(&mut self, phase: Phase, accounts: &Accounts) {
        let group = self.member.group;
        accounts.enter(&mut self.account, (self.phase.state(), group), (phase.state(), group));
        self.phase = phase;
    }

    /// Records the number of blocks that the sequence holds from now on.
    pub(crate) fn note_blocks(&mut self, accounts: &Accounts) {
        accounts.hold_blocks(&mut self.account, self.blocks.held());
    }

    /// The sequence's timeline up to now.
    pub(crate) fn timeline(&self, finish: Option<FinishReason>, accounts: &Accounts) -> Timeline {
        Timeline {
            tag: self.spec.tag,
            finish,
            arrived: self.times.arrived - self.account.prepared(),
            submitted: self.account.submitted(),
            started: self.times.started,
            first_token: self.times.first_token,
            ended: accounts.now(),
            prompt_tokens: self.spec.prompt_len,
            cached_tokens: self.cached_tokens(),
            own_cached_tokens: self.own_cached_tokens(),
            lost_hit_tokens: self.run.lost_hit_tokens,
            evicted_for: self.run.evicted_for,
            output_tokens: self.output_tokens(),
            computed_tokens: self.computed_in_all(),
            preemptions: self.preemptions(),
            tenant: Arc::clone(accounts.tenant_name(self.member.tenant)),
            session: self.spec.request.session.clone(),
            priority: self.spec.request.priority,
            tier: self.spec.request.tier,
            queue_position: self.queue_position(),
            ..accounts.read(&self.account, (self.phase.state(), self.member.group), self.slot())
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// The sequence's slot, if it runs.
    #[inline]
    pub(crate) fn slot(&self) -> Option<u32> {
        if let Phase::Running { slot, .. } = self.phase { Some(slot) } else { None }
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Whether the sequence waits for its session's turn.
    pub(crate) fn waits_for_session(&self) -> bool {
        matches!(self.phase, Phase::WaitSession { .. })
    }

    /// The preparation that the sequence waits for.
    pub(crate) fn preparation(&self) -> Option<Preparation> {
        if let Phase::Preparing(preparation) = self.phase { Some(preparation) } else { None }
    }

    /// Whether the sequence has generated a token since it was last admitted.
    #[inline]
    pub(crate) fn is_decoding(&self) -> bool {
        matches!(self.phase, Phase::Running { stage: Stage::Decode, .. })
    }

    /// Whether the last step had no tokens for the sequence.
    pub(crate) fn is_stalled(&self) -> bool {
        matches!(self.phase, Phase::Running { stage: Stage::Stalled, .. })
    }

    /// Whether the sequence runs, computes its known tokens and has not reached that block.
    pub(crate) fn computes(&self, block: usize) -> bool {
        self.is_running() && self.computed() < self.len() && self.blocks.cached_len() <= block
    }

    /// The sequence's stage at admission. A sequence whose KV comes back from host memory may continue to decode.
    pub(crate) fn first_stage(&self) -> Stage {
        match self.phase {
            Phase::Swapped { tokens } if self.times.first_token.is_some() && tokens as usize + 1 == self.tokens.len() => Stage::Decode,
            _ => self.prefill_stage(),
        }
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The request, without the prompt and the stop tokens.
    pub(crate) fn request(&self) -> &Request {
        &self.spec.request
    }

    pub(crate) fn member(&self) -> Member {
        self.member
    }

    pub(crate) fn times(&self) -> &Times {
        &self.times
    }

    /// Sets when the sequence's deadlines are checked next.
    pub(crate) fn check_at(&mut self, at: Option<Time>) {
        self.times.check_at = at;
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The sequence's part of the KV cache, for changes that depend on its tokens.
    #[inline]
    pub(crate) fn blocks_and_tokens(&mut self) -> (&mut SeqBlocks, &[Token]) {
        (&mut self.blocks, &self.tokens)
    }

    /// The tokens, writable for a replay that generates them.
    pub(crate) fn into_tokens(self) -> Vec<Token> {
        self.tokens
    }

    pub(crate) fn tokens_mut(&mut self) -> &mut [Token] {
        &mut self.tokens
    }

    /// Number of known tokens, prompt and output.
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

    /// Number of known tokens that planned steps compute.
    #[inline]
    pub(crate) fn known(&self) -> u32 {
        self.progress.computed.min(self.len())
    }

    /// Number of tokens that planned steps will sample.
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

    /// Whether no further token can be planned, because the maximum length is reached or the length is unknown until a commit.
    #[inline]
    pub(crate) fn has_nothing_to_plan(&self) -> bool {
        self.expected_len() == self.progress.limit || self.progress.drafting
    }

    /// Length after every planned step has sampled.
    #[inline]
    pub(crate) fn expected_len(&self) -> u32 {
        self.len() + self.progress.pending
    }

    /// Tokens that the sequence can compute before the next sample. None while a planned step computes a draft of unknown length.
    pub(crate) fn uncomputed(&self) -> u32 {
        self.expected_len().saturating_sub(self.progress.computed)
    }

    /// Whether the next tokens to compute are the last token, or accepted tokens of a draft and the last token.
    #[inline]
    pub(crate) fn decodes_next(&self) -> bool {
        self.uncomputed() <= 1 || self.is_decoding()
    }

    /// Tokens that a decode of the sequence computes at most: accepted tokens of a draft, the last token and drafted ones.
    pub(crate) fn decode_rows(&self) -> u32 {
        self.uncomputed() + self.draft.len() as u32
    }

    /// Whether the sequence was preempted so often that only a lack of blocks can preempt it again.
    pub(crate) fn is_protected(&self) -> bool {
        self.progress.preemptions >= PROTECTED_AFTER && !self.is_background()
    }

    /// Number of blocks that the sequence gets at admission.
    pub(crate) fn blocks_at_admission(&self, block_size: u32) -> usize {
        let reserve = if self.is_protected() { RESERVE * block_size } else { 0 };
        let len = self.len().saturating_add(reserve).min(self.limit() - 1);
        len.div_ceil(block_size) as usize
    }

    /// Whether the sequence must not be preempted again. It then runs only as the non-preemptible sequence.
    pub(crate) fn is_last_chance(&self) -> bool {
        self.progress.preemptions >= MAX_PREEMPTIONS && !self.is_background()
    }

    /// Whether the sequence yields to all others, under every policy.
    pub(crate) fn is_background(&self) -> bool {
        self.spec.request.tier == Tier::Background
    }

    /// The sequence's tier, and its class within the tier.
    pub(crate) fn class(&self) -> Class {
        (self.spec.request.tier, self.spec.request.priority)
    }

    /// Whether the sequence has run before, here or in an engine that ended.
    pub(crate) fn has_started(&self) -> bool {
        self.times.started.is_some()
    }

    /// Whether the sequence counts against the queue's limits. Forks and sequences that already ran do not.
    pub(crate) fn counts_as_queued(&self) -> bool {
        self.times.started.is_none() && self.family.parent.is_none() && !self.is_background()
    }

    /// The session that the request belongs to.
    pub(crate) fn session(&self) -> Option<SessionRef> {
        self.session
    }

    /// Sets the session that the request belongs to, and the owner of its blocks.
    pub(crate) fn set_session(&mut self, session: SessionRef, owner: CacheOwner) {
        self.session = Some(session);
        self.blocks.set_owner(owner);
    }

    /// Number of generated tokens.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.len() - self.spec.prompt_len
    }

    /// Predicted number of tokens left to generate.
    pub(crate) fn predicted_left(&self) -> u32 {
        let longest = self.progress.limit - self.spec.prompt_len;
        self.spec.request.predicted_tokens.unwrap_or(longest).min(longest).saturating_sub(self.output_tokens()).max(1)
    }

    /// Reserves capacity for the maximum length, so that decoding does not allocate.
    pub(crate) fn reserve_tokens(&mut self) {
        self.tokens.reserve_exact(self.progress.limit as usize - self.tokens.len());
    }

    /// Time between the request's addition, to its first engine if it is resumed, and its first chunk, or `now` without one.
    pub(crate) fn queued(&self, now: Time) -> Time {
        self.times.started.unwrap_or(now).saturating_sub(self.account.submitted())
    }

    /// The sequence's place in the queue when it first started, or now if it has not.
    pub(crate) fn queue_position(&self) -> QueuePosition {
        if self.has_started() {
            return self.account.queue_position();
        }
        QueuePosition { key: self.queue_entry.key(), aged: false, blocked: self.queue_entry.was_blocked() }
    }

    /// Records when the first token was generated.
    pub(crate) fn note_first_token(&mut self, now: Time) {
        self.times.first_token.get_or_insert(now);
    }

    /// Whether the request may end with one of these sampled tokens.
    pub(crate) fn may_end(&self, sampled: &[i32]) -> bool {
        let stops = |token: Token| self.spec.stop == Some(token) || self.spec.more_stops.contains(&token);
        self.len() + sampled.len() as u32 >= self.progress.limit || sampled.iter().any(|&token| token < 0 || stops(token as Token))
    }

    /// Appends a sampled token. Returns the finish reason if the request ends.
    #[inline]
    pub(crate) fn push(&mut self, token: Token) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.spec.stop == Some(token) || (!self.spec.more_stops.is_empty() && self.spec.more_stops.contains(&token)) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u32 == self.progress.limit).then_some(FinishReason::Length)
    }
}

impl LiveAccounts for SlotMap<SeqId, Sequence> {
    fn account(&mut self, id: SeqId) -> Option<&mut Account> {
        self.get_mut(id).map(|seq| &mut *seq.account)
    }

    fn each(&mut self, mut visit: impl FnMut(&mut Account)) {
        self.values_mut().for_each(|seq| visit(&mut seq.account));
    }
}
