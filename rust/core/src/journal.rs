//! What went into the scheduler, and a hash of what it decided: enough to
//! decide all of it again, and no token among it.
//!
//! Tokens only matter to the scheduler in so far as full blocks of them are
//! equal: the journal has the blocks' names instead, hashed under the
//! scheduler's key, and [`Script`] makes up tokens that are equal where the
//! names are.

use crate::batch::Output;
use crate::batch::StepPlan;
use crate::config::{Batching, Config};
use crate::policy::Policy;
use crate::request::{FinishReason, Request, SeqId, Ticket, Time, Token};
use crate::sequence::Sequence;
use crate::{BlockHash, BlockHasher, Scheduler};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use thiserror::Error;

const MAGIC: &[u8] = b"chairlift-journal-1\n";
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

const ADD: u8 = 1;
const FORK: u8 = 2;
const ABORT: u8 = 3;
const EXPIRE: u8 = 4;
const PLAN: u8 = 5;
const COMMIT: u8 = 6;
const SEALED: u8 = 7;
const STOPPED: u8 = 8;
const FAILED: u8 = 9;

/// Why a journal cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadJournal {
    /// It is something else.
    #[error("this is no journal of this version")]
    Magic,
    /// Something in it makes no sense.
    #[error("the journal is damaged at byte {0}")]
    Damaged(usize),
}

/// The writing end: records pile up until they are [taken](Scheduler::take_journal).
#[derive(Debug)]
pub(crate) struct Journal {
    bytes: Vec<u8>,
    now: Time,
    hash: u64,
    block_size: usize,
    hasher: BlockHasher,
}

/// A number of 7 bits a byte, low ones first.
fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn signed(value: i32) -> u64 {
    u64::from(((value << 1) ^ (value >> 31)) as u32)
}

impl Journal {
    fn new(config: &Config, hasher: BlockHasher) -> Self {
        let mut bytes = MAGIC.to_vec();
        let (kind, size, timeout) = match config.batching {
            Batching::Continuous => (0, 0, 0),
            Batching::Static { size } => (1, size, 0),
            Batching::Dynamic { size, timeout } => (2, size, timeout),
        };
        let policy = Policy::NAMES.iter().position(|(_, policy)| *policy == config.policy).expect("all are named");
        for value in [
            config.num_blocks.into(),
            config.block_size.into(),
            config.max_tokens.into(),
            config.max_seqs.into(),
            config.max_model_len.into(),
            config.prefix_caching.into(),
            config.watermark.into(),
            policy as u64,
            kind,
            size.into(),
            timeout,
            config.max_queued_reqs.into(),
            config.max_queued_tokens,
            config.ageing,
            config.target_itl,
            config.host_blocks.into(),
            config.swap_ns_per_block.into(),
        ] {
            put(&mut bytes, value);
        }
        Self { bytes, now: 0, hash: digest_seed(), block_size: config.block_size as usize, hasher }
    }

    fn begin(&mut self, kind: u8, now: Time) {
        self.bytes.push(kind);
        // Callers' clocks may step back; that too must come out as it went in.
        put(&mut self.bytes, now.wrapping_sub(self.now));
        self.now = now;
    }

    pub(crate) fn add(&mut self, seq: &Sequence, tenant: &str, now: Time) {
        self.begin(ADD, now);
        let after = |time: Time| if time == Time::MAX { 0 } else { time.saturating_sub(now) + 1 };
        for value in [
            seq.tag,
            seq.prompt_len.into(),
            (seq.limit - seq.prompt_len).into(),
            signed(seq.priority),
            seq.weight.into(),
            after(seq.deadline),
            after(seq.ttft_deadline),
            seq.predicted.map_or(0, |tokens| u64::from(tokens) + 1),
            tenant.len() as u64,
        ] {
            put(&mut self.bytes, value);
        }
        self.bytes.extend_from_slice(tenant.as_bytes());
        let mut name = self.hasher.root(&seq.salt);
        for block in seq.tokens.chunks_exact(self.block_size) {
            name = self.hasher.child(name, block);
            self.bytes.extend_from_slice(&name.to_bits().to_le_bytes());
        }
    }

