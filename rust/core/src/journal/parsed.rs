//! Parses a journal.
//!
//! A journal has no tokens. The parser generates tokens that are equal exactly where the names of full blocks are equal.

use super::format::{Frame, Frames, JournalError, Kind, REASONS, Reader, SEED, fold};
use crate::config::Config;
use crate::request::{ArrivalNumber, FinishReason, Preparation, Request, Resumed, SessionEvent, Tier, Time, Token};
use crate::step::DraftSource;
use crate::step_time::{COEFFICIENTS, StepModel};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The token that stands for a stop token. Generated tokens never equal it.
pub const STOP: Token = 0;
/// The token that stands for a rejected drafted token. Generated tokens never equal it.
const REJECTED: Token = i32::MAX as Token;

/// One recorded call of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A request was added.
    Add(Arc<Arrival>),
    /// A request's preparation was done.
    Prepare {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The preparation that it waits for then.
        next: Option<Preparation>,
    },
    /// A request was forked.
    Fork {
        /// Arrival number of the parent.
        parent: ArrivalNumber,
        /// The fork's tag.
        tag: u64,
    },
    /// A held sequence was opened for this tenant.
    Open(Arc<str>),
    /// A held sequence, given by its number, was forked.
    ForkHeld(u64),
    /// A held sequence, given by its number, was dropped.
    DropHeld(u64),
    /// The KV of blocks with these names was read from storage.
    Restore(Vec<u64>),
    /// A request was moved to another class.
    SetPriority {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The new class.
        priority: i32,
    },
    /// The caller ended a request.
    End {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The reason that the caller gave.
        reason: FinishReason,
    },
    /// A tenant was charged for its service at other engines.
    ChargeExternal {
        /// The tenant.
        tenant: Arc<str>,
        /// Microseconds of engine time.
        us: Time,
    },
    /// A tenant said something of one of its sessions.
    NoteSession {
        /// The tenant.
        tenant: Arc<str>,
        /// The session.
        session: Arc<str>,
        /// What it said.
        event: SessionEvent,
    },
    /// The limit of blocks with memory was set.
    SetBlockLimit(u32),
    /// The queue was closed or opened.
    CloseQueue(bool),
    /// Deadlines were checked.
    Expire,
    /// Tokens were drafted for a sequence.
    Draft {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// Number of drafted tokens.
        tokens: u32,
        /// Number of accepted tokens.
        accepted: u32,
        /// Where they came from.
        source: DraftSource,
    },
    /// A step was planned. Contains the hash of all decisions so far.
    Plan(u64),
    /// A step was committed.
    Commit(Sampled),
}

/// The journal's record of the tokens of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// Tags of the requests that ended for a reason other than length, and whether the reason was an error.
    pub ended: Vec<(u64, bool)>,
    /// Requests with drafted tokens, and the number of new tokens of each.
    pub drafted: Vec<(ArrivalNumber, u32)>,
}

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The arrival time.
    pub time: Time,
    /// Arrival number among all requests and forks.
    pub arrival_number: ArrivalNumber,
    /// Prompt tokens. Of a resumed request, with the answer so far.
    pub prompt_tokens: u32,
    /// The request without its prompt.
    pub request: Request,
    /// The number of the held sequence that the request continues, and how many of its tokens.
    pub continues: Option<(u64, u32)>,
}

/// What a request had when it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedRequest {
    /// The request's tag.
    pub tag: u64,
    /// When it ended.
    pub time: Time,
    /// Why it ended.
    pub finish: FinishReason,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Prompt tokens that were cached when the request was first admitted.
    pub cached_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// When its first token was committed.
    pub first_token: Option<Time>,
}

/// A parsed journal.
#[derive(Clone, Debug)]
pub struct ParsedJournal {
    /// Settings of the recorded scheduler.
    pub config: Config,
    /// The calls with their times, in order.
    pub calls: Vec<(Time, Call)>,
    /// Requests that ended, in that order. Older versions did not record them.
    pub ended: Vec<EndedRequest>,
    /// The last recorded step-time model. Older versions did not record it.
    pub step_model: Option<StepModel>,
    /// Names of full blocks, by request and block number.
    names: FxHashMap<(ArrivalNumber, u32), u64>,
    /// For each fork, the first request of its family, which has the same prompt.
    parents: FxHashMap<ArrivalNumber, ArrivalNumber>,
    /// Whether the file is cut off within a frame, as after a crash. `calls` contains the calls before that frame.
    pub truncated: bool,
}

