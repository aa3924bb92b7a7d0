//! The work of GPU attention as lists of integers.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::copied::Copied;

/// Lists the keys that each unit of decode attention reads: see `chairlift_gpu::decode_work`.
#[pyfunction]
#[pyo3(signature = (query_starts, context_lens, *, window = None, at_once = 2_147_483_647))]
pub(crate) fn decode_work(
    py: Python<'_>,
    query_starts: Copied<i32>,
    context_lens: Copied<i32>,
    window: Option<i32>,
    at_once: i32,
) -> PyResult<Bound<'_, PyBytes>> {
    let (starts, lens) = lengths(query_starts, context_lens)?;
    if window.is_some_and(|window| window < 1) || at_once < 1 {
        return Err(PyValueError::new_err("a window has one token or more, and a device works on one split or more"));
    }
    Ok(packed(py, chairlift_gpu::decode_work(&starts, &lens, window, at_once).as_flattened()))
}

/// The largest number of units for a sequence with one token in the step: see `chairlift_gpu::most_splits`.
#[pyfunction]
#[pyo3(signature = (longest, *, window = None))]
pub(crate) fn max_splits(longest: i32, window: Option<i32>) -> PyResult<i32> {
    if longest < 1 || window.is_some_and(|window| window < 1) {
        return Err(PyValueError::new_err("contexts and windows have one token or more"));
    }
    Ok(chairlift_gpu::most_splits(longest, window))
}

/// Lists the pieces of longer chunks: see `chairlift_gpu::prefill_work`.
#[pyfunction]
#[pyo3(signature = (query_starts, context_lens, *, tokens))]
pub(crate) fn prefill_work(
    py: Python<'_>,
    query_starts: Copied<i32>,
    context_lens: Copied<i32>,
    tokens: i32,
) -> PyResult<Bound<'_, PyBytes>> {
    let (starts, lens) = lengths(query_starts, context_lens)?;
    if tokens < 1 {
        return Err(PyValueError::new_err("a tile has one token or more"));
    }
    Ok(packed(py, chairlift_gpu::prefill_work(&starts, &lens, tokens).as_flattened()))
}

fn lengths(Copied(starts): Copied<i32>, Copied(lens): Copied<i32>) -> PyResult<(Vec<i32>, Vec<i32>)> {
    if starts.len() != lens.len() + 1 {
        return Err(PyValueError::new_err(format!("{} contexts need one query start more, not {}", lens.len(), starts.len())));
    }
    Ok((starts, lens))
}

fn packed<'py>(py: Python<'py>, numbers: &[i32]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())
}
