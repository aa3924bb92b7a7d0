//! Fair sharing between tenants with virtual token counters.
//!
//! Sheng et al., "Fairness in Serving Large Language Models", OSDI'24. Each tenant has a counter that grows by its
//! service divided by its weight. The waiting tenant with the lowest counter goes first. When a tenant's queue was
//! empty, its counter is lifted to the others' level, so that idle tenants collect no credit.

use crate::ledger::{MAX_CHARGED_EXTERNAL, ServiceCost};
use crate::request::Time;
use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};

/// Counter units per token at weight 1. Weights up to this value divide it with little rounding error.
const UNIT: u64 = 1 << 24;
/// Counters at which all are lowered by half as much, before they overflow. Only their differences count.
const LARGE: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    counter: u64,
    /// Requests in the queue.
    waiting: u32,
    /// Requests that wait for the turns of their sessions, or whose prefixes are read for them.
    parked: u32,
    /// The counter as listed in the backlog. The counter itself may have grown since.
    listed: u64,
    /// The part of the counter that is not service here: lifts and external service, less what it was lowered by. It wraps around.
    foreign: u64,
    /// Service here that was already reported to other engines. It wraps around.
    reported: u64,
    /// Microseconds of external service, at other engines and models, that were charged since the last request left the queue.
    charged_external: Time,
}

/// The counters of all tenants, by tenant number.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    tenants: Vec<Share>,
    /// Tenants with waiting requests, least served first by their listed counters.
    backlog: BTreeSet<(u64, u32)>,
    /// The tenant whose queue became empty last.
    last: Option<u32>,
}

impl Shares {
    /// Creates the counter of a tenant that was never served.
    pub(crate) fn introduce(&mut self, tenant: u32) {
        if self.tenants.len() <= tenant as usize {
            self.tenants.resize(tenant as usize + 1, Share::default());
        }
        debug_assert_eq!(self.tenants[tenant as usize].waiting, 0, "a tenant that waits lost its number");
        self.tenants[tenant as usize] = Share::default();
        self.last = self.last.filter(|&last| last != tenant);
    }

    /// Records a new waiting request of `tenant`.
    pub(crate) fn arrive(&mut self, tenant: u32) {
        self.lift(tenant);
        self.wait(tenant);
    }

    /// Records a request of `tenant` that waits for its session's turn. Until [`end_session_wait`](Self::end_session_wait) the tenant waits.
    pub(crate) fn begin_session_wait(&mut self, tenant: u32) {
        self.lift(tenant);
        self.tenants[tenant as usize].parked += 1;
    }

    pub(crate) fn end_session_wait(&mut self, tenant: u32) {
        self.tenants[tenant as usize].parked -= 1;
    }

    /// Raises the counter of a tenant that did not wait to that of the others, so that it has no credit for that time.
    fn lift(&mut self, tenant: u32) {
        if self.tenants[tenant as usize].waiting == 0 && self.tenants[tenant as usize].parked == 0 {
            let others = self.least().or(self.last).map_or(0, |other| self.tenants[other as usize].counter);
            let share = &mut self.tenants[tenant as usize];
            // The returning tenant goes before tenants with the same counter.
            let lift = others.saturating_sub(1).saturating_sub(share.counter);
            share.counter += lift;
            share.foreign = share.foreign.wrapping_add(lift);
        }
    }

    /// Records a waiting request of `tenant`, new or preempted.
    pub(crate) fn wait(&mut self, tenant: u32) {
        let share = &mut self.tenants[tenant as usize];
        share.waiting += 1;
        if share.waiting == 1 {
            share.listed = share.counter;
            self.backlog.insert((share.listed, tenant));
        }
    }

    /// Records that a request of `tenant` no longer waits.
    pub(crate) fn leave(&mut self, tenant: u32) {
        let share = &mut self.tenants[tenant as usize];
        share.waiting -= 1;
        share.charged_external = 0;
        if share.waiting == 0 {
            self.backlog.remove(&(share.listed, tenant));
            self.last = Some(tenant);
        }
    }

