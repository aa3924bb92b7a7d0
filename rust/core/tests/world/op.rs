//! The calls that the world makes.

use chairlift_core::{CacheScope, Preparation, Tier, Token};
use std::sync::Arc;

/// The number that stands for a group of tenants instead of a salt.
pub(crate) const GROUP: u8 = 2;

/// A call, or several calls that belong together.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Add {
        prompt: Vec<Token>,
        new: u32,
        stop: bool,
        salt: u8,
        /// Number of forks, and whether they are added at once or later.
        forks: usize,
        priority: i32,
        tier: Tier,
        tenant: u8,
        /// Time until the deadlines, if the request has any.
        patience: Option<u64>,
        predicted: Option<u32>,
        /// Time since the arrival, because a request may arrive during a step.
        ago: u64,
        /// If another engine has begun the request: the most tokens that it gave.
        resumed: Option<u32>,
        preparation: Option<Preparation>,
        /// The number of the session, and of a subagent of it.
        session: Option<(u8, Option<u8>)>,
    },
    /// Ends a request's preparation, if there is one. Another may follow.
    Prepare {
        which: usize,
        next: Option<Preparation>,
    },
    Abort(usize),
    /// The caller finds the end of an answer.
    Stop(usize),
    Fork(usize),
    /// Opens a held sequence.
    Open {
        salt: u8,
        tenant: u8,
    },
    ForkHeld(usize),
    DropHeld(usize),
    /// Continues a held sequence, without its last `less` tokens, with `more`.
    Continue {
        which: usize,
        less: usize,
        more: Vec<Token>,
        new: u32,
        stop: bool,
    },
    /// Restores the KV of a prefix from storage, in a group or without one.
    Restore {
        grouped: bool,
        tokens: Vec<Token>,
    },
    SetPriority(usize, i32),
    /// A tenant says that a session waits for its user, or has ended.
    NoteSession {
        tenant: u8,
        session: (u8, Option<u8>),
        ended: bool,
    },
    /// Another engine reports a tenant's service, and this engine reports that of all tenants.
    ShareService {
        tenant: u8,
        us: u64,
    },
    /// Changes the number of blocks that may have memory, and discards what is given back.
    SetBlockLimit(u32),
    /// Evicts all cached blocks.
    EvictCached,
    /// Sets the nanoseconds of a prompt token at another server.
    SetUpstreamTokenTime(u64),
    /// Closes the queue, or opens it.
    CloseQueue(bool),
    /// Advances the clock.
    Wait(u64),
    Draft {
        which: usize,
        right: usize,
        wrong: usize,
    },
    /// Plans and runs a step. Leaves up to `lag` steps uncommitted.
    Step {
        lag: usize,
        poison: Option<usize>,
        /// The request whose part of the step is not computed. It fails, and so do requests that share its blocks.
        lost: Option<usize>,
    },
}

/// The name of a session, or of one of its subagents.
pub(super) fn session_name((main, subagent): (u8, Option<u8>)) -> Arc<str> {
    subagent.map_or_else(|| format!("{main}"), |number| format!("{main}.{number}")).into()
}

pub(super) fn tenant_name(tenant: u8) -> Arc<str> {
    ["", "a", "b", "stranger"][usize::from(tenant)].into()
}

/// The scope of requests with this number as their salt. [`GROUP`] stands for a group without a salt.
pub(super) fn scope_of(salt: u8) -> Arc<CacheScope> {
    let scope = CacheScope { group: group_of(salt).into(), salt: vec![salt; usize::from(salt)].into() };
    if salt == GROUP { CacheScope { salt: [].into(), ..scope } } else { scope }.into()
}

pub(super) fn group_of(salt: u8) -> &'static str {
    if salt == GROUP { "team" } else { "" }
}
