//! The engine's scheduler. It chooses the tokens of the next step and the KV cache blocks that hold them.
//!
//! The crate is pure: no clock (time is an argument), no threads, no I/O, no tensors. The same calls at the same times
//! give the same decisions, bit for bit. The property test, replay and simulation therefore run the same code.
//!
//! A step is [`Scheduler::plan`], [`StepPlan::fill`], the model's forward pass (run by the caller) and [`Scheduler::commit`].

mod batch;
mod config;
mod drafts;
mod error;
mod journal;
mod latest;
mod ledger;
mod machine;
mod memory;
mod policy;
mod queue;
mod request;
mod scheduler;
mod sequence;
mod sessions;
mod step;
mod step_time;

pub use batch::{NO_TOKEN, Output, Outputs};
pub use config::{Batching, Config, Reservation, SETTINGS, SessionTurns, Setting, SettingError, SettingKind, Value};
pub use drafts::{CORPUS_BYTES_PER_TOKEN, DraftLengths, DraftStats, Drafter};
pub use error::{ConfigError, Rejected};
pub use journal::{Arrival, Call, EndedRequest, Event, Follower, JournalError, ParsedJournal, Recorder, Replayed, STOP, Sampled, Timing};
pub use ledger::{
    Counters, MAX_CHARGED_EXTERNAL, Occupancy, QueuePosition, Rule, ServedBefore, SlotSeen, Snapshot, Stats, StepSeen, Timeline,
    TimelineState, Usage, WaitSeen,
};
pub use machine::{Arbiter, Chosen, EngineView, KvBudget, MAX_LEAD, MAX_WAIT, Router, RouterRequest, Routing};
pub use memory::{
    BlockHash, BlockHasher, BlockId, BlockPool, BlockTable, BlocksUsed, CacheChanges, Chain, Restored, StateSlot, StoredBlock, Taker,
};
pub use policy::{
    CacheUse, Candidate, Charges, Deadline, Estimate, Fair, Fcfs, Grouping, POLICIES, Policy, Preemption, PreemptionReason, Prefix,
    Priority, Rules, Shortest, Vtc,
};
pub use request::{
    BACKGROUND, CacheScope, Continues, FinishReason, HeldId, Preparation, Request, Resumed, SeqId, SessionEvent, Tier, Time, Token,
};
pub use scheduler::Scheduler;
pub use sessions::SessionWait;
pub use step::{Admitted, Chunk, DraftSource, Lens, MAX_DRAFT, Stall, StateMoves, StateSave, StepBuffers, StepPlan, VerifiedDraft};
pub use step_time::{ExpertCount, Load, StepModel};
