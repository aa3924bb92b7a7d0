//! The times at which requests' deadlines are checked.

use crate::request::{ArrivalNumber, SeqId, Time};
use crate::sequence::Sequence;
use std::collections::BTreeMap;

/// Requests with deadlines, by the time of their next check.
#[derive(Debug, Default)]
pub(crate) struct Deadlines(BTreeMap<(Time, ArrivalNumber), SeqId>);

impl Deadlines {
    /// Schedules a sequence's check at `due`, if set.
    pub(crate) fn watch(&mut self, id: SeqId, seq: &mut Sequence, due: Option<Time>) {
        seq.check_at(due);
        if let Some(due) = due {
            self.0.insert((due, seq.spec().arrival_number), id);
        }
    }

    /// Removes a sequence.
    pub(crate) fn forget(&mut self, seq: &Sequence) {
        if let Some(at) = seq.times().check_at {
            self.0.remove(&(at, seq.spec().arrival_number));
        }
    }

    /// Removes and returns the first sequence whose check is due.
    pub(crate) fn next_due(&mut self, now: Time) -> Option<SeqId> {
        let first = self.0.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    /// The time of the next check.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.0.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Number of scheduled checks.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
