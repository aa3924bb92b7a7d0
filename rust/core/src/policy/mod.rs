//! The policies: the order of the queue, what may preempt what, and which requests are dropped.
//!
//! A policy is one file of this folder that implements [`Policy`], and one line of [`POLICIES`], from which the names in journals, the
//! flag's choices and help, and the binding are made.
//!
//! This room owns the rules. It may not know sequences, blocks, steps or any state: a policy is given numbers
//! ([`Candidate`]) and answers with numbers. The scheduler keeps the tenants' service and the budget of preemption, and enforces
//! around every policy: tiers, classes and tenants' turns, ageing, the protection of sequences that were preempted twice, at most 16
//! waiting requests a step that preempt others, and the progress of at least one sequence.
//!
//! docs/scheduling/policies.md lists each policy's source and guarantees.

mod candidate;
mod deadline;
mod fair;
mod fcfs;
mod key;
mod prefix;
mod priority;
mod rules;
mod shortest;
mod vtc;

pub use self::{deadline::Deadline, fair::Fair, fcfs::Fcfs, prefix::Prefix, priority::Priority, shortest::Shortest, vtc::Vtc};
pub(crate) use candidate::Predictions;
pub use candidate::{Candidate, Estimate};
pub(crate) use key::Key;
pub(crate) use rules::Class;
pub use rules::{CacheUse, Charges, Grouping, Preemption, PreemptionReason, Rules};

use crate::request::Time;
use std::fmt::Debug;

/// Every policy with a name.
pub static POLICIES: [&dyn Policy; 7] = [&Fcfs, &Priority, &Fair, &Deadline, &Shortest, &Prefix, &Vtc];

/// The order in which waiting requests are served, and what may preempt what.
///
/// [`rules`](Self::rules) says what the policy decides. The other methods are asked only for that, so most policies need few of
/// them. A journal can be replayed only if equal arguments have equal answers, and if the policy is one of [`POLICIES`].
///
/// ```
/// use chairlift_core::{Candidate, Config, Policy, Rules, Scheduler, Time};
///
/// /// Last come, first served.
/// #[derive(Debug)]
/// struct Lifo;
///
/// impl Policy for Lifo {
///     fn name(&self) -> &'static str {
///         "lifo"
///     }
///
///     fn help(&self) -> &'static str {
///         "the last to arrive"
///     }
///
///     fn rules(&self) -> Rules {
///         Rules { ranked: true, ..Rules::default() }
///     }
///
///     fn rank(&self, request: &Candidate) -> u64 {
///         Time::MAX - request.arrived
///     }
/// }
///
/// let scheduler = Scheduler::new(Config { scheduling_policy: &Lifo, ..Config::default() })?;
/// assert_eq!(scheduler.config().scheduling_policy.name(), "lifo");
/// # Ok::<(), chairlift_core::ConfigError>(())
/// ```
pub trait Policy: Debug + Send + Sync {
    /// The name used in flags and journals.
    fn name(&self) -> &'static str;

    /// Which request goes first, in a few words for help and documentation.
    fn help(&self) -> &'static str;

    /// What the policy decides.
    fn rules(&self) -> Rules;

    /// The position of a request in its group, under [`Rules::ranked`]. Lower ranks go first, and earlier arrivals within a rank. Asked
    /// when the request is queued and, under [`CacheUse::Followed`], when more of its prefix is cached.
    fn rank(&self, _request: &Candidate) -> u64 {
        0
    }

    /// When to drop a request before it misses its deadline. Asked only for requests with a deadline, when they are added and when the
    /// latest answer is due.
    fn drop_at(&self, _request: &Candidate) -> Option<Time> {
        None
    }

    /// Whether a waiting request may take the slot and the blocks of a running one, under [`Preemption::Free`] and
    /// [`Preemption::WithinBudget`]. Asked only for sequences that are not protected.
    fn may_preempt(&self, _waiting: &Candidate, _running: &Candidate) -> bool {
        false
    }

    /// The order of preemption within a tier, for whatever reason sequences are preempted. The highest is preempted first.
    fn victim_rank(&self, _running: &Candidate) -> i64 {
        0
    }
}

impl dyn Policy {
    /// The policy with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        POLICIES.into_iter().find(|policy| policy.name() == name)
    }
}

impl PartialEq for dyn Policy {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for dyn Policy {}
