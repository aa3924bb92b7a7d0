//! The waiting sequences in serving order.

use super::shares::Shares;
use crate::policy::{Key, Rules};
use crate::request::{ArrivalNumber, SeqId, Tier};
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

/// Number of one tenant's requests that a walk visits before it continues with the next tenant.
const DEPTH: u32 = 8;

/// The waiting queue. Every operation is O(log n).
#[derive(Debug)]
pub(crate) struct Queue {
    rules: Rules,
    order: BTreeMap<Key, SeqId>,
    /// Sequences by arrival, without background requests. Used where the policy has another order.
    by_age: BTreeMap<ArrivalNumber, SeqId>,
    /// Virtual counters of the tenants. Used where tenants take turns. Background requests have no part in them.
    shares: Shares,
}

/// Progress of a walk through the queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Walk {
    last: Option<Key>,
    depth: u32,
}

impl Queue {
    pub(crate) fn new(rules: Rules) -> Self {
        Self { rules, order: BTreeMap::new(), by_age: BTreeMap::new(), shares: Shares::default() }
    }

    /// Adds a sequence. `returns` is set if the sequence ran before.
    pub(crate) fn push(&mut self, key: Key, id: SeqId, returns: bool) {
        let before = self.order.insert(key, id);
        debug_assert!(before.is_none(), "two sequences with arrival number {}", key.arrival_number);
        if key.tier == Tier::Background {
            return;
        }
        if !self.rules.is_arrival_order() {
            self.by_age.insert(key.arrival_number, id);
        }
        if self.rules.takes_turns() {
            let tenant = key.group as u32;
            if returns { self.shares.wait(tenant) } else { self.shares.arrive(tenant) }
        }
    }

    /// Records a request of a tenant that waits for its session's turn.
    pub(crate) fn begin_session_wait(&mut self, tenant: u32) {
        if self.rules.takes_turns() {
            self.shares.begin_session_wait(tenant);
        }
    }

    /// Records that such a request waits no more.
    pub(crate) fn end_session_wait(&mut self, tenant: u32) {
        if self.rules.takes_turns() {
            self.shares.end_session_wait(tenant);
        }
    }

    /// Moves a sequence within its group.
    pub(crate) fn reorder(&mut self, from: Key, to: Key, id: SeqId) {
        debug_assert_eq!((from.group, from.arrival_number), (to.group, to.arrival_number));
        let removed = self.order.remove(&from);
        debug_assert!(removed.is_some(), "a waiting sequence is queued");
        self.order.insert(to, id);
    }

    pub(crate) fn remove(&mut self, key: Key) {
        let removed = self.order.remove(&key);
        debug_assert!(removed.is_some(), "a waiting sequence is queued");
        if key.tier == Tier::Background {
            return;
        }
        if !self.rules.is_arrival_order() {
            self.by_age.remove(&key.arrival_number);
        }
        if self.rules.takes_turns() {
            self.shares.leave(key.group as u32);
        }
    }

    /// The first sequence in serving order.
    pub(crate) fn first(&mut self) -> Option<SeqId> {
        self.next(&mut Walk::default())
    }

    /// The sequence that arrived first. Background requests do not age: unless all go in the order of arrival, they are left out.
    pub(crate) fn oldest(&self) -> Option<SeqId> {
        if !self.rules.is_arrival_order() {
            return self.by_age.values().next().copied();
        }
        // Each tier is in the order of arrival.
        let first_from = |tier: Tier| self.order.range(Key { tier, ..Key::default() }..).next();
        let firsts = [Tier::Priority, Tier::Default, Tier::Flex].into_iter().filter_map(first_from);
        firsts.min_by_key(|(key, _)| (key.tier == Tier::Background, key.arrival_number)).map(|(_, &id)| id)
    }

    /// The next sequence of a walk in the order of the policy.
    pub(crate) fn next(&mut self, walk: &mut Walk) -> Option<SeqId> {
        let (key, id) = if self.rules.takes_turns() { self.next_of_tenants(walk)? } else { self.after(walk.last)? };
        walk.last = Some(key);
        Some(id)
    }

    /// The tenants' virtual counters.
    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }

    pub(crate) fn shares_mut(&mut self) -> &mut Shares {
        &mut self.shares
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, SeqId)> + '_ {
        self.order.iter().map(|(&key, &id)| (key, id))
    }

    fn after(&self, key: Option<Key>) -> Option<(Key, SeqId)> {
        match key {
            None => self.order.first_key_value(),
            Some(key) => self.order.range((Excluded(key), Unbounded)).next(),
        }
        .map(|(&key, &id)| (key, id))
    }

    fn next_of_tenants(&mut self, walk: &mut Walk) -> Option<(Key, SeqId)> {
        let tenant = match walk.last {
            None => self.shares.least(),
            Some(last) if last.tier == Tier::Background => return self.after(walk.last),
            Some(last) => {
                walk.depth += 1;
                let same = |key: &Key| key.tier == last.tier && key.group == last.group && walk.depth < DEPTH;
                match self.after(Some(last)).filter(|(key, _)| same(key)) {
                    Some(found) => return Some(found),
                    None => self.shares.after(last.group as u32),
                }
            }
        };
        walk.depth = 0;
        let background = Key { tier: Tier::Background, ..Key::default() };
        let from = tenant.map_or(background, |tenant| Key { group: tenant.into(), ..Key::default() });
        self.order.range((Included(from), Unbounded)).next().map(|(&key, &id)| (key, id))
    }
}
