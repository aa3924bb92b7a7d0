//! Waiting requests: their order, tenants' turns, counts and limits, and the times at which deadlines are checked.
//!
//! This room owns the queue in the order of the policy, the virtual counters of tenants, the block that each request
//! awaits, the batch under static and dynamic batching, and the requests rejected in a plan.
//!
//! It may not know running sequences, free blocks or slots: the caller decides whether a request fits.

mod awaited;
mod deadlines;
mod order;
mod shares;
mod waiting;

pub(crate) use deadlines::Deadlines;
pub(crate) use order::Walk;
pub(crate) use waiting::{Kinds, Waiting};
