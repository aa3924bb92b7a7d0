//! The engine's scheduler. It chooses the tokens of the next step and the KV cache blocks that hold them.
//!
//! The crate is pure: no clock (time is an argument), no threads, no I/O, no tensors. The same calls at the same times
//! give the same decisions, bit for bit. The property test, replay and simulation therefore run the same code.
//!
//! A step is [`Scheduler::plan`], [`StepPlan::fill`], the model's forward pass (run by the caller) and [`Scheduler::commit`].

mod acceptance;
mod accounts;
mod admission;
mod arbiter;
mod awaited;
mod batch;
mod block;
mod compute;
mod config;
mod corpus;
mod cost;
mod deadlines;
mod drafter;
mod elsewhere;
mod energy;
mod error;
mod group;
mod hash;
mod held;
mod host;
mod journal;
mod kv;
mod kv_budget;
mod parsed_journal;
mod phase;
mod place;
mod policy;
mod queue;
mod recent_steps;
mod recorder;
mod replay;
mod request;
mod reservation;
mod router;
mod row_times;
mod running;
mod saturation;
mod scheduler;
mod sequence;
mod settings;
mod share;
mod snapshot;
mod stake;
mod stats;
mod steps;
mod text_index;
mod tier;
mod timeline;
mod turn;
mod waiting;
mod work;

pub use acceptance::{DraftSource, MAX_DRAFT, VerifiedDraft};
pub use admission::DraftAdmission;
pub use arbiter::{Arbiter, MAX_LEAD, MAX_WAIT};
pub use batch::{Admitted, Chunk, Lens, NO_TOKEN, Output, Outputs, StepBuffers, StepPlan};
pub use block::{BlockId, BlockPool, BlockTable, CacheChanges, Chain, StoredBlock};
pub use config::{Batching, Config, Reservation};
pub use corpus::CORPUS_BYTES_PER_TOKEN;
pub use cost::{Load, StepModel};
pub use drafter::{DraftStats, Drafter};
pub use elsewhere::MAX_CHARGED_ELSEWHERE;
pub use error::{ConfigError, Rejected};
pub use group::Usage;
pub use hash::{BlockHash, BlockHasher};
pub use journal::JournalError;
pub use kv_budget::{BlocksUsed, KvBudget};
pub use parsed_journal::{Arrival, Call, ParsedJournal, STOP, Sampled};
pub use policy::Policy;
pub use recent_steps::StepSeen;
pub use recorder::Recorder;
pub use replay::{Event, Replayed, Timing};
pub use request::{BACKGROUND, Continues, FinishReason, HeldId, Request, Resumed, SeqId, Time, Token};
pub use router::{Chosen, EngineView, Router, RouterRequest, Routing};
pub use scheduler::Scheduler;
pub use settings::{SETTINGS, Setting, SettingError, SettingKind, Value};
pub use snapshot::{SlotSeen, Snapshot, WaitSeen};
pub use stats::{Counters, Occupancy, Stall, Stats};
pub use tier::Tier;
pub use timeline::{PreemptionReason, Timeline, TimelineState};
pub use turn::{Rule, ServedBefore, Turn};
pub use work::{MAX_DECODE, decode_work, most_splits, prefill_work};
