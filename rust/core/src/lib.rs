//! The scheduling half of the engine: which tokens run next, and in which
//! blocks of the KV cache they live.
//!
//! Pure: no clock (time is an argument), no threads, no I/O, no tensors. The
//! same calls at the same times give the same decisions, bit for bit, which is
//! what makes the property test, replay and simulation one piece of code.
//!
//! A step is [`Scheduler::plan`], [`StepPlan::fill`], the model's forward pass
//! (somebody else's), [`Scheduler::commit`].

mod batch;
mod block;
mod config;
mod error;
mod hash;
mod queue;
mod scheduler;
mod sequence;

pub use batch::{Chunk, Lens, Seated, StepBuffers, StepPlan};
pub use block::{BlockId, BlockPool, BlockTable, Chain};
pub use config::Config;
pub use error::{ConfigError, Rejected};
pub use hash::BlockHash;
pub use scheduler::{Scheduler, Stats};
pub use sequence::{Ended, FinishReason, Output, Outputs, Request, SeqId, Time, Token};
