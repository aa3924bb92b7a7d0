//! The policies: the order of the queue, and when a request may preempt another.
//!
//! This room owns the names and the rules. It may not know sequences, blocks, steps or any state: it is given numbers.
//!
//! docs/scheduling/policies.md lists each policy's source and guarantees.

use crate::request::{ArrivalNumber, Tier, Time};

/// The order in which waiting sequences are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower classes strictly first. First come, first served within a class.
    Priority,
    /// The tenant with the least service for its weight first (VTC, Sheng et al., OSDI'24).
    Fair,
    /// Within a class, the request that must start soonest to meet its deadline first. A request that cannot meet its
    /// deadline is dropped.
    Deadline,
    /// Least remaining work first (SRPT), by `predicted_tokens` or `max_new_tokens`.
    Shortest,
    /// Longest cached prefix first (as in `SGLang`: Zheng et al., `NeurIPS`'24).
    Prefix,
    /// Like fair, without preemption for fairness, as in the VTC paper.
    Vtc,
}

/// A tier, and a class within the tier. Smaller ones are more urgent. The class has a meaning only under policies with
/// classes.
pub(crate) type Class = (Tier, i32);

/// A position in the queue. Smaller keys are served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The request's tier, or the default tier for all but background requests under policies whose tenants take turns.
    /// The background is served in the order of arrival.
    pub(crate) tier: Tier,
    /// Class or tenant, under policies that use them.
    pub(crate) group: i64,
    pub(crate) rank: u64,
    pub(crate) arrival_number: ArrivalNumber,
}

impl Policy {
    /// Every policy, with the name used in flags and journals.
    pub const NAMES: [(&'static str, Self); 7] = [
        ("fcfs", Self::Fcfs),
        ("priority", Self::Priority),
        ("fair", Self::Fair),
        ("deadline", Self::Deadline),
        ("shortest", Self::Shortest),
        ("prefix", Self::Prefix),
        ("vtc", Self::Vtc),
    ];

    /// The policy with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, policy)| policy)
    }

    /// The policy's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, known)| *known == self).expect("all are named").0
    }

    /// Whether the policy has classes by `priority`. The lower class then goes first at every limit.
    pub(crate) fn has_classes(self) -> bool {
        matches!(self, Self::Priority | Self::Deadline)
    }

    /// Whether the policy decides between waiting requests and prompts in progress.
    pub(crate) fn is_urgent(self) -> bool {
        self.has_classes() || self == Self::Shortest
    }

    /// Whether tenants take turns by the service they have received.
    pub fn has_tenants(self) -> bool {
        matches!(self, Self::Fair | Self::Vtc)
    }

    /// Whether the policy can starve a request. The oldest request must then be admitted from time to time.
    pub(crate) fn starves(self) -> bool {
        self != Self::Fcfs && !self.has_tenants()
    }

    /// A sequence's position. `rank` is the value that the policy sorts by: the latest start time (deadline),
    /// microseconds of work left (shortest), the length of the cached prefix, reversed (prefix), or the arrival time moved
    /// by the tier (fair, vtc).
    pub(crate) fn key(self, (tier, priority): Class, tenant: u32, rank: u64, arrival_number: ArrivalNumber) -> Key {
        if tier == Tier::Background {
            return Key { tier, group: 0, rank: 0, arrival_number };
        }
        let (tier, group, rank) = match self {
            Self::Fcfs => (tier, 0, 0),
            Self::Priority => (tier, priority.into(), 0),
            Self::Fair | Self::Vtc => (Tier::default(), tenant.into(), rank),
            Self::Deadline => (tier, priority.into(), rank),
            Self::Shortest | Self::Prefix => (tier, 0, rank),
        };
        Key { tier, group, rank, arrival_number }
    }
}

/// Whether it pays to preempt a sequence with `left` microseconds of work for a request that needs `work`. `cost` is
/// the extra time spent on the preemption and on resuming. The gain must exceed the cost.
pub(crate) fn worth_preempting(left: Time, cost: Time, work: Time) -> bool {
    left > 2 * (work + cost)
}
