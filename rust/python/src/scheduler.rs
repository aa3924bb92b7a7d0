//! The scheduler's calls, as Python makes them.

use crate::buffers::StepBuffers;
use crate::errors::rejected;
use chairlift_core as core;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A planned step, spent by `Scheduler.commit`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct StepPlan {
    plan: Mutex<Option<core::StepPlan>>,
    #[pyo3(get)]
    num_tokens: usize,
    #[pyo3(get)]
    num_seqs: usize,
    #[pyo3(get)]
    num_samples: usize,
    #[pyo3(get)]
    num_copies: usize,
    #[pyo3(get)]
    seated: Vec<Seated>,
    #[pyo3(get)]
    preempted: Vec<u64>,
}

/// (row, sequence, tag, cached tokens, microseconds queued) of a sequence admitted in a step.
type Seated = (u32, u64, u64, u32, core::Time);

/// (tag, preemptions, arrived, started, first token, ended) of a request that finished.
type Ended = (u64, u32, core::Time, core::Time, core::Time, core::Time);

/// What a step gave: packed arrays of equal length, one entry a token.
#[pyclass(frozen, get_all, module = "chairlift._core")]
pub(crate) struct Outputs {
    tags: Py<PyBytes>,
    tokens: Py<PyBytes>,
    finishes: Py<PyBytes>,
    ended: Vec<Ended>,
}

/// Counters since the start, and what is true now.
#[pyclass(frozen, get_all, module = "chairlift._core")]
pub(crate) struct Stats {
    running: usize,
    waiting: usize,
    total_blocks: usize,
    free_blocks: usize,
    steps: u64,
    prompt_tokens: u64,
    prefix_queries: u64,
    prefix_hits: u64,
    generated_tokens: u64,
    preemptions: u64,
}

struct Inner {
    core: core::Scheduler,
    outputs: core::Outputs,
    sampled: Vec<i32>,
}

/// Chooses each step's tokens and the KV blocks they live in.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Scheduler(Mutex<Inner>);

