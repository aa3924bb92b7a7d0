//! Whose turn it is among tenants: virtual token counters.
//!
//! Sheng et al., "Fairness in Serving Large Language Models", OSDI'24: a
//! counter per tenant grows by the service it gets over its weight; the least
//! served of those who wait goes first; one who comes back to an empty queue is
//! lifted to the others, so that idleness saves nothing up.

use crate::request::Time;
use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};

/// Service of a prompt token, and of an output token.
pub(crate) const PROMPT_TOKEN: u64 = 1;
pub(crate) const OUTPUT_TOKEN: u64 = 2;
/// Counter units of a token at weight 1: weights up to this many divide it without much loss.
const UNIT: u64 = 1 << 16;

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    counter: u64,
    waiting: u32,
    /// The counter that the backlog lists; the counter itself may have grown since.
    listed: u64,
}

/// Of the time that passes, the part that preemption for fairness may cost, as a divisor.
const BUDGET: Time = 50;
/// The longest time that is saved up for it, in microseconds.
const MAX_BUDGET: i64 = 1_000_000;

/// What preemption for fairness may still cost: a fiftieth of the time that
/// passes, and what the last one cost more.
#[derive(Debug, Default)]
pub(crate) struct PreemptionBudget {
    /// Microseconds that may be spent; below zero after one that cost more.
    left: i64,
    /// When it grew last.
    at: Time,
}

impl PreemptionBudget {
    /// Lets it grow up to `now`.
    pub(crate) fn grow(&mut self, now: Time) {
        let part = (now - self.at) / BUDGET;
        self.left = self.left.saturating_add(part as i64).min(MAX_BUDGET);
        self.at += part * BUDGET;
    }

    /// Whether somebody may be preempted.
    pub(crate) fn allows(&self) -> bool {
        self.left >= 0
    }

    /// Notes that preempting somebody costs so many microseconds.
    pub(crate) fn spend(&mut self, cost: Time) {
        self.left = self.left.saturating_sub_unsigned(cost);
    }
}

/// The counters of all tenants, by number.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    tenants: Vec<Share>,
    /// Tenants with requests that wait, least served first, as far as listed.
    backlog: BTreeSet<(u64, u32)>,
    /// Whose queue emptied last.
    last: Option<u32>,
}

impl Shares {
    /// Gives the number to a tenant that was never served.
    pub(crate) fn introduce(&mut self, tenant: u32) {
        if self.tenants.len() <= tenant as usize {
            self.tenants.resize(tenant as usize + 1, Share::default());
        }
        debug_assert_eq!(self.tenants[tenant as usize].waiting, 0, "a tenant that waits lost its number");
        self.tenants[tenant as usize] = Share::default();
        self.last = self.last.filter(|&last| last != tenant);
    }

    /// A new request of `tenant` waits.
    pub(crate) fn arrive(&mut self, tenant: u32) {
        if self.tenants[tenant as usize].waiting == 0 {
            let others = self.least().or(self.last).map_or(0, |other| self.tenants[other as usize].counter);
            let share = &mut self.tenants[tenant as usize];
            // Of equals the one that comes back goes first.
            share.counter = share.counter.max(others.saturating_sub(1));
        }
        self.wait(tenant);
    }

    /// A request of `tenant` waits, new or again.
    pub(crate) fn wait(&mut self, tenant: u32) {
        let share = &mut self.tenants[tenant as usize];
        share.waiting += 1;
        if share.waiting == 1 {
            share.listed = share.counter;
            self.backlog.insert((share.listed, tenant));
        }
    }

    /// A request of `tenant` waits no longer.
    pub(crate) fn leave(&mut self, tenant: u32) {
        let share = &mut self.tenants[tenant as usize];
        share.waiting -= 1;
        if share.waiting == 0 {
            self.backlog.remove(&(share.listed, tenant));
            self.last = Some(tenant);
        }
    }

    /// Notes service given to `tenant`.
    pub(crate) fn charge(&mut self, tenant: u32, service: u64, weight: u32) {
        self.tenants[tenant as usize].counter += service * UNIT / u64::from(weight.max(1));
    }

    pub(crate) fn counter(&self, tenant: u32) -> u64 {
        self.tenants[tenant as usize].counter
    }

    /// The least served tenant of those that wait. Counters only grow, so
    /// entries out of date are too early, and are put right as they come up.
    pub(crate) fn least(&mut self) -> Option<u32> {
        loop {
            let &(listed, tenant) = self.backlog.first()?;
            if self.put_right(listed, tenant) {
                return Some(tenant);
            }
        }
    }

    /// The one after `tenant`, roughly: behind the least the order is as listed.
    pub(crate) fn after(&self, tenant: u32) -> Option<u32> {
        let listed = self.tenants[tenant as usize].listed;
        self.backlog.range((Excluded((listed, tenant)), Unbounded)).next().map(|&(_, next)| next)
    }

    fn put_right(&mut self, listed: u64, tenant: u32) -> bool {
        let share = &mut self.tenants[tenant as usize];
        if share.counter == listed {
            return true;
        }
        share.listed = share.counter;
        self.backlog.remove(&(listed, tenant));
        self.backlog.insert((share.listed, tenant));
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(tenants: u32) -> Shares {
        let mut shares = Shares::default();
        (0..tenants).for_each(|tenant| shares.introduce(tenant));
        shares
    }

    #[test]
    fn the_least_served_goes_first_and_weights_divide() {
        let mut shares = shares(2);
        shares.arrive(0);
        shares.arrive(1);
        shares.charge(0, 100, 1);
        assert_eq!(shares.least(), Some(1));
        shares.charge(1, 150, 2);
        assert_eq!(shares.least(), Some(1), "75 for its weight");
        shares.charge(1, 100, 2);
        assert_eq!((shares.least(), shares.after(0)), (Some(0), Some(1)));
    }

    #[test]
    fn who_comes_back_is_lifted_and_who_was_preempted_is_not() {
        let mut shares = shares(3);
        shares.arrive(0);
        shares.charge(0, 100, 1);
        shares.arrive(1);
        assert_eq!(shares.counter(1), shares.counter(0) - 1, "lifted to the one that waits");
        shares.leave(0);
        shares.leave(1);
        shares.charge(1, 50, 1);
        shares.arrive(2);
        assert_eq!(shares.counter(2), shares.counter(1) - 1, "nobody waits: lifted to the one that waited last");
        shares.charge(2, 50, 1);
        shares.wait(0);
        assert_eq!(shares.counter(0), 100 * UNIT);
    }
}
