//! The fixed part of a policy: what it decides at all.

use super::candidate::Candidate;
use crate::request::{Tier, named_enum};
use std::num::NonZeroU8;

/// A tier, and a class within the tier. Smaller ones are more urgent. The class has a meaning only under policies with
/// classes.
pub(crate) type Class = (Tier, i32);

/// What a policy decides. Asked once, when a scheduler is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// What goes before the rank.
    pub grouping: Grouping,
    /// Whether [`rank`](super::Policy::rank) orders the requests of a group. Otherwise they go in the order of arrival.
    pub ranked: bool,
    /// Whether the order also holds between waiting requests and prompts in progress. Otherwise both share a step's tokens, and the
    /// prompt nearest to its end goes first.
    pub orders_prompts: bool,
    /// How the rank depends on the prefix cache.
    pub cache: CacheUse,
    /// Whether waiting requests preempt running ones of the same tier.
    pub preemption: Preemption,
}

/// What goes before the rank. Within a group, requests go by rank and arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Nothing: each tier has one group.
    #[default]
    Single,
    /// Classes by `priority` within each tier. The lower class goes first at every limit, and only a higher one can be preempted.
    Classes,
    /// Tenants take turns: the one with the least service for its weight goes first, and only one with more can be preempted. Tiers only
    /// move a request within its tenant.
    Tenants(Charges),
}

/// The service that a tenant is charged. It is never zero, so that every tenant gets its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charges {
    /// Service of a prompt token that was not cached.
    pub prompt_token: NonZeroU8,
    /// Service of an output token.
    pub output_token: NonZeroU8,
}

impl Charges {
    /// The service of this many tokens.
    pub(crate) fn service(self, prompt_tokens: u64, output_tokens: u64) -> u64 {
        u64::from(self.prompt_token.get()) * prompt_tokens + u64::from(self.output_token.get()) * output_tokens
    }
}

/// How a policy's rank depends on the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheUse {
    /// It does not.
    #[default]
    Unused,
    /// The cached prefix is looked up once, when a request is queued.
    WhenQueued,
    /// A request is ranked again when more of its prefix is cached. While a running prompt computes the block that it needs next, it
    /// goes behind all others of its group.
    Followed,
}

/// Whether waiting requests preempt running ones of the same tier, where [`may_preempt`](super::Policy::may_preempt) allows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// Never.
    #[default]
    Never,
    /// At every step. A request for which nothing could be preempted is asked for again when a sequence was admitted or has left.
    Free(PreemptionReason),
    /// While the time lost to preemptions is at most a fiftieth of the elapsed time.
    WithinBudget(PreemptionReason),
}

named_enum! {
    /// Why a running sequence was preempted.
    pub enum PreemptionReason {
        /// The KV cache had no free block for the next token of a running sequence.
        Blocks = "kv_blocks",
        /// A request of a more urgent class waited (priority and deadline policies).
        Priority = "priority",
        /// A request of a tenant that had been served less waited (fair policy).
        Fairness = "fairness",
        /// A request with much less work left waited (shortest policy).
        Shortest = "shortest",
    }
}

impl Rules {
    /// Whether tenants take turns by the service they have received.
    pub fn takes_turns(&self) -> bool {
        matches!(self.grouping, Grouping::Tenants(_))
    }

    /// Whether requests go in the order of arrival within each tier.
    pub(crate) fn is_arrival_order(self) -> bool {
        self.grouping == Grouping::Single && !self.can_starve()
    }

    /// Whether the order can starve a request. The oldest request is then admitted when it has waited too long. Only an order that the
    /// scheduler makes itself, by arrival or by turns, cannot.
    pub(crate) fn can_starve(self) -> bool {
        self.ranked || self.cache == CacheUse::Followed || self.grouping == Grouping::Classes
    }

    /// The service that a tenant is charged, where tenants take turns.
    pub(crate) fn charges(self) -> Option<Charges> {
        if let Grouping::Tenants(charges) = self.grouping { Some(charges) } else { None }
    }

    /// Whether a running request of this class and service may be preempted for a waiting one at all. No policy preempts against tiers,
    /// classes or tenants' turns.
    pub(crate) fn allow_preemption(self, waiting: &Candidate<'_>, class: Class, tenant_service: u64) -> bool {
        match self.grouping {
            Grouping::Single => class.0 == waiting.tier,
            Grouping::Classes => class > (waiting.tier, waiting.priority),
            Grouping::Tenants(_) => tenant_service > waiting.tenant_service,
        }
    }

    /// The least urgent tier whose sequences are not preempted just because a request of `tier` waits. Where tenants take turns, only
    /// the background is: another sequence would return to the queue and might be next.
    pub(crate) fn preempts_above(self, tier: Tier) -> Tier {
        if self.takes_turns() { tier.max(Tier::Flex) } else { tier }
    }
}
