//! The line of parked sessions whose requests wait, and how fast it moves.

use super::session::SessionId;
use crate::request::{Tier, Time};
use std::collections::BTreeSet;

/// The part of a new measurement in the mean time between two sessions that come in.
const NEW: f64 = 0.125;

/// How long a request still waits for its session's turn, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionWait {
    /// By the sessions before it, and the time that each took to come in so far.
    pub expected: Time,
    /// The bound: then the request joins the queue in any case.
    pub longest: Time,
}

/// A parked session's place: its tenant if tenants take turns, its tier, and the arrival of its first request.
pub(super) type Place = (u32, Tier, Time, SessionId);

/// Parked sessions with requests.
#[derive(Debug, Default)]
pub(super) struct Line {
    places: BTreeSet<Place>,
    /// By the time at which they come in whatever happens.
    due: BTreeSet<(Time, SessionId)>,
    /// When the latest session came in, or the first one began to wait.
    moved: Time,
    /// Mean microseconds that the first session waited to come in.
    pace: Option<f64>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(super) fn has(&self, place: Place, due: Time) -> bool {
        self.places.contains(&place) && self.due.contains(&(due, place.3))
    }

    pub(super) fn add(&mut self, place: Place, due: Time) {
        self.places.insert(place);
        self.due.insert((due, place.3));
    }

    pub(super) fn remove(&mut self, place: Place, due: Time) {
        self.places.remove(&place);
        self.due.remove(&(due, place.3));
    }

    /// When the first session comes in whatever happens.
    pub(super) fn next_due(&self) -> Option<(Time, SessionId)> {
        self.due.first().copied()
    }

    /// The session that comes in next: of the tenant with the least `service`, the first one.
    pub(super) fn next(&self, service: impl Fn(u32) -> u64) -> Option<SessionId> {
        let mut tenants = std::iter::successors(self.places.first(), |&&(tenant, ..)| self.first_of(tenant + 1));
        let mut best = tenants.next()?;
        for one in tenants {
            if service(one.0) < service(best.0) {
                best = one;
            }
        }
        Some(best.3)
    }

    /// Records that a session begins to wait in an empty line.
    pub(super) fn begin(&mut self, now: Time) {
        self.moved = now;
    }

    /// Records that a session came in.
    pub(super) fn advance(&mut self, now: Time) {
        let took = now.saturating_sub(self.moved) as f64;
        self.pace = Some(self.pace.map_or(took, |pace| pace + NEW * (took - pace)));
        self.moved = now;
    }

    /// Microseconds until the session at this place is expected to come in. `first` is assumed for each of those before it, and for itself,
    /// before one was measured. O(sessions in line).
    pub(super) fn expected(&self, place: Place, first: f64, now: Time) -> f64 {
        let of_tenant = |tenant| self.places.range((tenant, Tier::Priority, 0, SessionId::default())..);
        let own = of_tenant(place.0).take_while(|&&before| before < place).count();
        // Tenants take turns.
        let mut others = 0;
        let mut tenant = self.places.first();
        while let Some(&(number, ..)) = tenant {
            if number != place.0 {
                others += of_tenant(number).take_while(|&&(one, ..)| one == number).take(own + 1).count();
            }
            tenant = self.first_of(number + 1);
        }
        let each = self.pace.unwrap_or(first);
        let passed = (now.saturating_sub(self.moved) as f64).min(each);
        each * (own + others + 1) as f64 - passed
    }

    fn first_of(&self, tenant: u32) -> Option<&Place> {
        self.places.range((tenant, Tier::Priority, 0, SessionId::default())..).next()
    }

    /// Panics unless both orders have as many sessions.
    pub(super) fn check(&self, sessions: usize) {
        assert_eq!((sessions, sessions), (self.places.len(), self.due.len()), "lengths of the line");
    }
}
