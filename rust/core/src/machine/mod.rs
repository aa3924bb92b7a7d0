//! Several schedulers on one machine or behind one server: where a request goes, whose step is next, and who may have
//! how many bytes for KV blocks.
//!
//! This room owns the router's view of the engines' caches, the arbiter's virtual times, and the limits of the models.
//!
//! It stands above schedulers. It may not know their requests, queues or sequences: it gets reports and gives limits.

mod arbiter;
mod kv_budget;
mod router;

pub use arbiter::{Arbiter, MAX_LEAD, MAX_WAIT};
pub use kv_budget::KvBudget;
pub use router::{Chosen, EngineView, Router, RouterRequest, Routing};
