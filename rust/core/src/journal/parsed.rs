//! Parses a journal.
//!
//! A journal has no tokens. The parser generates tokens that are equal exactly where the names of full blocks are equal.

use super::format::{Frame, Frames, JournalError, SEED, fold};
use super::record::{Added, Arrival, Call, EndedRequest, Record, Sampled};
use crate::config::Config;
use crate::request::{ArrivalNumber, FinishReason, Request, Resumed, Time, Token};
use crate::step_time::StepModel;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The token that stands for a stop token. Generated tokens never equal it.
pub const STOP: Token = 0;
/// The token that stands for a rejected drafted token. Generated tokens never equal it.
const REJECTED: Token = i32::MAX as Token;

/// A parsed journal.
#[derive(Clone, Debug)]
pub struct ParsedJournal {
    /// Settings of the recorded scheduler.
    pub config: Config,
    /// The calls with their times, in order.
    pub calls: Vec<(Time, Call)>,
    /// Requests that ended, in that order.
    pub ended: Vec<EndedRequest>,
    /// The last recorded step-time model.
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
    /// Calls with drafts that are not committed yet.
    drafts: FxHashMap<ArrivalNumber, usize>,
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
                Frame::Records(records, at) => {
                    let mut rest = records;
                    while !rest.is_empty() {
                        let damaged = JournalError::Damaged(at + records.len() - rest.len());
                        let Ok(((since, record), after)) = postcard::take_from_bytes::<(Time, Record)>(rest) else { return Err(damaged) };
                        progress.now = progress.now.wrapping_add(since);
                        self.read_record(record, progress).ok_or(damaged)?;
                        rest = after;
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

    /// Takes a record. Returns `None` for one that no scheduler writes.
    fn read_record(&mut self, record: Record, progress: &mut Progress) -> Option<()> {
        let call = match record {
            Record::Name { arrival_number, block, name } => {
                self.names.insert((arrival_number, block), name);
                return Some(());
            }
            Record::Ended(ended) => {
                self.ended.push(EndedRequest { time: progress.now, ..ended });
                return Some(());
            }
            Record::StepModel(coefficients) => {
                let is_sound = coefficients.iter().all(|number| number.is_finite());
                self.step_model = is_sound.then(|| StepModel::known(self.config.experts, coefficients));
                return is_sound.then_some(());
            }
            Record::Add(added) => Call::Add(Arc::new(self.read_arrival(added, progress)?)),
            Record::Call(call) => {
                self.read_call(&call, progress)?;
                call
            }
        };
        self.calls.push((progress.now, call));
        Some(())
    }

    /// Notes what later records need of a call. Returns `None` if it names what is not there.
    fn read_call(&mut self, call: &Call, progress: &mut Progress) -> Option<()> {
        let known = |arrival_number: u64| (arrival_number < progress.arrivals).then_some(());
        let held = |number: u64| (number < progress.opened).then_some(());
        match call {
            Call::Prepare { arrival_number, .. } | Call::SetPriority { arrival_number, .. } => known(*arrival_number)?,
            Call::End { arrival_number, reason } => {
                known(*arrival_number)?;
                matches!(reason, FinishReason::Abort | FinishReason::Stop | FinishReason::Error).then_some(())?;
            }
            Call::Fork { parent, .. } => {
                known(*parent)?;
                let first = self.parents.get(parent).copied().unwrap_or(*parent);
                self.parents.insert(progress.arrivals, first);
                progress.arrivals += 1;
            }
            Call::Open(_) => progress.opened += 1,
            Call::ForkHeld(number) => {
                held(*number)?;
                progress.opened += 1;
            }
            Call::DropHeld(number) => held(*number)?,
            Call::Draft { arrival_number, .. } => {
                known(*arrival_number)?;
                progress.drafts.insert(*arrival_number, self.calls.len());
            }
            Call::Commit(sampled) => self.note_accepted(sampled, progress),
            _ => {}
        }
        Some(())
    }

    /// Reads a request. Returns `None` for one that the scheduler refuses.
    fn read_arrival(&mut self, added: Added, progress: &mut Progress) -> Option<Arrival> {
        let (time, arrival_number) = (progress.now, progress.arrivals);
        let Added { prompt_tokens, answered: resumed, continues, request, names } = added;
        let (request, answered) = (Request::from_bytes(&request)?, resumed.unwrap_or(0));
        let longest = u64::from(prompt_tokens) + u64::from(request.max_new_tokens);
        if prompt_tokens == 0 || request.max_new_tokens <= answered || longest > self.config.max_model_len.into() {
            return None;
        }
        let prompt_tokens = prompt_tokens + answered;
        if names.len() as u64 != u64::from(prompt_tokens / self.config.block_size)
            || continues.is_some_and(|(held, _)| held >= progress.opened)
        {
            return None;
        }
        self.names.extend(names.into_iter().zip(0..).map(|(name, block)| ((arrival_number, block), name)));
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
        Some(Arrival { time, arrival_number, prompt_tokens, request, continues })
    }

    /// Notes how many tokens of earlier drafts a step accepted.
    fn note_accepted(&mut self, sampled: &Sampled, progress: &mut Progress) {
        for (arrival_number, given) in &sampled.drafted {
            let draft = progress.drafts.remove(arrival_number).and_then(|at| self.calls.get_mut(at));
            if let Some((_, Call::Draft { accepted, .. })) = draft {
                *accepted = given.saturating_sub(1);
            }
        }
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

fn token_of(hash: u64) -> Token {
    (hash >> 34) as Token + 1
}

#[cfg(test)]
mod tests;
