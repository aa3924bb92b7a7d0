//! Who goes first: the order of the queue, and whether one may take another's place.
//!
//! docs/scheduling/policies.md has each policy's source and guarantees.

use crate::request::{ArrivalNumber, Time};

/// The order in which waiting sequences are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower classes first, strictly; first come within a class.
    Priority,
    /// The tenant that had the least service for its weight first (VTC, Sheng et al., OSDI'24).
    Fair,
    /// Within a class, the one that must start soonest to meet its deadline; what cannot is dropped.
    Deadline,
    /// Least remaining work first (SRPT), by `predicted_tokens` or `max_new_tokens`.
    Shortest,
    /// Longest cached prefix first (as in `SGLang`: Zheng et al., `NeurIPS`'24).
    Prefix,
    /// As fair, without preemption for fairness, as the paper has it.
    Vtc,
}

/// A place in the queue: smaller is served earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Class or tenant, where the policy knows such.
    pub(crate) group: i64,
    pub(crate) rank: u64,
    pub(crate) arrival_number: ArrivalNumber,
}

impl Policy {
    /// Every policy, by the name that flags and journals use.
    pub const NAMES: [(&'static str, Self); 7] = [
        ("fcfs", Self::Fcfs),
        ("priority", Self::Priority),
        ("fair", Self::Fair),
        ("deadline", Self::Deadline),
        ("shortest", Self::Shortest),
        ("prefix", Self::Prefix),
        ("vtc", Self::Vtc),
    ];

    /// The policy of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, policy)| policy)
    }

    /// The policy's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, known)| *known == self).expect("all are named").0
    }

    /// Whether `priority` separates classes of which the lower goes first at every limit.
    pub(crate) fn has_classes(self) -> bool {
        matches!(self, Self::Priority | Self::Deadline)
    }

    /// Whether tenants take turns by the service that each has had.
    pub(crate) fn has_tenants(self) -> bool {
        matches!(self, Self::Fair | Self::Vtc)
    }

    /// Whether it can leave a request waiting for ever, so that the oldest must be let through from time to time.
    pub(crate) fn starves(self) -> bool {
        self != Self::Fcfs && !self.has_tenants()
    }

    /// Where a sequence stands; `rank` is what the policy measures: the latest time to start (deadline), microseconds of work
    /// left (shortest), how short the cached prefix is (prefix).
    pub(crate) fn key(self, priority: i32, tenant: u32, rank: u64, arrival_number: ArrivalNumber) -> Key {
        match self {
            Self::Fcfs => Key { group: 0, rank: 0, arrival_number },
            Self::Priority => Key { group: priority.into(), rank: 0, arrival_number },
            Self::Fair | Self::Vtc => Key { group: tenant.into(), rank: 0, arrival_number },
            Self::Deadline => Key { group: priority.into(), rank, arrival_number },
            Self::Shortest | Self::Prefix => Key { group: 0, rank, arrival_number },
        }
    }
}

/// Work that a newcomer may displace only if the gain exceeds the cost: `left` microseconds, of which `cost` more would
/// be spent on stopping it and going on, for somebody who needs `work`.
pub(crate) fn worth_preempting(left: Time, cost: Time, work: Time) -> bool {
    left > 2 * (work + cost)
}