/// State of the parser.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) now: Time,
    arrivals: ArrivalNumber,
    /// Held sequences opened so far.
    opened: u64,
    /// What the next added request continues.
    continues: Option<(u64, u32)>,
    /// Calls with drafts that are not committed yet.
    drafts: FxHashMap<ArrivalNumber, usize>,
    /// Answered tokens of the next request, if it is resumed.
    answered: Option<u32>,
    /// The next request's tier.
    tier: Tier,
}

impl Progress {
    /// Forgets which calls have drafts that are not committed, because the calls are taken.
    pub(super) fn forget_drafts(&mut self) {
        self.drafts.clear();
    }
}

impl ParsedJournal {
    /// Parses the output of [`Recorder::take_journal`](crate::Recorder::take_journal). The end may be missing.
    pub fn read(bytes: &[u8]) -> Result<Self, JournalError> {
        let (mut frames, config) = Frames::open(bytes)?;
        let mut journal = Self::empty(config);
        journal.read_frames(&mut frames, &mut Progress::default())?;
        Ok(journal)
    }

    /// A journal without calls.
    pub(super) fn empty(config: Config) -> Self {
        let (names, parents) = (FxHashMap::default(), FxHashMap::default());
        Self { config, calls: Vec::new(), ended: Vec::new(), step_model: None, names, parents, truncated: false }
    }

    /// Adds the records of all complete frames. Returns where the next one begins, and the checksum of those before it.
    pub(super) fn read_frames(&mut self, frames: &mut Frames<'_>, progress: &mut Progress) -> Result<(usize, u64), JournalError> {
        loop {
            let position = frames.position();
            match frames.next()? {
                Frame::End => return Ok(position),
                Frame::CutOff => {
                    self.truncated = true;
                    return Ok(position);
                }
                Frame::Records(mut reader, at) => {
                    while reader.has_more() {
                        let from = at + reader.at();
                        let kind = reader.byte().and_then(Kind::of).ok_or(JournalError::Damaged(from))?;
                        self.read_record(kind, &mut reader, progress).ok_or(JournalError::Damaged(from))?;
                    }
                }
            }
        }
    }

    /// Forgets the names of a request's first blocks, and its parent. The request's tokens are no longer known then.
    pub(super) fn forget(&mut self, arrival_number: ArrivalNumber, blocks: u32) {
        self.parents.remove(&arrival_number);
        for block in 0..blocks {
            self.names.remove(&(arrival_number, block));
        }
    }

