//! The records of a journal, each with the time since the one before it.
//!
//! [postcard](https://docs.rs/postcard) writes them as they are defined here. A variant is written as its number, so new ones come last, and
//! any other change to these types is a new version of the format.

use crate::request::{ArrivalNumber, FinishReason, Preparation, Request, SessionEvent, Time};
use crate::step::DraftSource;
use crate::step_time::COEFFICIENTS;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Record {
    /// A call of which nothing else is known.
    Call(Call),
    /// A request was added.
    Add(Added),
    /// The name of a block that generated tokens filled.
    Name {
        /// The request.
        arrival_number: ArrivalNumber,
        /// The number of the block.
        block: u32,
        #[serde(with = "postcard::fixint::le")]
        name: u64,
    },
    /// A request has ended. A replay ignores it: it is for readers that do not make the calls again.
    Ended(EndedRequest),
    /// The coefficients of the step-time model. A replay ignores it too.
    StepModel([f64; COEFFICIENTS]),
}

/// A request that was added.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Added {
    pub(super) prompt_tokens: u32,
    /// Tokens of the answer so far, if the request is resumed. They are not among the prompt's.
    pub(super) answered: Option<u32>,
    /// The number of the held sequence that the request continues, and how many of its tokens.
    pub(super) continues: Option<(u64, u32)>,
    /// The other fields by name, as msgpack, so that a new one is no new version.
    pub(super) request: Vec<u8>,
    /// The names of the full blocks of the prompt and of the answer so far.
    #[serde(with = "words")]
    pub(super) names: Vec<u64>,
}

/// One recorded call of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// A request's preparation was done.
    Prepare {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The preparation that it waits for then.
        next: Option<Preparation>,
    },
    /// A request was forked.
    Fork {
        /// Arrival number of the parent.
        parent: ArrivalNumber,
        /// The fork's tag.
        tag: u64,
    },
    /// A held sequence was opened for this tenant.
    Open(Arc<str>),
    /// A held sequence, given by its number, was forked.
    ForkHeld(u64),
    /// A held sequence, given by its number, was dropped.
    DropHeld(u64),
    /// The KV of blocks with these names was read from storage.
    Restore(#[serde(with = "words")] Vec<u64>),
    /// A request was moved to another class.
    SetPriority {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The new class.
        priority: i32,
    },
    /// The caller ended a request.
    End {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// The reason that the caller gave.
        reason: FinishReason,
    },
    /// A tenant was charged for its service at other engines.
    ChargeExternal {
        /// The tenant.
        tenant: Arc<str>,
        /// Microseconds of engine time.
        us: Time,
    },
    /// A tenant said something of one of its sessions.
    NoteSession {
        /// The tenant.
        tenant: Arc<str>,
        /// The session.
        session: Arc<str>,
        /// What it said.
        event: SessionEvent,
    },
    /// The limit of blocks with memory was set.
    SetBlockLimit(u32),
    /// The queue was closed or opened.
    CloseQueue(bool),
    /// Deadlines were checked.
    Expire,
    /// Tokens were drafted for a sequence.
    Draft {
        /// The request's arrival number.
        arrival_number: ArrivalNumber,
        /// Number of drafted tokens.
        tokens: u32,
        /// Number of accepted tokens. A reader knows it from the commit.
        #[serde(skip)]
        accepted: u32,
        /// Where they came from.
        source: DraftSource,
    },
    /// A step was planned. Contains the hash of all decisions so far.
    Plan(#[serde(with = "postcard::fixint::le")] u64),
    /// A step was committed.
    Commit(Sampled),
    /// All cached blocks were evicted.
    EvictCached,
    /// The nanoseconds of a prompt token at another server were set.
    SetUpstreamTokenTime(u64),
    /// A request was added. It is recorded as [`Record::Add`]. The last kind, because it has no number in a journal.
    #[serde(skip)]
    Add(Arc<Arrival>),
}

/// The journal's record of the tokens of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// Tags of the requests that ended for a reason other than length, and whether the reason was an error.
    pub ended: Vec<(u64, bool)>,
    /// Requests with drafted tokens, and the number of new tokens of each.
    pub drafted: Vec<(ArrivalNumber, u32)>,
}

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The arrival time.
    pub time: Time,
    /// Arrival number among all requests and forks.
    pub arrival_number: ArrivalNumber,
    /// Prompt tokens. Of a resumed request, with the answer so far.
    pub prompt_tokens: u32,
    /// The request without its prompt.
    pub request: Request,
    /// The number of the held sequence that the request continues, and how many of its tokens.
    pub continues: Option<(u64, u32)>,
}

/// What a request had when it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedRequest {
    /// The request's tag.
    pub tag: u64,
    /// When it ended: the time of the record.
    #[serde(skip)]
    pub time: Time,
    /// Why it ended.
    pub finish: FinishReason,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Prompt tokens that were cached when the request was first admitted.
    pub cached_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// When its first token was committed.
    pub first_token: Option<Time>,
}

/// Numbers whose bits are all random, in 8 bytes each.
mod words {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(words: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(words.iter().map(|word| word.to_le_bytes()))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
        Ok(Vec::<[u8; 8]>::deserialize(deserializer)?.into_iter().map(u64::from_le_bytes).collect())
    }
}
