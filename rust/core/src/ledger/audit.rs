//! The audit of the queue: by which rule one request was served before another.

use crate::policy::{Key, Rules};
use crate::request::Tier;

/// A request's place in the queue when it first started, or now if it waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePosition {
    pub(crate) key: Key,
    /// Whether it started because it had waited too long.
    pub(crate) aged: bool,
    /// Whether it did not fit into the free blocks at some time.
    pub(crate) blocked: bool,
}

/// Why a request was served before another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Rule {
    /// Its tier was more urgent.
    Tier,
    /// Its class was more urgent.
    Priority,
    /// Its tenant had less service for its weight.
    Fairness,
    /// The policy put it first: less slack, less work or a longer cached prefix.
    Policy,
    /// It arrived earlier.
    Arrival,
    /// It had waited too long.
    Ageing,
    /// It fitted into the free blocks while the other did not.
    Fit,
    /// The other waited for a prompt that both share, or its place in the order changed.
    Changed,
}

/// Number of rules.
pub(crate) const RULES: usize = 8;

impl Rule {
    /// Every rule, with the name used in reports.
    pub const NAMES: [(Self, &'static str); RULES] = [
        (Self::Tier, "tier"),
        (Self::Priority, "priority"),
        (Self::Fairness, "fairness"),
        (Self::Policy, "policy"),
        (Self::Arrival, "arrival"),
        (Self::Ageing, "ageing"),
        (Self::Fit, "fit"),
        (Self::Changed, "changed"),
    ];

    /// The rule's name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// The rule by which a request at the position `first` was served before one at `second`.
    pub(crate) fn of(rules: &Rules, first: &QueuePosition, second: &QueuePosition) -> Self {
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedBefore {
    /// Number of requests, by [`Rule`].
    pub counts: [u32; RULES],
    /// The first of them in the order of their start: tag, tenant and rule.
    pub first: Vec<(u64, std::sync::Arc<str>, Rule)>,
}
