//! Tiers: the levels of urgency that hold under every policy.

use super::named_enum;

named_enum! {
    /// The tier of a request. A more urgent tier goes first under every policy, except that tenants take turns under the
    /// policies `fair` and `vtc`. Waiting requests may preempt running sequences of less urgent tiers.
    #[derive(Default)]
    pub enum Tier {
        /// Goes before all others.
        Priority = "priority",
        /// The tier of requests that ask for none.
        #[default]
        Default = "default",
        /// Goes after the default tier, and is preempted before it.
        Flex = "flex",
        /// The tier of requests of the class [`BACKGROUND`](crate::BACKGROUND).
        Background = "background",
    }
}
