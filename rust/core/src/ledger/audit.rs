//! The audit of the queue: by which rule one request was served before another.

use crate::policy::{Key, Rules};
use crate::request::{Tier, named_enum, nonzero};
use serde::Serialize;

/// A request's place in the queue when it first started, or now if it waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePosition {
    pub(crate) key: Key,
    /// Whether it started because it had waited too long.
    pub(crate) aged: bool,
    /// Whether it did not fit into the free blocks at some time.
    pub(crate) blocked: bool,
}

named_enum! {
    /// Why a request was served before another.
    pub enum Rule {
        /// Its tier was more urgent.
        Tier = "tier",
        /// Its class was more urgent.
        Priority = "priority",
        /// Its tenant had less service for its weight.
        Fairness = "fairness",
        /// The policy put it first: less slack, less work or a longer cached prefix.
        Policy = "policy",
        /// It arrived earlier.
        Arrival = "arrival",
        /// It had waited too long.
        Ageing = "ageing",
        /// It fitted into the free blocks while the other did not.
        Fit = "fit",
        /// The other waited for a prompt that both share, or its place in the order changed.
        Changed = "changed",
    }
}

impl Rule {
    /// The rule by which a request at the position `first` was served before one at `second`.
    pub(crate) fn of(rules: Rules, first: &QueuePosition, second: &QueuePosition) -> Self {
        let (a, b) = (first.key, second.key);
        let background = a.tier == Tier::Background || b.tier == Tier::Background;
        match () {
            () if rules.takes_turns() && !background && a.group != b.group => Self::Fairness,
            () if a > b && first.aged => Self::Ageing,
            () if a > b && second.blocked => Self::Fit,
            () if a > b => Self::Changed,
            () if a.tier != b.tier => Self::Tier,
            () if a.group != b.group => Self::Priority,
            // Within a tenant, only a tier moves a request before one that arrived earlier.
            () if rules.takes_turns() && a.arrival_number > b.arrival_number => Self::Tier,
            () if (a.awaits_prompt, a.rank) == (b.awaits_prompt, b.rank) || rules.takes_turns() => Self::Arrival,
            () => Self::Policy,
        }
    }
}

/// The requests that were served before another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServedBefore {
    /// Number of requests, by [`Rule`].
    #[serde(rename = "served_before", serialize_with = "nonzero::<Rule, _, _>")]
    pub counts: [u32; Rule::COUNT],
    /// The first of them in the order of their start: tag, tenant and rule.
    #[serde(rename = "served_first")]
    pub first: Vec<(u64, std::sync::Arc<str>, Rule)>,
}
