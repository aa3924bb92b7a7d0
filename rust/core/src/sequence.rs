//! One request in flight: its tokens, and how many of them the model has seen.

use crate::queue::Ticket;
use crate::{BlockTable, Chain, Chunk, Rejected};
use slotmap::{Key, KeyData, new_key_type};
use std::sync::Arc;

/// A vocabulary index.
pub type Token = u32;

/// Microseconds on the caller's clock.
pub type Time = u64;

new_key_type! {
    /// A sequence's handle. Never reused: a plan may outlive the sequences it
    /// names, and their tokens must not reach a successor.
    pub struct SeqId;
}

impl SeqId {
    /// The handle as a plain number, for callers in other languages.
    pub fn to_bits(self) -> u64 {
        self.data().as_ffi()
    }

    /// The handle that [`to_bits`](Self::to_bits) gave. Any other number names no sequence.
    pub fn from_bits(bits: u64) -> Self {
        KeyData::from_ffi(bits).into()
    }
}

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The caller's own name for it, echoed in every output.
    pub tag: u64,
    /// At least one token.
    pub prompt: Vec<Token>,
    /// At least one.
    pub max_new_tokens: u32,
    /// Tokens that end the request when sampled.
    pub stop: Vec<Token>,
    /// Requests share cached blocks only under equal salts.
    pub salt: Arc<[u8]>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled one of its stop tokens.
    Stop,
    /// It reached `max_new_tokens`.
    Length,
    /// The model gave no valid token for it.
    Error,
}

/// One token, on its way to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// Whose token.
    pub tag: u64,
    /// The token; meaningless with [`FinishReason::Error`].
    pub token: Token,
    /// Set with the request's last token.
    pub finish: Option<FinishReason>,
}

/// What became of a request that finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which request.
    pub tag: u64,
    /// How often it lost its blocks and was computed again.
    pub preemptions: u32,
    /// When it was added.
    pub arrived: Time,
    /// When its first chunk was planned.
    pub started: Time,
    /// When its first token was committed.
    pub first_token: Time,
    /// When its last token was committed.
    pub ended: Time,
}

/// What one step gave: reused from step to step, so that a steady step does
/// not allocate.
#[derive(Debug, Default)]
pub struct Outputs {
    /// One a token, in batch order; several of one sequence stand together.
    pub tokens: Vec<Output>,
    /// One a request that ended.
    pub ended: Vec<Ended>,
}

/// The row of a sequence that waits.
pub(crate) const NO_ROW: u32 = u32::MAX;

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
    /// Tokens that planned steps will sample: known to be coming, not what they are.
    pub(crate) pending: u32,
    /// Longest it can get, prompt and output.
    pub(crate) limit: u32,
    /// Known and computed tokens at which its next block gets its name.
    pub(crate) seal_at: u32,
    pub(crate) preemptions: u32,
    pub(crate) tokens: Vec<Token>,
    pub(crate) tag: u64,
    /// Whether `draft` is part of a planned step: the length is unknown until its commit.
    pub(crate) drafting: bool,
    pub(crate) table: BlockTable,
    /// A guess at the tokens after the last one.
    pub(crate) draft: Vec<Token>,
    pub(crate) stop: Box<[Token]>,
    pub(crate) first_token: Option<Time>,
    pub(crate) chain: Chain,
    pub(crate) salt: Arc<[u8]>,
    pub(crate) ticket: Ticket,
    pub(crate) prompt_len: u32,
    pub(crate) cached_tokens: u32,
    /// Free blocks it needed, beyond the watermark, when it was last turned back from the queue's head.
    pub(crate) needs_free: usize,
    pub(crate) arrived: Time,
    pub(crate) started: Option<Time>,
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
        Ok(Self {
            row: NO_ROW,
            computed: 0,
            pending: 0,
            limit: (prompt + new) as u32,
            prompt_len: prompt as u32,
            preemptions: 0,
            seal_at: u32::MAX,
            drafting: false,
            tokens: request.prompt,
            table: BlockTable::default(),
            chain: Chain::root(&request.salt),
            draft: Vec::new(),
            stop: request.stop.into_boxed_slice(),
            salt: request.salt,
            tag: request.tag,
            ticket,
            needs_free: 0,
            cached_tokens: 0,
            arrived: now,
            started: None,
            first_token: None,
        })
    }

    /// Its length once every planned step has sampled.
    pub(crate) fn expected_len(&self) -> u32 {
        self.tokens.len() as u32 + self.pending
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
    pub(crate) fn next_chunk(&mut self, id: SeqId, len: u32, table_from: u32) -> Chunk {
        let start = self.computed;
        self.computed += len;
        let drafted = if self.drafting { self.draft.len() as u32 } else { 0 };
        let samples = self.computed == self.expected_len() + drafted;
        self.pending += u32::from(samples);
        Chunk { seq: id, row: self.row, start, len, drafted, samples, table_from, preemptions: self.preemptions }
    }

    /// Appends a sampled token, and says whether that ends the request.
    pub(crate) fn push(&mut self, token: Token) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.stop.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u32 == self.limit).then_some(FinishReason::Length)
    }

    pub(crate) fn ended(&self, now: Time) -> Ended {
        Ended {
            tag: self.tag,
            preemptions: self.preemptions,
            arrived: self.arrived,
            started: self.started.unwrap_or(now),
            first_token: self.first_token.unwrap_or(now),
            ended: now,
        }
    }
}
