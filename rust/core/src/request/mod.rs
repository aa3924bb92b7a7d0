//! Requests and the types that they use: handles, tiers, scopes of the cache, and why a request ended.
//!
//! This room owns the vocabulary that all others share. It may not know any of them.

mod cache_scope;
mod named;
mod tier;

pub use cache_scope::CacheScope;
pub(crate) use named::{Named, named_enum, nonzero};
pub use tier::Tier;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use slotmap::{Key as _, KeyData, new_key_type};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A vocabulary index.
pub type Token = u32;

/// Microseconds on the caller's clock.
pub type Time = u64;

/// The class of background requests, under every policy: they wait while other requests wait, and are preempted for them.
pub const BACKGROUND: i32 = i32::MAX;

/// The tier of a request of class `priority` that asks for `tier`.
pub(crate) fn served_tier(tier: Tier, priority: i32) -> Tier {
    if priority == BACKGROUND { Tier::Background } else { tier }
}

/// Number of a request in the order of arrival.
pub(crate) type ArrivalNumber = u64;

new_key_type! {
    /// Handle of a held sequence. A handle is never reused.
    pub struct HeldId;

    /// Handle of a sequence. A handle is never reused, because a plan may outlive its sequences and their tokens must
    /// not reach another sequence.
    pub struct SeqId;
}

impl SeqId {
    /// The handle as an integer, for callers in other languages.
    pub fn to_bits(self) -> u64 {
        self.data().as_ffi()
    }

    /// The handle from [`to_bits`](Self::to_bits). Any other number refers to no sequence.
    pub fn from_bits(bits: u64) -> Self {
        KeyData::from_ffi(bits).into()
    }
}

/// The held sequence that a request continues. If the request ends by a stop or by its length, the held sequence gets
/// the request's computed tokens. Otherwise it stays as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Continues {
    /// The held sequence.
    pub held: HeldId,
    /// Leading tokens of the prompt that are tokens of the held sequence.
    pub tokens: u32,
}

/// A caller's request.
///
/// A field is defined here and, if callers set it, under the same name in Python's `Scheduling`. The serialised fields are
/// read from there by name, and a journal records them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Request {
    /// The caller's identifier, copied to every output.
    pub tag: u64,
    /// Prompt tokens. At least one. Of a resumed request, prompt and answer so far.
    #[serde(skip)]
    pub prompt: Vec<Token>,
    /// Maximum number of tokens to generate. At least 1.
    pub max_new_tokens: u32,
    /// Tokens that end the request when sampled.
    #[serde(skip)]
    pub stop: Vec<Token>,
    /// Requests share cached blocks only in equal scopes.
    #[serde(skip)]
    pub scope: Arc<CacheScope>,
    /// The request's class. Within a tier, lower classes go first under policies with classes.
    pub priority: i32,
    /// The request's tier. The class [`BACKGROUND`] implies the tier [`Tier::Background`].
    pub tier: Tier,
    /// The request's tenant.
    pub tenant: Arc<str>,
    /// The tenant's weight against other tenants, at least 1.
    pub weight: u32,
    /// Time by which the request must have ended.
    pub deadline: Option<Time>,
    /// Time by which the first token must be generated.
    pub ttft_deadline: Option<Time>,
    /// Output length that the caller predicts.
    pub predicted_tokens: Option<u32>,
    /// The tenant's name for the session that the request belongs to. Another tenant's equal name is another session.
    pub session: Option<Arc<str>>,
    /// The tenant's name for the session that began this one, such as a main agent's for its subagent.
    pub parent_session: Option<Arc<str>>,
    /// Tokens of the prompt up to the end of the user's last turn. A template may drop the thinking after it and even its own prompt for it,
    /// so the next prompt of the conversation is sure to begin with these only. A model with recurrent layers saves its state there.
    pub user_turn_end: Option<u32>,
    /// The preparation that the request waits for, if it cannot run yet.
    pub preparation: Option<Preparation>,
    /// Set if another engine has begun the request.
    #[serde(skip)]
    pub resumed: Option<Resumed>,
    /// The held sequence that the request continues.
    #[serde(skip)]
    pub continues: Option<Continues>,
}

impl Request {
    /// The serialised fields by name, as msgpack.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("a struct of numbers and texts")
    }

    /// The request of [`to_bytes`](Self::to_bytes). A missing field has its default, and an unknown one is ignored.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        rmp_serde::from_slice(bytes).ok()
    }

    /// The names of the serialised fields.
    #[allow(clippy::zero_sized_map_values)] // the values are skipped
    pub fn field_names() -> Vec<String> {
        let fields: BTreeMap<String, IgnoredAny> = rmp_serde::from_slice(&Self::default().to_bytes()).expect("it was just written");
        fields.into_keys().collect()
    }
}

named_enum! {
    /// What a tenant says of one of its sessions between two requests.
    pub enum SessionEvent {
        /// The latest answer called no tool: the session goes on when its user does.
        AwaitsUser = "awaits_user",
        /// The session has ended. If another request of it comes, it begins anew.
        Ended = "ended",
    }
}

named_enum! {
    /// What the caller does for a request, beside the steps of others, before it can run.
    pub enum Preparation {
        /// Compiles its grammar.
        Grammar = "grammar",
        /// Reads the KV of its prefix from storage.
        ReadCache = "read_cache",
    }
}

/// What an engine that ended had done for a request. It is not limited, charged or counted a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Tokens at the end of [`Request::prompt`] that are the answer so far. Fewer than `max_new_tokens`.
    pub answered: u32,
    /// Prompt tokens that were cached when the request was first admitted.
    pub cached_tokens: u32,
    /// Those of them that the tenant may be told of.
    pub own_cached_tokens: u32,
    /// When the request was added to its first engine.
    pub submitted: Time,
    /// When its first chunk was planned.
    pub started: Time,
    /// When its first token was committed.
    pub first_token: Option<Time>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            tag: 0,
            prompt: Vec::new(),
            max_new_tokens: 16,
            stop: Vec::new(),
            scope: Arc::default(),
            priority: 0,
            tier: Tier::default(),
            tenant: "".into(),
            weight: 1,
            deadline: None,
            ttft_deadline: None,
            predicted_tokens: None,
            session: None,
            parent_session: None,
            user_turn_end: None,
            preparation: None,
            resumed: None,
            continues: None,
        }
    }
}

named_enum! {
    /// Why a request ended. Journals store the index: the order of these values is a part of their format.
    pub enum FinishReason {
        /// The request sampled one of its stop tokens, or the caller stopped it.
        Stop = "stop",
        /// The request reached `max_new_tokens`.
        Length = "length",
        /// The model gave no valid token for the request.
        Error = "error",
        /// The request missed its deadline, or was predicted to miss it.
        Deadline = "deadline",
        /// The caller aborted the request.
        Abort = "abort",
    }
}
