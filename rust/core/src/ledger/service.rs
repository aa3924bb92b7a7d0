//! Service of tenants at other engines, so that a tenant has one share of all of them.
//!
//! Tokens of two models do not cost the same, so engines tell each other the engine time of the service. Each
//! divides the time of its steps by the service that they gave, and charges others' time like service here that took as
//! long in recent steps.

use crate::request::Time;

/// Most microseconds of external service that a tenant is charged between two of its requests that leave the queue. A
/// tenant that always has more than its share at other engines would otherwise never be served here while others wait.
pub const MAX_CHARGED_EXTERNAL: Time = 10_000_000;
/// Nanoseconds of steps in a window of the measurement. Each window counts half as much as the next.
const WINDOW: u64 = 1_000_000_000;

/// Engine time per unit of service: `ns` for `service` units, both positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServiceCost {
    pub(crate) ns: u64,
    pub(crate) service: u64,
}

/// Totals since the start: nanoseconds of steps, and the service that they gave at weight 1.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) ns: u64,
    pub(crate) service: u64,
}

/// Measures the engine time per unit of service. It depends on committed steps only, so a replay has the same.
#[derive(Debug, Default)]
pub(crate) struct CostMeter {
    /// Decayed sums of the windows that have ended.
    ended: Totals,
    /// Totals at the end of the last window.
    from: Totals,
    /// Totals when tenants' service was last taken.
    taken: Totals,
}

impl CostMeter {
    /// Ends a window, if it is time.
    #[inline]
    pub(crate) fn observe(&mut self, totals: Totals) {
        if totals.ns - self.from.ns >= WINDOW {
            let sums = self.sums(totals);
            self.ended = Totals { ns: sums.ns / 2, service: sums.service / 2 };
            self.from = totals;
        }
    }

    /// The cost in recent steps. `None` before the first service that took time.
    pub(crate) fn cost(&self, totals: Totals) -> Option<ServiceCost> {
        let Totals { ns, service } = self.sums(totals);
        (ns > 0 && service > 0).then_some(ServiceCost { ns, service })
    }

    /// The cost since the last call. `None` if there was no service, whose time then counts at the next call.
    pub(crate) fn take(&mut self, totals: Totals) -> Option<ServiceCost> {
        let (ns, service) = (totals.ns - self.taken.ns, totals.service - self.taken.service);
        if ns == 0 || service == 0 {
            return None;
        }
        self.taken = totals;
        Some(ServiceCost { ns, service })
    }

    fn sums(&self, totals: Totals) -> Totals {
        Totals { ns: self.ended.ns + (totals.ns - self.from.ns), service: self.ended.service + (totals.service - self.from.service) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_follows_recent_steps() {
        let (mut meter, mut totals) = (CostMeter::default(), Totals::default());
        assert_eq!(meter.cost(totals), None);
        let mut run = |ns: u64, steps: u64| {
            for _ in 0..steps {
                totals = Totals { ns: totals.ns + ns, service: totals.service + 10 };
                meter.observe(totals);
            }
            let ServiceCost { ns, service } = meter.cost(totals).expect("steps ran");
            ns / service / 1000
        };
        assert_eq!(run(1_000_000, 1), 100);
        assert_eq!(run(1_000_000, 5000), 100);
        // Ten seconds of steps that take ten times as long.
        let cost = run(10_000_000, 1000);
        assert!((990..=1000).contains(&cost), "{cost}");
    }
}