    pub(crate) fn fork(&mut self, parent: Ticket, seq: &Sequence, now: Time) {
        self.begin(FORK, now);
        put(&mut self.bytes, parent);
        put(&mut self.bytes, seq.tag);
    }

    pub(crate) fn end(&mut self, ticket: Ticket, reason: FinishReason, now: Time) {
        let kind = match reason {
            FinishReason::Stop => STOPPED,
            FinishReason::Error => FAILED,
            _ => ABORT,
        };
        self.begin(kind, now);
        put(&mut self.bytes, ticket);
    }

    pub(crate) fn expire(&mut self, now: Time) {
        self.begin(EXPIRE, now);
    }

    /// Records the name of a full block, unless all of it is prompt and known from there.
    pub(crate) fn name(&mut self, seq: &Sequence, block: u32, name: BlockHash) {
        if (block as usize + 1) * self.block_size > seq.prompt_len as usize {
            self.bytes.push(SEALED);
            put(&mut self.bytes, seq.ticket);
            put(&mut self.bytes, block.into());
            self.bytes.extend_from_slice(&name.to_bits().to_le_bytes());
        }
    }

    pub(crate) fn plan(&mut self, now: Time, plan: Option<&StepPlan>) {
        self.hash = digest(self.hash, plan);
        let hash = self.hash;
        self.begin(PLAN, now);
        self.bytes.extend_from_slice(&hash.to_le_bytes());
    }

    pub(crate) fn commit(&mut self, now: Time, tokens: &[Output]) {
        self.begin(COMMIT, now);
        let told = |output: &&Output| matches!(output.finish, Some(FinishReason::Stop | FinishReason::Error));
        put(&mut self.bytes, tokens.iter().filter(told).count() as u64);
        for output in tokens.iter().filter(told) {
            put(&mut self.bytes, output.tag);
            self.bytes.push(u8::from(output.finish == Some(FinishReason::Error)));
        }
    }
}

/// The mixing of wyhash: a product, its halves folded together.
fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}

/// The hash of no decision.
pub(crate) fn digest_seed() -> u64 {
    SEED
}

/// Folds what a plan decides, or that there was none, into a hash of all before it.
pub(crate) fn digest(hash: u64, plan: Option<&StepPlan>) -> u64 {
    let mix = |hash: u64, value: u64| fold(hash ^ value, SEED);
    let Some(plan) = plan else { return mix(hash, 0) };
    let mut hash = mix(hash, plan.chunks.len() as u64);
    for chunk in &plan.chunks {
        hash = mix(hash, chunk.seq.to_bits());
        hash = mix(hash, u64::from(chunk.row) << 32 | u64::from(chunk.slot));
        hash = mix(hash, u64::from(chunk.start) << 32 | u64::from(chunk.len) << 1 | u64::from(chunk.samples));
    }
    for &(from, to) in &plan.copies {
        hash = mix(hash, u64::from(from.0) << 32 | u64::from(to.0));
    }
    for &(block, host) in &plan.swap_out {
        hash = mix(!hash, u64::from(block.0) << 32 | u64::from(host));
    }
    for &(host, block) in &plan.swap_in {
        hash = mix(hash, u64::from(host) << 32 | u64::from(block.0));
    }
    plan.preempted.iter().fold(hash, |hash, &tag| mix(hash, tag))
}

impl Scheduler {
    /// Records the names of blocks just found for a sequence, its blocks from
    /// `from` on: equal to what others have, they need not ever be sealed by itself.
    pub(crate) fn record_found(&mut self, id: SeqId, from: usize) {
        if let Some(journal) = &mut self.journal {
            for (&block, number) in self.found.iter().zip(from as u32..) {
                let name = self.pool.name(block).expect("it was found by name");
                journal.name(&self.seqs[id], number, name);
            }
        }
    }

    /// Begins a journal, before the first request comes.
    pub fn start_journal(&mut self) {
        assert_eq!(self.next_ticket, 0, "a journal has all from the first request on");
        self.journal = Some(Box::new(Journal::new(&self.config, *self.pool.hasher())));
    }

