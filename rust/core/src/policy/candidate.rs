//! A request as a policy sees it.

use crate::request::{Tier, Time};

/// A waiting or running request as a policy sees it: numbers, all of them copies.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The request's service tier. The scheduler puts urgent tiers first, except before tenants that take turns.
    pub tier: Tier,
    /// The request's class, as its caller gave it. Lower is more urgent.
    pub priority: i32,
    /// When the request arrived.
    pub arrived: Time,
    /// Whether the request has run before.
    pub started: bool,
    /// Tokens found in the prefix cache at the latest lookup: see [`CacheUse`](super::CacheUse).
    pub cached_tokens: u32,
    /// The deadline of the last token.
    pub deadline: Option<Time>,
    /// The deadline of the first token. `None` once the request has one.
    pub ttft_deadline: Option<Time>,
    /// Output tokens left by the caller's prediction. `None` without a prediction.
    pub predicted_output: Option<u32>,
    /// Output tokens left by the caller's prediction, or up to the request's maximum. At least 1.
    pub output_left: u32,
    /// Predicted time of the request's remaining work.
    pub estimate: Estimate,
    /// Predicted microseconds to compute or copy again what a preemption takes from the request. 0 for a waiting request.
    pub preemption_cost: Time,
    /// The request's weight.
    pub weight: u32,
    /// The service of the request's tenant divided by its weight, where tenants take turns. 0 elsewhere.
    pub tenant_service: u64,
    /// Running sequences of the request's tenant.
    pub tenant_slots: u32,
}

impl Candidate {
    /// Predicted microseconds of the remaining prompt and output.
    pub fn work_left(&self) -> Time {
        self.estimate.time(self.output_left)
    }
}

/// Predicted time of a request's remaining work.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// Microseconds of the rest of the prompt.
    pub prompt: f64,
    /// Microseconds of an output token.
    pub token: f64,
    /// Whether the times were learned from steps. Before that they are guesses.
    pub is_learned: bool,
}

impl Estimate {
    /// Microseconds of the rest of the prompt and of `output` tokens.
    pub fn time(&self, output: u32) -> Time {
        (self.prompt + self.token * f64::from(output)) as Time
    }
}
