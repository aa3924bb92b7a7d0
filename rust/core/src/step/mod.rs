//! A step as data: its chunks and block copies, the arrays for the model runner, and the drafts that it verifies.
//!
//! This room owns the order of steps: which are planned, which are committed, when each ran, and copies that an empty
//! plan could not carry out.
//!
//! It may not know why a step has its chunks: `batch` and `scheduler` decide that. It knows no sequence beyond its id.

mod draft;
mod plan;
mod steps;

pub use draft::{DraftSource, MAX_DRAFT, VerifiedDraft};
pub(crate) use plan::WHOLE_TABLE;
pub use plan::{Admitted, Chunk, Lens, StateMoves, StateSave, StepBuffers, StepPlan};
pub use steps::Stall;
pub(crate) use steps::Steps;