    /// Appends to `bytes` what was recorded since the last call.
    pub fn take_journal(&mut self, bytes: &mut Vec<u8>) {
        if let Some(journal) = &mut self.journal {
            bytes.append(&mut journal.bytes);
        }
    }
}

/// One call of the scheduler, as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A request; its place among all requests and siblings, and the request with made-up tokens.
    Add(Arc<Arrival>),
    /// A sibling, of the request that came in this place.
    Fork {
        /// The request's place.
        parent: Ticket,
        /// The sibling's tag.
        tag: u64,
    },
    /// The end of the request in this place, by its caller.
    End {
        /// The request's place.
        ticket: Ticket,
        /// Whether the caller had what it asked for, left, or was left alone.
        reason: FinishReason,
    },
    /// Deadlines were looked at.
    Expire,
    /// A plan; the hash of all decisions up to it.
    Plan(u64),
    /// A commit: who ended otherwise than by length, and whether by an error.
    Commit(Vec<(u64, bool)>),
}

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When it came.
    pub time: Time,
    /// Its place among all requests and siblings.
    pub ticket: Ticket,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// What it asked for, but for the prompt.
    pub request: Request,
}

/// A journal, read.
#[derive(Clone, Debug)]
pub struct Script {
    /// The limits of the scheduler that wrote it.
    pub config: Config,
    /// Its calls with their times, in order.
    pub calls: Vec<(Time, Call)>,
    /// Names of full blocks, by place and number.
    names: FxHashMap<(Ticket, u32), u64>,
    /// Whose prompt a sibling has: the first of the family.
    parents: FxHashMap<Ticket, Ticket>,
    /// Whether the last record is cut off, as after a crash.
    pub truncated: bool,
}

/// The token that stands for a stop; none that is made up equals it.
pub const STOP: Token = 0;

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.at += 1;
        self.bytes.get(self.at - 1).copied()
    }

    fn number(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    fn signed(&mut self) -> Option<i32> {
        let value = self.small()?;
        Some((value >> 1) as i32 ^ -((value & 1) as i32))
    }

    fn slice(&mut self, len: usize) -> Option<&[u8]> {
        self.at = self.at.checked_add(len)?;
        self.bytes.get(self.at - len..self.at)
    }

    fn word(&mut self) -> Option<u64> {
        self.slice(8)?.try_into().ok().map(u64::from_le_bytes)
    }
}

impl Script {
    /// Reads what [`Scheduler::take_journal`] gave, all of it or all but an end that is missing.
    pub fn read(bytes: &[u8]) -> Result<Self, BadJournal> {
        let body = bytes.strip_prefix(MAGIC).ok_or(BadJournal::Magic)?;
        let mut reader = Reader { bytes: body, at: 0 };
        let config = read_config(&mut reader).ok_or(BadJournal::Damaged(MAGIC.len()))?;
        let mut script = Self { config, calls: Vec::new(), names: FxHashMap::default(), parents: FxHashMap::default(), truncated: false };
        let (mut now, mut tickets) = (0, 0);
        while reader.at < body.len() {
            let from = reader.at;
            if script.read_record(&mut reader, &mut now, &mut tickets).is_none() {
                if reader.at <= body.len() {
                    return Err(BadJournal::Damaged(MAGIC.len() + from));
                }
                script.truncated = true;
            }
        }
        Ok(script)
    }

