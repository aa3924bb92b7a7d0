//! A request as Python's `EngineRequest` has it. Attributes are read by name.

use chairlift_core as core;
use core::Time;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use std::collections::HashMap;
use std::ops::Range;

/// `EngineRequest`. All of Python is read when it is extracted: whoever holds the scheduler's lock may not wait for the GIL.
#[derive(FromPyObject)]
pub(crate) struct EngineRequest {
    tag: u64,
    prompt: PyBackedBytes,
    sampling: Sampling,
    #[pyo3(from_py_with = given_scheduling)]
    scheduling: GivenScheduling,
    submitted: Option<Time>,
    spent: HashMap<String, Time>,
    resumed: Vec<ResumedChoice>,
    continues: Option<Continues>,
}

/// What the scheduler needs of `SamplingParams`.
#[derive(FromPyObject)]
struct Sampling {
    num_sequences: u32,
    max_tokens: Option<u32>,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    verifiable: bool,
}

/// `Scheduling`: the fields that the core has under the same names, and the others.
type GivenScheduling = (core::Request, SchedulingParts);

/// The fields of `Scheduling` that the core has in another form.
#[derive(FromPyObject)]
struct SchedulingParts {
    deadline_ms: Option<f64>,
    ttft_deadline_ms: Option<f64>,
    cache_group: String,
}

/// `ResumedChoice`.
#[derive(FromPyObject)]
struct ResumedChoice {
    choice: u32,
    answer: PyBackedBytes,
    cached_tokens: u32,
    own_cached_tokens: u32,
    submitted: Time,
    started: Time,
    first_token: Option<Time>,
}

/// `Continues`.
#[derive(FromPyObject)]
struct Continues {
    handle: u64,
    tokens: u32,
}

/// What an engine completes each request with.
pub(crate) struct Completion {
    /// Tokens that end an answer, unless it ignores them.
    pub(crate) end_tokens: Vec<u32>,
    /// Weights of tenants, 1 for the others, and their factors by tier.
    pub(crate) tenant_weights: HashMap<String, u32>,
    pub(crate) tier_weights: HashMap<String, u32>,
}

impl EngineRequest {
    /// When the request was added, at most `now`.
    pub(crate) fn submitted(&self, now: Time) -> Time {
        self.submitted.map_or(now, |submitted| submitted.min(now))
    }

    /// The time in each timeline state before that.
    pub(crate) fn spent(&self) -> PyResult<Vec<(core::TimelineState, Time)>> {
        let spent = self.spent.iter().map(|(name, time)| Some((core::TimelineState::from_name(name)?, *time))).collect::<Option<Vec<_>>>();
        spent.ok_or_else(|| PyValueError::new_err("no such state: TIMELINE_STATES has them all"))
    }

    /// Whether tokens may be drafted.
    pub(crate) fn verifiable(&self) -> bool {
        self.sampling.verifiable
    }

    /// Tags of the further answers of a new request, which are forks of the first one.
    pub(crate) fn fork_tags(&self) -> Range<u64> {
        let answers = if self.resumed.is_empty() { self.sampling.num_sequences } else { 1 };
        self.tag + 1..self.tag + u64::from(answers.max(1))
    }

    /// The handle of the held sequence that the request continues.
    pub(crate) fn continues(&self) -> Option<u64> {
        self.continues.as_ref().map(|continues| continues.handle)
    }

    /// The core's request, of the first answer if there are several. `salt` is that of its cached blocks.
    pub(crate) fn request(&self, config: &core::Config, completion: &Completion, salt: &[u8], now: Time) -> PyResult<core::Request> {
        let (scheduling, SchedulingParts { deadline_ms, ttft_deadline_ms, cache_group }) = &self.scheduling;
        let deadline = |after: Option<f64>| after.map(|ms| self.arrived(now) + (ms * 1000.0) as Time);
        let prompt = tokens(&self.prompt)?;
        // In a chat, each turn ends with an end token, the user's last one too.
        let last_end = || prompt.iter().rposition(|token| completion.end_tokens.contains(token)).map(|at| at as u32 + 1);
        let user_turn_end = scheduling.user_turn_end.or_else(|| if config.state_slots > 0 { last_end() } else { None });
        let end_tokens: &[u32] = if self.sampling.ignore_eos { &[] } else { &completion.end_tokens };
        let tenant_weight = completion.tenant_weights.get(&*scheduling.tenant).unwrap_or(&1);
        let tier_weight = completion.tier_weights.get(scheduling.tier.name()).unwrap_or(&1);
        Ok(core::Request {
            tag: self.tag,
            max_new_tokens: self.sampling.max_tokens.unwrap_or_else(|| config.max_model_len.saturating_sub(prompt.len() as u32).max(1)),
            prompt,
            stop: [&self.sampling.stop_token_ids, end_tokens].concat(),
            scope: core::CacheScope { group: cache_group.as_str().into(), salt: salt.into() }.into(),
            weight: tenant_weight * tier_weight,
            deadline: deadline(*deadline_ms),
            ttft_deadline: deadline(*ttft_deadline_ms),
            user_turn_end,
            ..scheduling.clone()
        })
    }

    /// The requests that resume `request`, each with the number of its answer.
    pub(crate) fn resumed(&self, request: &core::Request, now: Time) -> PyResult<Vec<(u32, core::Request)>> {
        let arrived = self.arrived(now);
        let resume = |one: &ResumedChoice| {
            let answer = tokens(&one.answer)?;
            let resumed = core::Resumed {
                answered: answer.len() as u32,
                cached_tokens: one.cached_tokens,
                own_cached_tokens: one.own_cached_tokens,
                submitted: arrived + one.submitted,
                started: arrived + one.started,
                first_token: one.first_token.map(|after| arrived + after),
            };
            let (tag, prompt) = (self.tag + u64::from(one.choice), [request.prompt.as_slice(), &answer].concat());
            Ok((one.choice, core::Request { tag, prompt, resumed: Some(resumed), ..request.clone() }))
        };
        self.resumed.iter().map(resume).collect()
    }

    /// The part of the held sequence `held` that the request continues.
    pub(crate) fn continued(&self, held: core::HeldId) -> Option<core::Continues> {
        self.continues.as_ref().map(|continues| core::Continues { held, tokens: continues.tokens })
    }

    fn arrived(&self, now: Time) -> Time {
        self.submitted(now).saturating_sub(self.spent.values().sum())
    }
}

fn given_scheduling(given: &Bound<'_, PyAny>) -> PyResult<GivenScheduling> {
    let fields = given.py().import("dataclasses")?.call_method1("asdict", (given,))?;
    Ok((pythonize::depythonize(&fields)?, given.extract()?))
}

/// The token ids of int32 little-endian bytes.
fn tokens(bytes: &[u8]) -> PyResult<Vec<u32>> {
    let (words, rest) = bytes.as_chunks();
    let tokens = words.iter().map(|&word| u32::try_from(i32::from_le_bytes(word))).collect::<Result<Vec<_>, _>>();
    let tokens = tokens.ok().filter(|_| rest.is_empty());
    tokens.ok_or_else(|| PyValueError::new_err("a token is negative, or its bytes are not complete"))
}

/// The names of the fields of the core's request that Python sets, or a journal records.
#[pyfunction]
pub(crate) fn request_fields() -> Vec<String> {
    core::Request::field_names()
}
