//! The waiting sequences, in the order they are served.

use crate::SeqId;
use std::collections::BTreeMap;

/// A place in the queue: smaller is served earlier. A sequence keeps its
/// ticket for life, so one that was preempted returns to its old place.
pub(crate) type Ticket = u64;

/// First come, first served; every operation is O(log n).
#[derive(Debug, Default)]
pub(crate) struct Queue(BTreeMap<Ticket, SeqId>);

impl Queue {
    pub(crate) fn push(&mut self, ticket: Ticket, id: SeqId) {
        let before = self.0.insert(ticket, id);
        debug_assert!(before.is_none(), "two sequences with ticket {ticket}");
    }

    pub(crate) fn remove(&mut self, ticket: Ticket) -> Option<SeqId> {
        self.0.remove(&ticket)
    }

    pub(crate) fn first(&self) -> Option<SeqId> {
        self.0.first_key_value().map(|(_, &id)| id)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Ticket, SeqId)> + '_ {
        self.0.iter().map(|(&ticket, &id)| (ticket, id))
    }
}