    fn read_record(&mut self, kind: Kind, reader: &mut Reader<'_>, progress: &mut Progress) -> Option<()> {
        if kind == Kind::Name {
            let key = (reader.number()?, reader.small()?);
            self.names.insert(key, reader.word()?);
            return Some(());
        }
        if kind == Kind::Resumed {
            progress.answered = Some(reader.small()?);
            return Some(());
        }
        if kind == Kind::Tier {
            progress.tier = Tier::NAMES.get(usize::try_from(reader.number()?).ok()?)?.0;
            return Some(());
        }
        if kind == Kind::Append {
            let number = reader.number().filter(|number| *number < progress.opened)?;
            progress.continues = Some((number, reader.small()?));
            return Some(());
        }
        if kind == Kind::StepModel {
            let mut coefficients = [0.0; COEFFICIENTS];
            for coefficient in &mut coefficients {
                *coefficient = Some(f64::from_bits(reader.word()?)).filter(|number| number.is_finite())?;
            }
            self.step_model = Some(StepModel::known(self.config.experts, coefficients));
            return Some(());
        }
        if !matches!(kind, Kind::Draft | Kind::ExternalService) {
            progress.now = progress.now.wrapping_add(reader.number()?);
        }
        if kind == Kind::Ended {
            self.ended.push(read_ended(reader, progress.now)?);
            return Some(());
        }
        let (arrivals, opened) = (progress.arrivals, progress.opened);
        let known = |arrival_number: &ArrivalNumber| *arrival_number < arrivals;
        let held = |number: &u64| *number < opened;
        let call = match kind {
            Kind::Add => {
                let (prompt_tokens, request) = read_add(reader, progress)?;
                Call::Add(Arc::new(self.read_arrival(prompt_tokens, request, reader, progress)?))
            }
            Kind::Request => {
                let (prompt_tokens, request) = (reader.small()?, Request::from_bytes(reader.bytes()?)?);
                Call::Add(Arc::new(self.read_arrival(prompt_tokens, request, reader, progress)?))
            }
            Kind::Prepare => {
                let arrival_number = reader.number().filter(known)?;
                let next = match reader.number()? {
                    0 => None,
                    number => Some(Preparation::NAMES.get(number as usize - 1)?.0),
                };
                Call::Prepare { arrival_number, next }
            }
            Kind::Fork => {
                let (parent, tag) = (reader.number().filter(known)?, reader.number()?);
                let first = self.parents.get(&parent).copied().unwrap_or(parent);
                self.parents.insert(progress.arrivals, first);
                progress.arrivals += 1;
                Call::Fork { parent, tag }
            }
            Kind::End => {
                let arrival_number = reader.number().filter(known)?;
                Call::End { arrival_number, reason: *REASONS.get(reader.number()? as usize)? }
            }
            Kind::Open => {
                progress.opened += 1;
                Call::Open(reader.text()?.into())
            }
            Kind::ForkAt => {
                progress.opened += 1;
                Call::ForkHeld(reader.number().filter(held)?)
            }
            Kind::Drop => Call::DropHeld(reader.number().filter(held)?),
            Kind::SetPriority => Call::SetPriority { arrival_number: reader.number().filter(known)?, priority: reader.signed()? },
            Kind::Restore => {
                let count = reader.number()?;
                Call::Restore((0..count).map(|_| reader.word()).collect::<Option<_>>()?)
            }
            Kind::ExternalService => Call::ChargeExternal { tenant: reader.text()?.into(), us: reader.number()? },
            Kind::Session => {
                let (tenant, session) = (reader.text()?.into(), reader.text()?.into());
                let event = SessionEvent::NAMES.get(usize::try_from(reader.number()?).ok()?)?.0;
                Call::NoteSession { tenant, session, event }
            }
            Kind::BlockLimit => Call::SetBlockLimit(reader.small()?),
            Kind::CloseQueue => Call::CloseQueue(reader.number()? > 0),
            Kind::Expire => Call::Expire,
            Kind::Draft => {
                let (arrival_number, tokens, source) = (reader.number().filter(known)?, reader.small()?, DraftSource::of(reader.small()?));
                progress.drafts.insert(arrival_number, self.calls.len());
                Call::Draft { arrival_number, tokens, accepted: 0, source }
            }
            Kind::Plan => Call::Plan(reader.word()?),
            Kind::Commit => Call::Commit(self.read_commit(reader, progress)?),
            _ => return None,
        };
        self.calls.push((progress.now, call));
        Some(())
    }

    /// Reads the names of a request's blocks. Returns `None` for a request that the scheduler refuses.
    fn read_arrival(&mut self, prompt_tokens: u32, request: Request, reader: &mut Reader<'_>, progress: &mut Progress) -> Option<Arrival> {
        let (time, arrival_number) = (progress.now, progress.arrivals);
        let resumed = progress.answered.take();
        let answered = resumed.unwrap_or(0);
        let longest = u64::from(prompt_tokens) + u64::from(request.max_new_tokens);
        if prompt_tokens == 0 || request.max_new_tokens <= answered || longest > self.config.max_model_len.into() {
            return None;
        }
        let prompt_tokens = prompt_tokens + answered;
        for block in 0..prompt_tokens / self.config.block_size {
            let name = reader.word()?;
            self.names.insert((arrival_number, block), name);
        }
        progress.arrivals += 1;
        let request = Request {
            stop: vec![STOP],
            // No decision depends on how long ago the earlier events were.
            resumed: resumed.map(|answered| Resumed {
                answered,
                cached_tokens: 0,
                own_cached_tokens: 0,
                submitted: time,
                started: time,
                first_token: (answered > 0).then_some(time),
            }),
            ..request
        };
        Some(Arrival { time, arrival_number, prompt_tokens, request, continues: progress.continues.take() })
    }