    fn read_record(&mut self, reader: &mut Reader<'_>, now: &mut Time, tickets: &mut Ticket) -> Option<()> {
        let kind = reader.byte()?;
        if kind == SEALED {
            let key = (reader.number()?, reader.small()?);
            let name = reader.word()?;
            self.names.insert(key, name);
            return Some(());
        }
        *now = now.wrapping_add(reader.number()?);
        let call = match kind {
            ADD => {
                let arrival = self.read_arrival(reader, *now, *tickets)?;
                *tickets += 1;
                Call::Add(Arc::new(arrival))
            }
            FORK => {
                let (parent, tag) = (reader.number().filter(|&ticket| ticket < *tickets)?, reader.number()?);
                let first = self.parents.get(&parent).copied().unwrap_or(parent);
                self.parents.insert(*tickets, first);
                *tickets += 1;
                Call::Fork { parent, tag }
            }
            ABORT | STOPPED | FAILED => {
                let ticket = reader.number().filter(|&ticket| ticket < *tickets)?;
                let reason = match kind {
                    STOPPED => FinishReason::Stop,
                    FAILED => FinishReason::Error,
                    _ => FinishReason::Abort,
                };
                Call::End { ticket, reason }
            }
            EXPIRE => Call::Expire,
            PLAN => Call::Plan(reader.word()?),
            COMMIT => {
                let count = reader.number()?;
                Call::Commit((0..count).map(|_| Some((reader.number()?, reader.byte()? == 1))).collect::<Option<_>>()?)
            }
            _ => return None,
        };
        self.calls.push((*now, call));
        Some(())
    }

    fn read_arrival(&mut self, reader: &mut Reader<'_>, time: Time, ticket: Ticket) -> Option<Arrival> {
        let (tag, prompt_tokens, max_new_tokens) = (reader.number()?, reader.small()?, reader.small()?);
        let (priority, weight) = (reader.signed()?, reader.small()?);
        let after = |value: u64| (value > 0).then(|| time.saturating_add(value - 1));
        let (deadline, ttft_deadline) = (after(reader.number()?), after(reader.number()?));
        let predicted_tokens = reader.small()?.checked_sub(1);
        let len = reader.number()? as usize;
        let tenant = std::str::from_utf8(reader.slice(len)?).ok()?.into();
        for block in 0..prompt_tokens / self.config.block_size {
            let name = reader.word()?;
            self.names.insert((ticket, block), name);
        }
        let request = Request {
            tag,
            prompt: Vec::new(),
            max_new_tokens,
            stop: vec![STOP],
            salt: [].into(),
            priority,
            tenant,
            weight,
            deadline,
            ttft_deadline,
            predicted_tokens,
        };
        Some(Arrival { time, ticket, prompt_tokens, request })
    }

    /// The earliest time of a call; 0 if there are none.
    pub fn begins(&self) -> Time {
        self.calls.iter().map(|(time, _)| *time).min().unwrap_or(0)
    }

    /// A made-up token for a place in a sequence: equal to another's exactly
    /// where full blocks of that name are.
    pub fn token(&self, ticket: Ticket, position: u32) -> Token {
        let size = self.config.block_size;
        let own = self.names.get(&(ticket, position / size));
        let name = own.or_else(|| self.names.get(&(*self.parents.get(&ticket)?, position / size)));
        let of = match name {
            Some(&name) => fold(name ^ u64::from(position % size), SEED),
            None => fold(fold(ticket ^ SEED, SEED) ^ u64::from(position), SEED),
        };
        (of >> 34) as Token + 1
    }

    /// The request of an arrival, with made-up tokens.
    pub fn request(&self, arrival: &Arrival) -> Request {
        let prompt = (0..arrival.prompt_tokens).map(|position| self.token(arrival.ticket, position)).collect();
        Request { prompt, ..arrival.request.clone() }
    }
}

fn read_config(reader: &mut Reader<'_>) -> Option<Config> {
    Some(Config {
        num_blocks: reader.small()?,
        block_size: reader.small().filter(|&size| size > 0)?,
        max_tokens: reader.small()?,
        max_seqs: reader.small()?,
        max_model_len: reader.small()?,
        prefix_caching: reader.number()? != 0,
        watermark: reader.small()?,
        policy: Policy::NAMES.get(reader.number()? as usize)?.1,
        batching: match (reader.number()?, reader.small()?, reader.number()?) {
            (0, _, _) => Batching::Continuous,
            (1, size, _) => Batching::Static { size },
            (2, size, timeout) => Batching::Dynamic { size, timeout },
            _ => return None,
        },
        max_queued_reqs: reader.small()?,
        max_queued_tokens: reader.number()?,
        ageing: reader.number()?,
        target_itl: reader.number()?,
        host_blocks: reader.small()?,
        swap_ns_per_block: reader.small()?,
    })
}
