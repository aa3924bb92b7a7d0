//! Tiers: the levels of urgency that hold under every policy.

use serde::{Deserialize, Serialize};

/// The tier of a request. A more urgent tier goes first under every policy, except that tenants take turns under the
/// policies `fair` and `vtc`. Waiting requests may preempt running sequences of less urgent tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Goes before all others.
    Priority,
    /// The tier of requests that ask for none.
    #[default]
    Default,
    /// Goes after the default tier, and is preempted before it.
    Flex,
    /// The tier of requests of the class [`BACKGROUND`](crate::BACKGROUND).
    Background,
}

/// Number of tiers.
pub(crate) const TIERS: usize = 4;

impl Tier {
    /// Every tier, with the name used in reports.
    pub const NAMES: [(Self, &'static str); TIERS] =
        [(Self::Priority, "priority"), (Self::Default, "default"), (Self::Flex, "flex"), (Self::Background, "background")];

    /// The tier with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|&(tier, _)| tier)
    }

    /// The tier's name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}