    fn read_commit(&mut self, reader: &mut Reader<'_>, progress: &mut Progress) -> Option<Sampled> {
        let mut sampled = Sampled::default();
        for _ in 0..reader.number()? {
            sampled.ended.push((reader.number()?, reader.number()? == 1));
        }
        for _ in 0..reader.number()? {
            let (arrival_number, given) = (reader.number()?, reader.small()?);
            sampled.drafted.push((arrival_number, given));
            // The number of accepted drafted tokens is known only now.
            let draft = progress.drafts.remove(&arrival_number).and_then(|at| self.calls.get_mut(at));
            if let Some((_, Call::Draft { accepted, .. })) = draft {
                *accepted = given.saturating_sub(1);
            }
        }
        Some(sampled)
    }

    /// The earliest time of a call. 0 if there are no calls.
    pub fn begins(&self) -> Time {
        self.calls.iter().map(|(time, _)| *time).min().unwrap_or(0)
    }

    /// Names of the full blocks of an arrival's prompt.
    pub fn block_names(&self, arrival: &Arrival) -> Vec<u64> {
        let blocks = 0..arrival.prompt_tokens / self.config.block_size;
        blocks.map_while(|block| self.names.get(&(arrival.arrival_number, block)).copied()).collect()
    }

    /// The generated token at a position of a sequence. Tokens are equal exactly where full blocks of equal name are.
    pub fn token(&self, arrival_number: ArrivalNumber, position: u32) -> Token {
        let size = self.config.block_size;
        let own = self.names.get(&(arrival_number, position / size));
        let name = own.or_else(|| self.names.get(&(*self.parents.get(&arrival_number)?, position / size)));
        match name {
            Some(&name) => token_of(fold(name ^ u64::from(position % size), SEED)),
            None => token_of(fold(fold(arrival_number ^ SEED, SEED) ^ u64::from(position), SEED)),
        }
    }

    /// The generated tokens of full blocks with these names.
    pub(crate) fn tokens_of(&self, names: &[u64]) -> Vec<Token> {
        let size = u64::from(self.config.block_size);
        names.iter().flat_map(|name| (0..size).map(move |at| token_of(fold(name ^ at, SEED)))).collect()
    }

    /// The request of an arrival, with generated tokens.
    pub fn request(&self, arrival: &Arrival) -> Request {
        let prompt = (0..arrival.prompt_tokens).map(|position| self.token(arrival.arrival_number, position)).collect();
        Request { prompt, ..arrival.request.clone() }
    }

    /// Drafted tokens from `position` on. The first `accepted` equal the tokens of the sequence.
    pub(crate) fn draft(&self, arrival_number: ArrivalNumber, position: u32, tokens: u32, accepted: u32) -> Vec<Token> {
        (0..tokens).map(|at| if at < accepted { self.token(arrival_number, position + at) } else { REJECTED }).collect()
    }
}

/// The rest of a [`Kind::Ended`].
fn read_ended(reader: &mut Reader<'_>, time: Time) -> Option<EndedRequest> {
    let (tag, finish) = (reader.number()?, FinishReason::NAMES.get(usize::try_from(reader.number()?).ok()?)?.0);
    let (output_tokens, cached_tokens, preemptions) = (reader.small()?, reader.small()?, reader.small()?);
    let first_token = reader.number()?.checked_sub(1).map(|since| time.saturating_sub(since));
    Some(EndedRequest { tag, time, finish, output_tokens, cached_tokens, preemptions, first_token })
}

/// The prompt tokens and the fields of a [`Kind::Add`].
fn read_add(reader: &mut Reader<'_>, progress: &mut Progress) -> Option<(u32, Request)> {
    let (tag, prompt_tokens, max_new_tokens) = (reader.number()?, reader.small()?, reader.small()?);
    let (priority, weight) = (reader.signed()?, reader.small()?);
    let after = |value: u64| (value > 0).then(|| progress.now.saturating_add(value - 1));
    let (deadline, ttft_deadline) = (after(reader.number()?), after(reader.number()?));
    let predicted_tokens = reader.small()?.checked_sub(1);
    let (tenant, tier) = (reader.text()?.into(), std::mem::take(&mut progress.tier));
    let fields =
        Request { tag, max_new_tokens, priority, tier, tenant, weight, deadline, ttft_deadline, predicted_tokens, ..Request::default() };
    Some((prompt_tokens, fields))
}

fn token_of(hash: u64) -> Token {
    (hash >> 34) as Token + 1
}

#[cfg(test)]
mod tests;
