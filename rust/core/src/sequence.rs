//! One request in flight: its tokens, and how many of them the model has seen.

use crate::ledger::{Account, State};
use crate::policy::Key;
use crate::request::{FinishReason, Request, SeqId, Ticket, Time, Token};
use crate::{BlockHash, BlockTable, Chain, Chunk, Rejected};
use std::sync::Arc;

/// The row of a sequence that waits.
pub(crate) const NO_ROW: u32 = u32::MAX;
/// Preemptions after which a request is protected: none of its policy takes its slot, and it is the last to lose its blocks.
pub(crate) const PROTECTED_AFTER: u32 = 2;
/// Preemptions of one request, at most.
pub(crate) const MAX_PREEMPTIONS: u32 = 8;
/// Stands for "no stop token", which is none of a vocabulary's.
const NO_TOKEN: Token = Token::MAX;

/// A request and its progress. There is no prefill or decode mode: `computed`
/// against the length says everything.
///
/// In the order of use: what a decode step touches lies in the first two cache
/// lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// Its fixed place in the step buffers while it runs, else [`NO_ROW`].
    pub(crate) row: u32,
    /// Leading tokens whose KV is, or by a planned step will be, in `table`.
    pub(crate) computed: u32,
    /// While `computed` is below, the next token is the last of all, and
    /// neither needs a block nor completes one: the quick way through a plan.
    pub(crate) quick_until: u32,
    /// On the quick way: the cache slot of the next token.
    pub(crate) slot: u32,
    /// Tokens that planned steps will sample: known to be coming, not what they are.
    pub(crate) pending: u32,
    /// Longest it can get, prompt and output.
    pub(crate) limit: u32,
    /// Known and computed tokens at which its next block gets its name.
    pub(crate) seal_at: u32,
    pub(crate) preemptions: u32,
    pub(crate) tokens: Vec<Token>,
    /// Whether its output has begun since it was admitted last.
    pub(crate) decoding: bool,
    /// Whether `draft` is part of a planned step: the length is unknown until its commit.
    pub(crate) drafting: bool,
    /// Whether its next chunk is put off while others' come first.
    pub(crate) stalled: bool,
    /// The first of its stop tokens: most have one.
    stop: Token,

    pub(crate) tag: u64,
    pub(crate) priority: i32,
    pub(crate) tenant: u32,
    more_stops: Box<[Token]>,
    pub(crate) table: BlockTable,
    pub(crate) weight: u32,
    /// The group of the queue whose turn it must be.
    pub(crate) group: u32,

    /// The names of its full blocks, as far as they were computed: none without a prefix cache.
    pub(crate) names: Vec<BlockHash>,
    /// A guess at the tokens after the last one.
    pub(crate) draft: Vec<Token>,
    pub(crate) chain: Chain,
    pub(crate) salt: Arc<[u8]>,
    pub(crate) ticket: Ticket,
    pub(crate) class: u32,
    pub(crate) prompt_len: u32,
    pub(crate) cached_tokens: u32,
    /// `computed` when it was admitted last.
    pub(crate) computed_from: u32,
    /// What it had computed when it lost its KV last, until it is decoding again.
    pub(crate) lost: u32,
    /// Tokens it had to compute when it was queued, as far as the cache was looked at.
    pub(crate) uncached: u32,
    /// Tokens whose KV lies in `host`, while it waits.
    pub(crate) saved: u32,
    pub(crate) host: Vec<u32>,
    /// Where it waits.
    pub(crate) key: Key,
    /// Free blocks it needed, beyond the watermark, when it was last turned back.
    pub(crate) needs_free: usize,
    /// The plan in which it was turned back last.
    pub(crate) looked_at: u64,
    /// Since when it does not fit, and how many went past it since.
    pub(crate) turned_back: Option<Time>,
    pub(crate) passed: u32,
    pub(crate) arrived: Time,
    pub(crate) started: Option<Time>,
    pub(crate) first_token: Option<Time>,
    pub(crate) deadline: Time,
    pub(crate) ttft_deadline: Time,
    /// When its deadlines are looked at next, if it has any.
    pub(crate) look_at: Option<Time>,
    pub(crate) predicted: Option<u32>,
    /// The number of the block with which its cached prefix would be longer (prefix policy).
    pub(crate) awaited_block: Option<usize>,
    /// Who computes the blocks up to that one.
    pub(crate) awaited_from: Option<SeqId>,
    pub(crate) parent: Option<SeqId>,
    /// Siblings that wait for its prompt to be computed.
    pub(crate) forks: Vec<SeqId>,
    /// Apart, since it is large, and looked at only when something changes.
    pub(crate) account: Box<Account>,
}

