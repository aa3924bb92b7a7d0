//! Drafts for speculative decoding: tokens found in earlier text, and how many of them a step verifies.
//!
//! This room owns the index of each sequence's text, the corpus of finished texts, the learned rates of acceptance, and
//! the budget of what a sequence may lose by drafts.
//!
//! It stands above the scheduler and its recorder and uses their public calls. The scheduler knows only that a sequence
//! has drafted tokens, not where they come from.

mod acceptance;
mod corpus;
mod draft_length;
mod drafter;
mod loss_budget;
mod text_index;

pub use corpus::CORPUS_BYTES_PER_TOKEN;
pub use draft_length::DraftLengths;
pub use drafter::{DraftStats, Drafter};
