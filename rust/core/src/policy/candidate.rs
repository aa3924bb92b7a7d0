//! A request as a policy sees it.

use crate::request::{Tier, Time};

/// A waiting or running request as a policy sees it: numbers, and predictions that are computed when a policy asks for them.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    /// The request's service tier. The scheduler puts urgent tiers first, except before tenants that take turns.
    pub tier: Tier,
    /// The request's class, as its caller gave it. Lower is more urgent.
    pub priority: i32,
    /// When the request arrived.
    pub arrived: Time,
    /// Whether the request has run before.
    pub started: bool,
    /// The deadline of the last token.
    pub deadline: Option<Time>,
    /// The deadline of the first token. `None` once the request has one.
    pub ttft_deadline: Option<Time>,
    /// Whether the caller predicted the length of the output.
    pub is_predicted: bool,
    /// The request's weight.
    pub weight: u32,
    /// The service of the request's tenant divided by its weight, where tenants take turns. 0 elsewhere.
    pub tenant_service: u64,
    /// Running sequences of the request's tenant.
    pub tenant_slots: u32,
    pub(crate) predictions: &'a dyn Predictions,
}

/// What is computed when a policy asks for it.
pub(crate) trait Predictions {
    fn cached_tokens(&self) -> u32;

    fn output_left(&self) -> u32;

    fn estimate(&self) -> Estimate;

    fn preemption_cost(&self) -> Time;
}

impl Candidate<'_> {
    /// Tokens found in the prefix cache at the latest lookup: see [`CacheUse`](super::CacheUse).
    pub fn cached_tokens(&self) -> u32 {
        self.predictions.cached_tokens()
    }

    /// Output tokens left by the caller's prediction, or up to the request's maximum. At least 1.
    pub fn output_left(&self) -> u32 {
        self.predictions.output_left()
    }

    /// Predicted time of the remaining work.
    pub fn estimate(&self) -> Estimate {
        self.predictions.estimate()
    }

    /// Predicted microseconds of the remaining prompt and output.
    pub fn work_left(&self) -> Time {
        self.estimate().time(self.output_left())
    }

    /// Predicted microseconds to compute or copy again what a preemption takes from a running request.
    pub fn preemption_cost(&self) -> Time {
        self.predictions.preemption_cost()
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
