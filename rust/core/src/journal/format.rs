//! The format of a journal: the inputs of a scheduler and a hash of its decisions. A journal contains no tokens.
//!
//! A journal is a line with the version, followed by frames. A frame has its length, a checksum of the length, records,
//! and a checksum of all frames so far. The first frame has the settings by name. [`Recorder`](crate::Recorder) writes
//! the other frames and [`ParsedJournal`](crate::ParsedJournal) reads them. The scheduler only depends on which full
//! blocks have equal tokens, so a journal has the blocks' names instead of tokens.

use super::record::{Call, Record};
use crate::config::{Config, SETTINGS, SessionTurns, SettingError, Value};
use crate::error::ConfigError;
use crate::request::Time;
use crate::step::StepPlan;

use thiserror::Error;

const MAGIC: &[u8] = b"chairlift-journal-";
const VERSION: &[u8] = b"4\n";
/// The checksum before the first frame, and the hash before the first decision.
pub(crate) const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Why a journal cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JournalError {
    /// The file is not a journal.
    #[error("this is no journal")]
    NotAJournal,
    /// Another version of Chairlift wrote the journal.
    #[error("this is a journal of version {found}, and only version 4 can be read here: replay it with the chairlift that recorded it")]
    Version {
        /// The version in the first line.
        found: String,
    },
    /// The journal ends before the end of the settings.
    #[error("the journal is cut off within its settings: nothing can be replayed")]
    NoSettings,
    /// A setting is unknown or out of bounds.
    #[error("the journal's settings cannot be used: {0}")]
    Setting(#[from] SettingError),
    /// No scheduler can be made from the settings.
    #[error("the journal's settings cannot be used: {0}")]
    Config(#[from] ConfigError),
    /// The journal was modified after it was written, or is invalid.
    #[error("the journal is damaged at byte {0}")]
    Damaged(usize),
}

/// The checksum of a frame and of all frames before it.
fn checksum(before: u64, records: &[u8]) -> u64 {
    let words = records.chunks(8).map(|word| word.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)));
    words.fold(guard(before, records.len()), |sum, word| fold(sum ^ word ^ SEED.rotate_left(17), SEED))
}

/// The checksum of a frame's length.
fn guard(before: u64, len: usize) -> u64 {
    fold(before ^ len as u64 ^ SEED.rotate_left(31), SEED)
}

/// Appends a frame.
fn put_frame(bytes: &mut Vec<u8>, records: &[u8], sum: &mut u64) {
    bytes.extend_from_slice(&(records.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(guard(*sum, records.len()) as u16).to_le_bytes());
    bytes.extend_from_slice(records);
    *sum = checksum(*sum, records);
    bytes.extend_from_slice(&(*sum as u32).to_le_bytes());
}

/// Writes records and buffers them until the caller takes them.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Complete frames.
    frames: Vec<u8>,
    records: Vec<u8>,
    sum: u64,
    now: Time,
    hash: u64,
}

impl Writer {
    pub(crate) fn new(config: &Config) -> Self {
        let settings: Vec<_> = SETTINGS.iter().map(|setting| (setting.name, setting.get(config))).collect();
        let settings = postcard::to_allocvec(&settings).expect("numbers and texts");
        let mut sum = SEED;
        let mut frames = [MAGIC, VERSION].concat();
        put_frame(&mut frames, &settings, &mut sum);
        Self { frames, records: Vec::new(), sum, now: 0, hash: SEED }
    }

    /// Appends everything recorded since the previous call to `bytes`.
    pub(crate) fn take(&mut self, bytes: &mut Vec<u8>) {
        bytes.append(&mut self.frames);
        if !self.records.is_empty() {
            put_frame(bytes, &self.records, &mut self.sum);
            self.records.clear();
        }
    }

    /// Appends a record at time `now`.
    pub(super) fn record(&mut self, now: Time, record: &Record) {
        // A caller's clock may step back. The difference wraps so that the reader restores the same time.
        let since = now.wrapping_sub(self.now);
        self.now = now;
        self.records = postcard::to_extend(&(since, record), std::mem::take(&mut self.records)).expect("numbers and texts");
    }

    /// Appends a record at the time of the one before it.
    pub(super) fn note(&mut self, record: &Record) {
        self.record(self.now, record);
    }

    /// Records a plan, or that no step was planned.
    pub(super) fn plan(&mut self, now: Time, plan: Option<&StepPlan>) {
        self.hash = digest(self.hash, plan);
        self.record(now, &Record::Call(Call::Plan(self.hash)));
    }
}

