//! Journals: a scheduler's calls as bytes, from which the same decisions can be made again.
//!
//! This room owns the format and its version, the recorder that wraps a scheduler, the parser and the replay.
//!
//! It makes no decision. It knows the scheduler only by its calls, and no other room may know it, except the drafter,
//! whose drafts are recorded.

mod follower;
mod format;
mod parsed;
mod record;
mod recorder;
mod replay;

pub use follower::Follower;
pub use format::JournalError;
pub use parsed::{ParsedJournal, STOP};
pub use record::{Arrival, Call, EndedRequest, Sampled};
pub use recorder::Recorder;
pub use replay::{Event, Replayed, Timing};
