//! Sessions: the requests of one conversation or agent, and which sessions take turns when their contexts do not fit together.
//!
//! This room owns each session's tenant, threads, unique blocks, requests, and whether it is active, parked or ended; the names of
//! sessions; the ends of answers by which a prompt without a name is recognised as a continuation; the line of parked
//! sessions whose requests wait; and the bucket of time for reloads.
//!
//! It may not know sequences, except as ids, nor the queue, the batch or the scheduler. It tells the cache when the blocks of a
//! session are evicted.

mod answers;
mod directory;
mod line;
mod marks;
mod reloads;
mod requests;
mod session;
mod turns;

pub use line::SessionWait;
pub(crate) use reloads::Reload;
pub(crate) use requests::Joins;
pub(crate) use session::{SessionId, SessionRef, Wait};
pub(crate) use turns::{Machine, Sessions, is_long_quiet};