/// The next part of a journal.
pub(crate) enum Frame<'a> {
    /// Records, and their byte offset in the file.
    Records(&'a [u8], usize),
    /// The file is cut off within a frame.
    CutOff,
    /// The file ends after the previous frame.
    End,
}

/// The frames of a journal.
pub(crate) struct Frames<'a> {
    bytes: &'a [u8],
    at: usize,
    sum: u64,
}

impl<'a> Frames<'a> {
    /// Opens a journal and reads its settings.
    pub(crate) fn open(bytes: &'a [u8]) -> Result<(Self, Config), JournalError> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(JournalError::NotAJournal)?;
        if !rest.starts_with(VERSION) {
            let line = rest.split(|&byte| byte == b'\n').next().unwrap_or_default();
            let found = String::from_utf8_lossy(&line[..line.len().min(16)]).into_owned();
            return Err(JournalError::Version { found });
        }
        let mut frames = Self { bytes, at: MAGIC.len() + VERSION.len(), sum: SEED };
        let Frame::Records(settings, at) = frames.next()? else { return Err(JournalError::NoSettings) };
        let given: Vec<(String, Value)> = postcard::from_bytes(settings).map_err(|_| JournalError::Damaged(at))?;
        // A journal without one of these settings is of a scheduler without that limit, or without sessions.
        let config = Config { background_slowdown: 0, session_turns: SessionTurns::Off, ..Config::default() }.with(&given)?;
        config.check()?;
        Ok((frames, config))
    }

    /// Whether `bytes` are the beginning of the first line.
    pub(crate) fn begin_with(bytes: &[u8]) -> bool {
        let line = [MAGIC, VERSION].concat();
        bytes.len() < line.len() && line.starts_with(bytes)
    }

    /// Goes on after [`position`](Self::position), with the bytes from there.
    pub(crate) fn resume(bytes: &'a [u8], sum: u64) -> Self {
        Self { bytes, at: 0, sum }
    }

    /// Where the next frame begins, and the checksum of all before it.
    pub(crate) fn position(&self) -> (usize, u64) {
        (self.at, self.sum)
    }

    /// Returns the next frame. Fails if its checksum does not match.
    pub(crate) fn next(&mut self) -> Result<Frame<'a>, JournalError> {
        let (from, rest) = (self.at, &self.bytes[self.at..]);
        if rest.is_empty() {
            return Ok(Frame::End);
        }
        let Some((&[a, b, c, d, check @ ..], rest)) = rest.split_first_chunk::<6>() else { return Ok(Frame::CutOff) };
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if check != (guard(self.sum, len) as u16).to_le_bytes() {
            return Err(JournalError::Damaged(from));
        }
        let Some((records, rest)) = rest.split_at_checked(len) else { return Ok(Frame::CutOff) };
        let Some(check) = rest.first_chunk::<4>() else { return Ok(Frame::CutOff) };
        self.sum = checksum(self.sum, records);
        if *check != (self.sum as u32).to_le_bytes() {
            return Err(JournalError::Damaged(from));
        }
        self.at = from + 6 + len + 4;
        Ok(Frame::Records(records, from + 6))
    }
}

/// The mixing function of wyhash: a 128-bit product with its halves folded together.
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}

/// Adds a plan's decisions, or the absence of a plan, to the hash of all earlier decisions.
pub(crate) fn digest(hash: u64, plan: Option<&StepPlan>) -> u64 {
    let mix = |hash: u64, value: u64| fold(hash ^ value, SEED);
    let Some(plan) = plan else { return mix(hash, 0) };
    let mut hash = mix(hash, plan.chunks.len() as u64);
    for chunk in &plan.chunks {
        hash = mix(hash, chunk.seq.to_bits());
        hash = mix(hash, u64::from(chunk.slot) << 32 | u64::from(chunk.kv_slot));
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
    for slot in &plan.states.slots {
        hash = mix(hash, u64::from(slot.0));
    }
    for (from, to) in &plan.states.copies {
        hash = mix(!hash, u64::from(from.0) << 32 | u64::from(to.0));
    }
    for save in &plan.states.saves {
        hash = mix(hash, u64::from(save.chunk) << 32 | u64::from(save.position));
        hash = mix(hash, u64::from(save.to.0));
    }
    plan.preempted.iter().fold(hash, |hash, &tag| mix(hash, tag))
}
