//! `fair`: tenants take turns as under `vtc`, and a tenant with few slots may take one from a tenant with many.

use super::vtc::CHARGES;
use super::{Candidate, Grouping, Policy, Preemption, PreemptionReason, Rules};

/// The tenant with the least service for its weight first (VTC, Sheng et al., OSDI'24), with preemption for fairness.
#[derive(Debug)]
pub struct Fair;

impl Policy for Fair {
    fn name(&self) -> &'static str {
        "fair"
    }

    fn help(&self) -> &'static str {
        "the tenant with the least service for its weight"
    }

    fn rules(&self) -> Rules {
        Rules { grouping: Grouping::Tenants(CHARGES), preemption: Preemption::WithinBudget(PreemptionReason::Fairness), ..Rules::default() }
    }

    /// The least served tenant takes a slot from a tenant that, counting that slot, would still have more than twice as many slots for its
    /// weight.
    fn may_preempt(&self, waiting: &Candidate, running: &Candidate) -> bool {
        let (own, others) = (u64::from(waiting.tenant_slots + 1), u64::from(running.tenant_slots));
        2 * own * u64::from(running.weight) < others * u64::from(waiting.weight)
    }

    fn victim_rank(&self, running: &Candidate) -> i64 {
        running.tenant_service as i64
    }
}
