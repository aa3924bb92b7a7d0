//! Reads a journal while it is being written.

use super::format::{Frames, JournalError};
use super::parsed::{ParsedJournal, Progress};
use super::record::{Call, EndedRequest};
use crate::request::{ArrivalNumber, Time};

/// A journal read piece by piece. It keeps what the latest pieces say, and forgets what its owner has taken.
#[derive(Debug)]
pub struct Follower {
    journal: ParsedJournal,
    progress: Progress,
    /// The checksum of all complete frames so far.
    sum: u64,
    /// The beginning of a frame whose end has not come.
    rest: Vec<u8>,
}

impl Follower {
    /// Opens a journal by its first bytes. `None` if they end within the settings: try again with more of them.
    pub fn open(bytes: &[u8]) -> Result<Option<Self>, JournalError> {
        let (frames, config) = match Frames::open(bytes) {
            Err(JournalError::NoSettings) => return Ok(None),
            Err(_) if Frames::begin_with(bytes) => return Ok(None),
            opened => opened?,
        };
        let (at, sum) = frames.position();
        let mut follower = Self { journal: ParsedJournal::empty(config), progress: Progress::default(), sum, rest: Vec::new() };
        follower.feed(&bytes[at..])?;
        Ok(Some(follower))
    }

    /// Reads the bytes that follow. Fails if they are damaged; nothing can be read then.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        self.rest.extend_from_slice(bytes);
        let (at, sum) = self.journal.read_frames(&mut Frames::resume(&self.rest, self.sum), &mut self.progress)?;
        self.sum = sum;
        self.rest.drain(..at);
        Ok(())
    }

    /// The journal so far: the tokens of requests that are not forgotten, and the calls and ends that were not taken.
    pub fn journal(&self) -> &ParsedJournal {
        &self.journal
    }

    /// The time of the last record.
    pub fn now(&self) -> Time {
        self.progress.now
    }

    /// Takes the calls and the ended requests since the last time.
    pub fn take(&mut self) -> (Vec<(Time, Call)>, Vec<EndedRequest>) {
        self.progress.forget_drafts();
        (std::mem::take(&mut self.journal.calls), std::mem::take(&mut self.journal.ended))
    }

    /// Forgets a request's tokens. `tokens` is at least their number.
    pub fn forget(&mut self, arrival_number: ArrivalNumber, tokens: u32) {
        self.journal.forget(arrival_number, tokens / self.journal.config.block_size + 1);
    }
}
