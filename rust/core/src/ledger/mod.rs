//! What happened: timelines, usage by request, tenant and class, energy, counters, and reports as plain data.
//!
//! This room owns the clocks, each request's account, the shares of the steps' time and energy, and the measured cost of
//! service. Other rooms tell it what happens and read it.
//!
//! It decides nothing. It may not know sequences or the queue: it is given a request's account and its groups.

mod accounts;
mod audit;
mod compute;
mod energy;
mod group;
mod recent_steps;
mod saturation;
mod service;
mod snapshot;
mod stats;
mod timeline;

pub(crate) use accounts::{Accounts, LiveAccounts};
pub use audit::{QueuePosition, Rule, ServedBefore};
pub(crate) use group::Member;
pub use group::Usage;
pub use recent_steps::StepSeen;
pub use service::MAX_CHARGED_EXTERNAL;
pub(crate) use service::ServiceCost;
pub use snapshot::{SlotSeen, Snapshot, WaitSeen};
pub use stats::{Counters, Occupancy, Stats};
pub(crate) use timeline::Account;
pub use timeline::{Timeline, TimelineState};