    /// Charges service to `tenant`.
    pub(crate) fn charge(&mut self, tenant: u32, service: u64, weight: u32) {
        self.tenants[tenant as usize].counter += service * UNIT / u64::from(weight.max(1));
        self.lower_large(tenant);
    }

    /// Charges `us` microseconds of external service, up to [`MAX_CHARGED_EXTERNAL`] since the tenant's last request left
    /// the queue. `cost` is that of service here.
    pub(crate) fn charge_external(&mut self, tenant: u32, us: Time, cost: ServiceCost) {
        let share = &mut self.tenants[tenant as usize];
        let us = us.min(MAX_CHARGED_EXTERNAL - share.charged_external);
        share.charged_external += us;
        let charged = (u128::from(us) * 1000 * u128::from(cost.service) * u128::from(UNIT) / u128::from(cost.ns)) as u64;
        share.counter += charged;
        share.foreign = share.foreign.wrapping_add(charged);
        self.lower_large(tenant);
    }

    /// Lowers all counters if that of `tenant` is large. One that is so far behind becomes 0.
    fn lower_large(&mut self, tenant: u32) {
        if self.tenants[tenant as usize].counter < LARGE {
            return;
        }
        for share in &mut self.tenants {
            let less = share.counter.min(LARGE / 2);
            share.counter -= less;
            share.foreign = share.foreign.wrapping_sub(less);
            share.listed = share.listed.saturating_sub(LARGE / 2);
        }
        let waiting = self.tenants.iter().zip(0..).filter(|(share, _)| share.waiting > 0);
        self.backlog = waiting.map(|(share, tenant)| (share.listed, tenant)).collect();
    }

    /// The microseconds of service of each tenant since the last call, unless they are 0. `cost` is that of this service.
    pub(crate) fn take_service(&mut self, cost: ServiceCost) -> Vec<(u32, Time)> {
        let tenants = self.tenants.iter_mut().zip(0..).filter_map(|(share, tenant)| {
            let service = share.counter.wrapping_sub(share.foreign);
            let units = u128::from(service.wrapping_sub(share.reported));
            let us = (units * u128::from(cost.ns) / (1000 * u128::from(cost.service) * u128::from(UNIT))) as Time;
            share.reported = service;
            (us > 0).then_some((tenant, us))
        });
        tenants.collect()
    }

    pub(crate) fn counter(&self, tenant: u32) -> u64 {
        self.tenants[tenant as usize].counter
    }

    /// The least served tenant with waiting requests. Counters only grow, so an outdated entry is listed too early. It
    /// is corrected when it comes first.
    pub(crate) fn least(&mut self) -> Option<u32> {
        loop {
            let &(listed, tenant) = self.backlog.first()?;
            if self.put_right(listed, tenant) {
                return Some(tenant);
            }
        }
    }

    /// The tenant after `tenant`, approximately: behind the first, the order is that of the listed counters.
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

    #[test]
    fn turns_and_reports_go_on_after_more_service_than_a_counter_holds() {
        let mut shares = shares(3);
        let cost = ServiceCost { ns: 1000, service: 1 };
        let share = 1 << 36;
        shares.arrive(0);
        shares.arrive(1);
        for round in 0..100 {
            // 2^42 tokens and more of each of two tenants that take turns, while a third one was served nothing.
            assert_eq!(shares.least(), Some(round % 2));
            shares.charge(round % 2, share, 1);
            assert_eq!(shares.take_service(cost), [(round % 2, share)]);
            assert!(shares.counter(0).max(shares.counter(1)) < LARGE);
        }
        assert_eq!(shares.counter(0), shares.counter(1));
        shares.charge_external(0, 5, cost);
        assert_eq!((shares.least(), shares.after(1)), (Some(1), Some(0)));
        shares.arrive(2);
        assert_eq!((shares.least(), shares.counter(2)), (Some(2), shares.counter(1) - 1), "lifted to the others");
        assert_eq!(shares.take_service(cost), [], "lifts and external service are not reported");
    }
}
