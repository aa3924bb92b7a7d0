//! When requests' deadlines are checked.

use crate::request::{ArrivalNumber, SeqId, Time};
use crate::sequence::Sequence;
use std::collections::BTreeMap;

/// Requests with deadlines, by when they are checked next.
#[derive(Debug, Default)]
pub(crate) struct Deadlines(BTreeMap<(Time, ArrivalNumber), SeqId>);

impl Deadlines {
    /// Has a sequence checked at `due`, if there is such a time.
    pub(crate) fn watch(&mut self, id: SeqId, seq: &mut Sequence, due: Option<Time>) {
        seq.check_at(due);
        if let Some(due) = due {
            self.0.insert((due, seq.spec().arrival_number), id);
        }
    }

    /// Forgets a sequence.
    pub(crate) fn forget(&mut self, seq: &Sequence) {
        if let Some(at) = seq.times().check_at {
            self.0.remove(&(at, seq.spec().arrival_number));
        }
    }

    /// The first check, if it is due: it is not watched any longer.
    pub(crate) fn next_due(&mut self, now: Time) -> Option<SeqId> {
        let first = self.0.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    /// The time of the first check.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.0.first_key_value().map(|(&(at, _), _)| at)
    }

    /// How many are watched.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