impl Scheduler {
    fn lock(&self) -> PyResult<MutexGuard<'_, Inner>> {
        let broken = |_: PoisonError<_>| PyRuntimeError::new_err("the scheduler failed earlier and cannot be used");
        self.0.lock().map_err(broken)
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (*, num_blocks, block_size, max_tokens, max_seqs, max_model_len, prefix_caching = true, watermark = 0))]
    fn new(
        num_blocks: u32,
        block_size: u32,
        max_tokens: u32,
        max_seqs: u32,
        max_model_len: u32,
        prefix_caching: bool,
        watermark: u32,
    ) -> PyResult<Self> {
        let config = core::Config { num_blocks, block_size, max_tokens, max_seqs, max_model_len, prefix_caching, watermark };
        let core = core::Scheduler::new(config).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self(Mutex::new(Inner { core, outputs: core::Outputs::default(), sampled: Vec::new() })))
    }

    #[pyo3(signature = (tag, prompt, max_new_tokens, stop, now, *, salt = b"".as_slice()))]
    #[allow(clippy::needless_pass_by_value, clippy::too_many_arguments)] // what Python hands over
    fn add(
        &self,
        py: Python<'_>,
        tag: u64,
        prompt: PyBuffer<i32>,
        max_new_tokens: u32,
        stop: Vec<u32>,
        now: core::Time,
        salt: &[u8],
    ) -> PyResult<u64> {
        let prompt = prompt.to_vec(py)?.into_iter().map(u32::try_from).collect::<Result<_, _>>();
        let prompt = prompt.map_err(|_| PyValueError::new_err("prompt has a negative token"))?;
        let request = core::Request { tag, prompt, max_new_tokens, stop, salt: salt.into() };
        self.lock()?.core.add(request, now).map(core::SeqId::to_bits).map_err(rejected)
    }

    fn abort(&self, seq: u64, now: core::Time) -> PyResult<bool> {
        Ok(self.lock()?.core.abort(core::SeqId::from_bits(seq), now))
    }

    fn plan(&self, py: Python<'_>, buffers: &StepBuffers, now: core::Time) -> PyResult<Option<StepPlan>> {
        let mut inner = self.lock()?;
        buffers.check(inner.core.config())?;
        let view = buffers.view(py).ok_or_else(|| PyValueError::new_err("the step buffers changed their layout"))?;
        let Some(plan) = inner.core.plan(now) else { return Ok(None) };
        let lens = plan.fill(&inner.core, &view);
        Ok(Some(StepPlan {
            num_tokens: lens.tokens,
            num_seqs: lens.seqs,
            num_samples: lens.samples,
            num_copies: lens.copies,
            seated: plan
                .seated
                .iter()
                .map(|seated| (seated.row, seated.seq.to_bits(), seated.tag, seated.cached_tokens, seated.queued))
                .collect(),
            preempted: plan.preempted.clone(),
            plan: Mutex::new(Some(plan)),
        }))
    }

    #[allow(clippy::needless_pass_by_value)] // what Python hands over
    fn commit(&self, py: Python<'_>, plan: &StepPlan, sampled: PyBuffer<i32>, now: core::Time) -> PyResult<Outputs> {
        let have = sampled.item_count();
        if have < plan.num_samples {
            return Err(PyValueError::new_err(format!("sampled has {have} tokens, the plan samples {}", plan.num_samples)));
        }
        let mut inner = self.lock()?;
        inner.sampled.resize(have, 0);
        sampled.copy_to_slice(py, &mut inner.sampled)?;
        let spent = || PyRuntimeError::new_err("this plan was committed before");
        let plan = plan.plan.lock().map_err(|_| spent())?.take().ok_or_else(spent)?;
        let Inner { core, outputs, sampled } = &mut *inner;
        core.commit(plan, sampled, now, outputs);
        let tokens = &outputs.tokens;
        let ended = outputs.ended.iter().map(|ended| {
            let core::Ended { tag, preemptions, arrived, started, first_token, ended } = *ended;
            (tag, preemptions, arrived, started, first_token, ended)
        });
        Ok(Outputs {
            tags: packed(py, tokens, |output| output.tag.to_le_bytes())?,
            tokens: packed(py, tokens, |output| (output.token as i32).to_le_bytes())?,
            finishes: packed(py, tokens, |output| [finish_code(output.finish)])?,
            ended: ended.collect(),
        })
    }

    fn tokens(&self, py: Python<'_>, seq: u64) -> PyResult<(Py<PyBytes>, usize)> {
        let inner = self.lock()?;
        let found = inner.core.tokens(core::SeqId::from_bits(seq));
        let (tokens, prompt_len) = found.ok_or_else(|| PyKeyError::new_err("that sequence has ended"))?;
        Ok((packed(py, tokens, |token| token.to_le_bytes())?, prompt_len))
    }

    fn stats(&self) -> PyResult<Stats> {
        let core::Stats {
            running,
            waiting,
            total_blocks,
            free_blocks,
            steps,
            prompt_tokens,
            prefix_queries,
            prefix_hits,
            generated_tokens,
            preemptions,
        } = self.lock()?.core.stats();
        Ok(Stats {
            running,
            waiting,
            total_blocks,
            free_blocks,
            steps,
            prompt_tokens,
            prefix_queries,
            prefix_hits,
            generated_tokens,
            preemptions,
        })
    }

    fn check(&self) -> PyResult<()> {
        self.lock()?.core.check();
        Ok(())
    }
}

/// The code of a finish reason in `Outputs.finishes`.
fn finish_code(finish: Option<core::FinishReason>) -> u8 {
    match finish {
        None => 0,
        Some(core::FinishReason::Stop) => 1,
        Some(core::FinishReason::Length) => 2,
        Some(core::FinishReason::Error) => 3,
    }
}

/// One fixed-size little-endian field of each item, in a `bytes`.
fn packed<T, const N: usize>(py: Python<'_>, items: &[T], field: impl Fn(&T) -> [u8; N]) -> PyResult<Py<PyBytes>> {
    let bytes = PyBytes::new_with(py, items.len() * N, |bytes| {
        bytes.chunks_exact_mut(N).zip(items).for_each(|(bytes, item)| bytes.copy_from_slice(&field(item)));
        Ok(())
    })?;
    Ok(bytes.unbind())
}
