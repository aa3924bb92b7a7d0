//! The format of a journal: the inputs of a scheduler and a hash of its decisions. A journal contains no tokens.
//!
//! A journal is a line with the version, followed by frames. A frame has its length, a checksum of the length, records,
//! and a checksum of all frames so far. The first frame has the settings by name. [`Recorder`](crate::Recorder) writes
//! the other frames and [`ParsedJournal`](crate::ParsedJournal) reads them. The scheduler only depends on which full
//! blocks have equal tokens, so a journal has the blocks' names instead of tokens.

use crate::config::{Config, SETTINGS, SessionTurns, SettingError, Value};
use crate::error::ConfigError;
use crate::memory::BlockHash;
use crate::request::{FinishReason, Time};
use crate::step::StepPlan;

use thiserror::Error;

const MAGIC: &[u8] = b"chairlift-journal-";
const VERSION: &[u8] = b"3\n";
pub(crate) const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Defines [`Kind`], and the kind of each first byte.
macro_rules! kinds {
    ($($(#[$about:meta])* $kind:ident = $byte:literal,)+) => {
        /// The kind of a record: its first byte.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Kind { $($(#[$about])* $kind = $byte,)+ }

        impl Kind {
            pub(crate) fn of(byte: u8) -> Option<Self> {
                match byte {
                    $($byte => Some(Self::$kind),)+
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Time, tag, prompt tokens, maximum new tokens, priority, weight, deadlines, prediction, tenant, names of full blocks. Only
    /// read: older versions wrote it instead of `Request`.
    Add = 1,
    /// Time, parent, tag.
    Fork = 2,
    /// Time, request, reason.
    End = 3,
    /// Time.
    Expire = 4,
    /// Time, hash of all decisions.
    Plan = 5,
    /// Time; tags of requests that ended by a stop or an error; drafted sequences, each with its number of new tokens.
    Commit = 6,
    /// Request, number of a block filled with generated tokens, name.
    Name = 7,
    /// Request, drafted tokens, code of their source.
    Draft = 8,
    /// Held sequence, number of its tokens that the request of the next record continues.
    Append = 9,
    /// Time, held sequence.
    ForkAt = 10,
    /// Time, request, priority.
    SetPriority = 11,
    /// Time, names of the full blocks of a prefix whose KV was read from storage.
    Restore = 12,
    /// Tenant, microseconds of its service at other engines.
    ExternalService = 13,
    /// Time, most blocks that may have memory.
    BlockLimit = 14,
    /// The next added request is resumed: tokens of its answer so far. The names of its blocks include these tokens.
    Resumed = 15,
    /// Time, tenant.
    Open = 16,
    /// Time, held sequence.
    Drop = 17,
    /// The tier of the next `Add`, if it is not the default.
    Tier = 18,
    /// Time, prompt tokens, the request's other fields as msgpack, names of full blocks.
    Request = 19,
    /// Time, request, number of its next preparation; 0 for none.
    Prepare = 20,
    /// Time, tenant, session, number of the event.
    Session = 21,
    /// Time, tag of a request that ended, reason, output tokens, cached tokens, preemptions, microseconds from its first token plus 1; 0
    /// if it had none. A replay ignores it: it is for readers that do not make the calls again.
    Ended = 22,
    /// The coefficients of the step-time model. A replay ignores it too.
    StepModel = 23,
    /// Time, 1 if the queue is closed and 0 if it is open.
    CloseQueue = 24,
}

/// The reasons for which callers end requests. A record stores an index into this list.
pub(crate) const REASONS: [FinishReason; 3] = [FinishReason::Abort, FinishReason::Stop, FinishReason::Error];

/// Why a journal cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JournalError {
    /// The file is not a journal.
    #[error("this is no journal")]
    NotAJournal,
    /// Another version of Chairlift wrote the journal.
    #[error("this is a journal of version {found}, and only version 3 can be read here: replay it with the chairlift that recorded it")]
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

/// Appends a number with 7 bits per byte, low bits first.
pub(crate) fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Maps a signed number near 0 to a small unsigned number, which [`put`] writes in few bytes.
pub(crate) fn zigzag(value: i32) -> u64 {
    u64::from(((value << 1) ^ (value >> 31)) as u32)
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
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
    put(bytes, records.len() as u64);
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
        let (mut settings, mut sum) = (Vec::new(), SEED);
        put(&mut settings, SETTINGS.len() as u64);
        for setting in &SETTINGS {
            put_text(&mut settings, setting.name);
            match setting.get(config) {
                Value::Unset => settings.push(0),
                Value::Int(value) => {
                    settings.push(1);
                    put(&mut settings, value);
                }
                Value::Flag(flag) => settings.push(2 + u8::from(flag)),
                Value::Name(name) => {
                    settings.push(4);
                    put_text(&mut settings, &name);
                }
            }
        }
        let mut frames = [MAGIC, VERSION].concat();
        put_frame(&mut frames, &settings, &mut sum);
        Self { frames, records: Vec::new(), sum, now: 0, hash: digest_seed() }
    }

    /// Appends everything recorded since the previous call to `bytes`.
    pub(crate) fn take(&mut self, bytes: &mut Vec<u8>) {
        bytes.append(&mut self.frames);
        if !self.records.is_empty() {
            put_frame(bytes, &self.records, &mut self.sum);
            self.records.clear();
        }
    }

    /// Begins a record of a call at time `now`.
    pub(crate) fn call(&mut self, kind: Kind, now: Time) -> &mut Self {
        self.records.push(kind as u8);
        // A caller's clock may step back. The difference wraps so that the reader restores the same time.
        put(&mut self.records, now.wrapping_sub(self.now));
        self.now = now;
        self
    }

    /// Begins a record without a time.
    pub(crate) fn note(&mut self, kind: Kind) -> &mut Self {
        self.records.push(kind as u8);
        self
    }

    pub(crate) fn number(&mut self, value: u64) -> &mut Self {
        put(&mut self.records, value);
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        put(&mut self.records, bytes.len() as u64);
        self.records.extend_from_slice(bytes);
        self
    }

    pub(crate) fn name(&mut self, name: BlockHash) -> &mut Self {
        self.records.extend_from_slice(&name.to_bits().to_le_bytes());
        self
    }

    /// Records all coefficients of the step-time model.
    pub(crate) fn step_model(&mut self, coefficients: &[f64]) {
        let records = &mut self.note(Kind::StepModel).records;
        for number in coefficients {
            records.extend_from_slice(&number.to_le_bytes());
        }
    }

    /// Records a plan, or that no step was planned.
    pub(crate) fn plan(&mut self, now: Time, plan: Option<&StepPlan>) {
        self.hash = digest(self.hash, plan);
        let hash = self.hash;
        self.call(Kind::Plan, now).records.extend_from_slice(&hash.to_le_bytes());
    }
}

/// Reads records. A method returns `None` if the data is invalid or at an end. After the end, the position is past the end.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.slice(1).map(|byte| byte[0])
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
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

    pub(crate) fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    pub(crate) fn signed(&mut self) -> Option<i32> {
        let value = self.small()?;
        Some((value >> 1) as i32 ^ -((value & 1) as i32))
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.number()?.try_into().ok()?;
        self.slice(len)
    }

    pub(crate) fn word(&mut self) -> Option<u64> {
        self.slice(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// Whether unread data is left.
    pub(crate) fn has_more(&self) -> bool {
        self.at < self.bytes.len()
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let from = self.at;
        self.at = from.saturating_add(len);
        self.bytes.get(from..self.at)
    }
}

/// The next part of a journal.
pub(crate) enum Frame<'a> {
    /// Records, and their byte offset in the file.
    Records(Reader<'a>, usize),
    /// The file is cut off within a frame.
    CutOff,
    /// The file ends after the previous frame.
    End,
}

/// The frames of a journal.
pub(crate) struct Frames<'a> {
    reader: Reader<'a>,
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
        let mut frames = Self { reader: Reader { bytes, at: MAGIC.len() + VERSION.len() }, sum: SEED };
        let Frame::Records(mut reader, at) = frames.next()? else { return Err(JournalError::NoSettings) };
        let given = read_settings(&mut reader).ok_or(JournalError::Damaged(at))?;
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
        Self { reader: Reader { bytes, at: 0 }, sum }
    }

    /// Where the next frame begins, and the checksum of all before it.
    pub(crate) fn position(&self) -> (usize, u64) {
        (self.reader.at, self.sum)
    }

    /// Returns the next frame. Fails if its checksum does not match.
    pub(crate) fn next(&mut self) -> Result<Frame<'a>, JournalError> {
        if !self.reader.has_more() {
            return Ok(Frame::End);
        }
        let (from, end) = (self.reader.at, self.reader.bytes.len());
        let damaged = JournalError::Damaged(from);
        let Some(len) = self.reader.number() else { return if self.reader.at > end { Ok(Frame::CutOff) } else { Err(damaged) } };
        let Some(check) = self.reader.slice(2) else { return Ok(Frame::CutOff) };
        if check != (guard(self.sum, len as usize) as u16).to_le_bytes() {
            return Err(damaged);
        }
        let at = self.reader.at;
        let (Some(records), Some(check)) = (self.reader.slice(len as usize), self.reader.slice(4)) else { return Ok(Frame::CutOff) };
        self.sum = checksum(self.sum, records);
        if check != (self.sum as u32).to_le_bytes() {
            return Err(damaged);
        }
        Ok(Frame::Records(Reader { bytes: records, at: 0 }, at))
    }
}

fn read_settings(reader: &mut Reader<'_>) -> Option<Vec<(String, Value)>> {
    let count = reader.number()?;
    let mut given = Vec::new();
    for _ in 0..count {
        let name = reader.text()?.to_owned();
        let value = match reader.byte()? {
            0 => Value::Unset,
            1 => Value::Int(reader.number()?),
            flag @ (2 | 3) => Value::Flag(flag == 3),
            4 => Value::Name(reader.text()?.to_owned()),
            _ => return None,
        };
        given.push((name, value));
    }
    Some(given)
}

/// The mixing function of wyhash: a 128-bit product with its halves folded together.
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}

/// The hash before the first decision.
pub(crate) fn digest_seed() -> u64 {
    SEED
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
