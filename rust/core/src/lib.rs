//! The scheduling half of the engine: which tokens run next, and in which
//! blocks of the KV cache they live.
//!
//! Pure: no clock (time is an argument), no threads, no I/O, no tensors. The
//! same calls at the same times give the same decisions, bit for bit, which is
//! what makes the property test, replay and simulation one piece of code.
//!
//! A step is [`Scheduler::plan`], [`StepPlan::fill`], the model's forward pass
//! (somebody else's), [`Scheduler::commit`].

mod admission;
mod batch;
mod block;
mod check;
mod config;
mod cost;
mod deadline;
mod error;
mod explain;
mod group;
mod hash;
mod host;
mod journal;
mod ledger;
mod parsed_journal;
mod policy;
mod preemption;
mod prefix;
mod queue;
mod recorder;
mod replay;
mod request;
mod reservation;
mod running;
mod saturation;
mod scheduler;
mod sequence;
mod settings;
mod share;
mod snapshot;
mod stats;
mod work;

pub use batch::{Chunk, Lens, Output, Outputs, Seated, StepBuffers, StepPlan};
pub use block::{BlockId, BlockPool, BlockTable, Chain};
pub use config::{Batching, Config};
pub use cost::{Load, StepModel};
pub use error::{ConfigError, Rejected};
pub use group::Usage;
pub use hash::{BlockHash, BlockHasher};
pub use journal::JournalError;
pub use ledger::{Cause, Ledger, PreemptionReason};
pub use parsed_journal::{Arrival, Call, ParsedJournal, STOP, Sampled};
pub use policy::Policy;
pub use recorder::Recorder;
pub use replay::{Event, Replayed, Timing};
pub use request::{FinishReason, Request, SeqId, Time, Token};
pub use reservation::Reservation;
pub use scheduler::Scheduler;
pub use settings::{SETTINGS, Setting, SettingError, SettingKind, Value};
pub use snapshot::{RowSeen, Snapshot, StepSeen, WaitSeen};
pub use stats::{Counters, Occupancy, Stall, Stats};
pub use work::{MAX_DECODE, decode_work, most_splits, prefill_work};
