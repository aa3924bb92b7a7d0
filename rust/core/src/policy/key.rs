//! Positions in the queue.

use super::rules::{Class, Grouping, Rules};
use crate::request::{ArrivalNumber, Tier};

/// A position in the queue. Smaller keys are served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The request's tier, or the default tier for all but background requests under policies whose tenants take turns.
    /// The background is served in the order of arrival.
    pub(crate) tier: Tier,
    /// Class or tenant, under policies that use them.
    pub(crate) group: i64,
    /// Whether the request awaits a block that a running prompt computes, and therefore goes behind the others of its group.
    pub(crate) awaits_prompt: bool,
    pub(crate) rank: u64,
    pub(crate) arrival_number: ArrivalNumber,
}

impl Key {
    /// The position of a background request.
    pub(crate) fn background(arrival_number: ArrivalNumber) -> Self {
        Self { tier: Tier::Background, arrival_number, ..Self::default() }
    }

    /// The position of a request of this class and tenant.
    pub(crate) fn new(rules: Rules, (tier, priority): Class, tenant: u32, rank: u64, arrival_number: ArrivalNumber) -> Self {
        let (tier, group) = match rules.grouping {
            Grouping::Single => (tier, 0),
            Grouping::Classes => (tier, priority.into()),
            Grouping::Tenants(_) => (Tier::default(), tenant.into()),
        };
        Self { tier, group, awaits_prompt: false, rank, arrival_number }
    }
}
