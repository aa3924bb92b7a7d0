//! The CPU model's threads, and the work that they do between steps: sampling and log-probabilities. It is done without the GIL.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chairlift_cpu as cpu;
use cpu::Isa;
use cpu::sample::Draw;
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::copied::Copied;

/// The token of a row without a valid token.
const NONE: i32 = -1;

/// Threads that sleep until there is work. Those of a decoder are `Decoder.pool`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct ThreadPool(Arc<Mutex<cpu::ThreadPool>>);

impl ThreadPool {
    pub(crate) fn of(pool: Arc<Mutex<cpu::ThreadPool>>) -> Self {
        Self(pool)
    }
}

#[pymethods]
impl ThreadPool {
    /// Starts `threads - 1` threads. The caller is the first.
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        Ok(Self(Arc::new(Mutex::new(started(threads)?))))
    }

    /// Samples a token for each row of logits.
    #[pyo3(signature = (logits, temperature, top_k, top_p, min_p, seeds, positions))]
    fn choose<'py>(
        &self,
        py: Python<'py>,
        logits: PyReadonlyArray2<'py, f32>,
        temperature: Copied<f64>,
        top_k: Copied<i64>,
        top_p: Copied<f64>,
        min_p: Copied<f64>,
        seeds: Copied<u64>,
        positions: Copied<i32>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let rows = rows(&logits)?;
        let (Copied(temperature), Copied(top_k), Copied(top_p)) = (temperature, top_k, top_p);
        let (Copied(min_p), Copied(seeds), Copied(positions)) = (min_p, seeds, positions);
        if [temperature.len(), top_k.len(), top_p.len(), min_p.len(), seeds.len(), positions.len()] != [rows; 6] {
            return Err(PyValueError::new_err(format!("there must be {rows} settings of each kind, one a row of the logits")));
        }
        let draws: Vec<Draw> = (0..rows)
            .map(|i| Draw {
                temperature: temperature[i],
                top_k: usize::try_from(top_k[i]).unwrap_or(0),
                top_p: top_p[i],
                min_p: min_p[i],
                uniform: cpu::sample::uniform(seeds[i], positions[i] as u64),
            })
            .collect();
        let logits = numbers(&logits)?;
        let tokens = py.detach(|| cpu::sample::choose(Isa::best(), logits, &draws, &mut lock(&self.0)));
        let numbers = tokens.into_iter().map(|token| token.map_or(NONE, |token| token as i32));
        Ok(PyBytes::new(py, &numbers.flat_map(i32::to_le_bytes).collect::<Vec<_>>()))
    }

    /// Scores each row of logits: see `chairlift.runner.sampling.logprobs.score`.
    #[pyo3(signature = (logits, tokens, count))]
    fn score<'py>(
        &self,
        py: Python<'py>,
        logits: PyReadonlyArray2<'py, f32>,
        tokens: Copied<i64>,
        count: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (rows, vocabulary) = (rows(&logits)?, logits.shape()[1]);
        let tokens: Vec<u32> = tokens.0.into_iter().map(|token| u32::try_from(token).unwrap_or(u32::MAX)).collect();
        if tokens.len() != rows || tokens.iter().any(|token| *token as usize >= vocabulary) {
            return Err(PyValueError::new_err(format!("there must be {rows} tokens, one a row of the logits, each below {vocabulary}")));
        }
        if count > vocabulary {
            return Err(PyValueError::new_err(format!("{count} likeliest of {vocabulary} tokens were asked for")));
        }
        let logits = numbers(&logits)?;
        let scores = py.detach(|| cpu::sample::score(Isa::best(), logits, &tokens, count, &mut lock(&self.0)));
        let bytes = scores.iter().flat_map(|score| {
            let likeliest = score.likeliest.iter();
            let own = [score.token, score.logprob.to_bits(), score.rank];
            own.into_iter().chain(likeliest.clone().map(|(token, _)| *token)).chain(likeliest.map(|(_, logprob)| logprob.to_bits()))
        });
        Ok(PyBytes::new(py, &bytes.flat_map(u32::to_le_bytes).collect::<Vec<_>>()))
    }
}

/// Number of rows of logits.
fn rows(logits: &PyReadonlyArray2<'_, f32>) -> PyResult<usize> {
    match *logits.shape() {
        [rows, vocabulary] if rows == 0 || vocabulary > 0 => Ok(rows),
        ref shape => Err(PyValueError::new_err(format!("logits must be [rows, vocabulary], not {shape:?}"))),
    }
}

/// The values of C-contiguous logits. Numpy's borrow flags prevent other Rust code from writing to them meanwhile.
fn numbers<'a>(logits: &'a PyReadonlyArray2<'_, f32>) -> PyResult<&'a [f32]> {
    logits.as_slice().map_err(|_| PyValueError::new_err("logits must be a C-contiguous float32 array"))
}

/// Starts a pool of `threads` threads.
pub(crate) fn started(threads: usize) -> PyResult<cpu::ThreadPool> {
    cpu::ThreadPool::new(threads)
        .map_err(|error| PyRuntimeError::new_err(format!("{threads} threads cannot be started ({error}): lower --threads")))
}

/// Locks a mutex and ignores poisoning. A step that panicked leaves no partial state that the next step reads.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
