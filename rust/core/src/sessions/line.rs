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

/// The order of parked sessions: by tenant if tenants take turns, then by tier and by the arrival of the first request.
pub(super) type Key = (u32, Tier, Time, SessionId);

/// Parked sessions with requests.
#[derive(Debug, Default)]
pub(super) struct Line {
    keys: BTreeSet<Key>,
    /// By the time at which they come in whatever happens.
    due: BTreeSet<(Time, SessionId)>,
    /// When the latest session came in, or the first one began to wait.
    moved: Time,
    /// Mean microseconds that the first session waited to come in.
    mean: Option<f64>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(super) fn has(&self, key: Key, due: Time) -> bool {
        self.keys.contains(&key) && self.due.contains(&(due, key.3))
    }

    pub(super) fn add(&mut self, key: Key, due: Time) {
        self.keys.insert(key);
        self.due.insert((due, key.3));
    }

    pub(super) fn remove(&mut self, key: Key, due: Time) {
        self.keys.remove(&key);
        self.due.remove(&(due, key.3));
    }

    /// When the first session comes in whatever happens.
    pub(super) fn next_due(&self) -> Option<(Time, SessionId)> {
        self.due.first().copied()
    }

    /// The session that comes in next: of the tenant with the least `service`, the first one.
    pub(super) fn next(&self, service: impl Fn(u32) -> u64) -> Option<SessionId> {
        // Service is known only where tenants take turns: elsewhere there is one tenant, which is compared with no other.
        self.first_of_each().min_by(|one, other| service(one.0).cmp(&service(other.0))).map(|&(.., id)| id)
    }

    /// Records that a session begins to wait in an empty line.
    pub(super) fn begin(&mut self, now: Time) {
        self.moved = now;
    }

    /// Records that a session came in.
    pub(super) fn advance(&mut self, now: Time) {
        let took = now.saturating_sub(self.moved) as f64;
        self.mean = Some(self.mean.map_or(took, |mean| mean + NEW * (took - mean)));
        self.moved = now;
    }

    /// Microseconds until the session with this key is expected to come in. `first` is assumed for each of those before it, and for itself,
    /// before one was measured. O(sessions in line).
    pub(super) fn expected(&self, key: Key, first: f64, now: Time) -> f64 {
        let own = self.of_tenant(key.0).take_while(|&&before| before < key).count();
        // Tenants take turns.
        let others = self.first_of_each().map(|&(tenant, ..)| tenant).filter(|&tenant| tenant != key.0);
        let others = others.map(|tenant| self.of_tenant(tenant).take(own + 1).count()).sum::<usize>();
        self.each(first, now) * (own + others + 1) as f64
    }

    /// Microseconds for which a session that begins to wait now is expected to wait, if all others are before it. See
    /// [`expected`](Self::expected).
    pub(super) fn expected_last(&self, first: f64, now: Time) -> f64 {
        self.each(first, now) * (self.keys.len() + 1) as f64
    }

    /// The first session.
    pub(super) fn first(&self) -> Option<SessionId> {
        self.keys.first().map(|&(.., id)| id)
    }

    /// Microseconds that each session is expected to take to come in, or `first` before one was measured.
    fn each(&self, first: f64, now: Time) -> f64 {
        // A wait that has outlasted the mean says more than the mean does.
        self.mean.unwrap_or(first).max(now.saturating_sub(self.moved) as f64)
    }

    /// The sessions of a tenant, in order.
    fn of_tenant(&self, tenant: u32) -> impl Iterator<Item = &Key> {
        self.starting_at(tenant).take_while(move |&&(number, ..)| number == tenant)
    }

    /// The first session of each tenant.
    fn first_of_each(&self) -> impl Iterator<Item = &Key> {
        std::iter::successors(self.keys.first(), |&&(tenant, ..)| self.starting_at(tenant + 1).next())
    }

    /// The sessions of a tenant and those of later ones, in order.
    fn starting_at(&self, tenant: u32) -> impl Iterator<Item = &Key> {
        self.keys.range((tenant, Tier::Priority, 0, SessionId::default())..)
    }

    /// Panics unless both orders have as many sessions.
    pub(super) fn check(&self, sessions: usize) {
        assert_eq!((sessions, sessions), (self.keys.len(), self.due.len()), "lengths of the line");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_has_outlasted_the_mean_is_expected_of_each_session_before() {
        let [first, second, other] =
            [(0, 1), (0, 2), (1, 3)].map(|(tenant, arrived)| (tenant, Tier::Default, arrived, SessionId::default()));
        let mut line = Line::default();
        line.begin(0);
        for key in [first, second, other] {
            line.add(key, 9000);
        }
        let expected = |line: &Line, now| [first, second, other].map(|key| line.expected(key, 70.0, now) as Time);
        // Tenants take turns: the first session and the other tenant's wait for one more each, the second one for two.
        assert_eq!([10, 80].map(|now| expected(&line, now)), [[140, 210, 140], [160, 240, 160]], "nothing was measured");
        assert_eq!([10, 80].map(|now| line.expected_last(70.0, now) as Time), [280, 320], "one more would be the fourth");
        line.advance(100);
        assert_eq!([150, 200, 400].map(|now| expected(&line, now)), [[200, 300, 200], [200, 300, 200], [600, 900, 600]]);
    }
}