impl Sequence {
    /// Checks a request on its own; what the pool can hold is the scheduler's business.
    pub(crate) fn new(request: Request, ticket: Ticket, max_model_len: u32, now: Time) -> Result<Self, Rejected> {
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
        let (stop, more_stops) = match request.stop.split_first() {
            Some((&first, rest)) => (first, rest.into()),
            None => (NO_TOKEN, [].into()),
        };
        Ok(Self {
            row: NO_ROW,
            computed: 0,
            quick_until: 0,
            slot: 0,
            pending: 0,
            limit: (prompt + new) as u32,
            seal_at: u32::MAX,
            preemptions: 0,
            decoding: false,
            drafting: false,
            stalled: false,
            tokens: request.prompt,
            stop,
            more_stops,
            tag: request.tag,
            priority: request.priority,
            tenant: 0,
            class: 0,
            group: 0,
            weight: request.weight.max(1),
            table: BlockTable::default(),
            names: Vec::new(),
            draft: Vec::new(),
            chain: Chain::root(&request.salt),
            salt: request.salt,
            ticket,
            prompt_len: prompt as u32,
            cached_tokens: 0,
            computed_from: 0,
            lost: 0,
            uncached: prompt as u32,
            saved: 0,
            host: Vec::new(),
            key: Key::default(),
            needs_free: 0,
            looked_at: 0,
            turned_back: None,
            passed: 0,
            arrived: now,
            started: None,
            first_token: None,
            deadline: request.deadline.unwrap_or(Time::MAX),
            ttft_deadline: request.ttft_deadline.unwrap_or(Time::MAX),
            look_at: None,
            predicted: request.predicted_tokens,
            awaited_block: None,
            awaited_from: None,
            parent: None,
            forks: Vec::new(),
            account: Box::default(),
        })
    }

    /// Another of the same request, from its beginning.
    pub(crate) fn sibling(&self, tag: u64, tenant: Arc<str>) -> Request {
        let set = |time: Time| (time != Time::MAX).then_some(time);
        let stops = (self.stop != NO_TOKEN).then_some(self.stop).into_iter();
        Request {
            tag,
            prompt: self.tokens[..self.prompt_len as usize].to_vec(),
            max_new_tokens: self.limit - self.prompt_len,
            stop: stops.chain(self.more_stops.iter().copied()).collect(),
            salt: Arc::clone(&self.salt),
            priority: self.priority,
            tenant,
            weight: self.weight,
            deadline: set(self.deadline),
            ttft_deadline: set(self.ttft_deadline),
            predicted_tokens: self.predicted,
        }
    }

    /// Its length once every planned step has sampled.
    pub(crate) fn expected_len(&self) -> u32 {
        self.tokens.len() as u32 + self.pending
    }

    /// Whether it was preempted so often that only a lack of blocks can preempt it again.
    pub(crate) fn is_protected(&self) -> bool {
        self.preemptions >= PROTECTED_AFTER
    }

    /// Whether it must not be preempted again: it runs only as the one that nobody preempts.
    pub(crate) fn is_last_chance(&self) -> bool {
        self.preemptions >= MAX_PREEMPTIONS
    }

    /// What it is in while it runs.
    pub(crate) fn running_state(&self) -> State {
        match () {
            () if self.decoding => State::Decode,
            () if self.lost > 0 => State::Recompute,
            () => State::Prefill,
        }
    }

    /// Tokens that it has generated.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_len
    }

    /// Tokens that it is thought to generate still.
    pub(crate) fn predicted_left(&self) -> u32 {
        let longest = self.limit - self.prompt_len;
        self.predicted.unwrap_or(longest).min(longest).saturating_sub(self.output_tokens()).max(1)
    }

    /// What the step buffers say for the token at `position`: the token, or
    /// `-(row + 1)` for "the token that this row sampled last".
    pub(crate) fn input_at(&self, position: usize) -> i32 {
        let draft = || self.draft.get(position - self.tokens.len()).filter(|_| self.drafting);
        match self.tokens.get(position).or_else(draft) {
            Some(&token) => token as i32,
            None => -(self.row as i32) - 1,
        }
    }

    /// Its next `len` tokens. From now on they count as computed: whatever is
    /// planned later runs later.
    pub(crate) fn next_chunk(&mut self, id: SeqId, len: u32, table_from: u32, block_size: u32) -> Chunk {
        let start = self.computed;
        let drafted = if self.drafting { self.draft.len() as u32 } else { 0 };
        let (token, slot) = (self.input_at(start as usize), self.slot_of(start, block_size));
        self.computed += len;
        let samples = self.computed == self.expected_len() + drafted;
        self.pending += u32::from(samples);
        // The next one is quick if its block is there, and it is not the block's last.
        let offset = self.computed % block_size;
        if samples && drafted == 0 && offset != 0 {
            self.slot = self.slot_of(self.computed, block_size);
            self.quick_until = self.computed - offset + block_size - 1;
        } else {
            self.quick_until = 0;
        }
        Chunk { seq: id, row: self.row, start, len, drafted, samples, token, slot, table_from, preemptions: self.preemptions }
    }

    /// The cache slot of the token at `position`, whose block it has.
    pub(crate) fn slot_of(&self, position: u32, block_size: u32) -> u32 {
        self.table.ids()[(position / block_size) as usize].0 * block_size + position % block_size
    }

    /// Appends a sampled token, and says whether that ends the request.
    pub(crate) fn push(&mut self, token: Token) -> Option<FinishReason> {
        self.tokens.push(token);
        if token == self.stop || (!self.more_stops.is_empty() && self.more_stops.contains(&token)) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u32 == self.limit).then_some(FinishReason::Length)
    }
}
