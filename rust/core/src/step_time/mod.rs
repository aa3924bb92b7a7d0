//! How long steps take: a model that is learned from committed steps.
//!
//! This room owns the coefficients of the model, the times of recent steps by their number of rows, and what background
//! requests add to a step and may add.
//!
//! It knows a step by its load: numbers of tokens and rows. It may not know sequences, blocks, the queue or the clock.

mod background;
mod model;
mod row_times;

pub(crate) use background::{BackgroundCost, BackgroundRoom};
pub(crate) use model::{AIM, COEFFICIENTS, FIRST_PREFILL};
pub use model::{ExpertCount, Load, StepModel};
