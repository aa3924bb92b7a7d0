//! Replays journals, unchanged or under other settings.

use crate::settings;
use crate::simulate::{or_none, packed, report_dict};
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

/// Repeats every recorded call and reports whether every decision was the same.
#[pyfunction]
pub(crate) fn replay<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let parsed = read(journal)?;
    let (replayed, report) = py.detach(|| sim::recorded(&parsed)).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let dict = PyDict::new(py);
    dict.set_item("config", settings::dict(py, &parsed.config)?)?;
    dict.set_item("report", report_dict(py, &report)?)?;
    dict.set_item("calls", parsed.calls.len())?;
    dict.set_item("truncated", parsed.truncated)?;
    dict.set_item("hash", format!("{:016x}", replayed.hash))?;
    dict.set_item("differs_at", replayed.differs_at)?;
    dict.set_item("step_model", replayed.scheduler.model().coefficients())?;
    Ok(dict)
}

/// Simulates the recorded requests in virtual time under the recorded settings with `changes`. Step durations are
/// learned from the journal.
#[pyfunction]
pub(crate) fn what_if<'py>(py: Python<'py>, journal: &[u8], changes: &Bound<'_, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    let (parsed, replayed) = replayed(py, journal)?;
    if changes.contains("block_size")? {
        return Err(PyValueError::new_err("block_size cannot be changed: the recorded names are of whole blocks"));
    }
    let config = settings::changed(parsed.config, changes)?;
    let machine = sim::Machine {
        step: sim::StepTime::linear(replayed.scheduler.model().coefficients()),
        swap_ns_per_block: config.swap_ns_per_block,
    };
    let report = py.detach(|| sim::simulate(config, sim::jobs(&parsed, &replayed.ended), &machine));
    let report = report.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let dict = PyDict::new(py);
    dict.set_item("config", settings::dict(py, &config)?)?;
    dict.set_item("report", report_dict(py, &report)?)?;
    Ok(dict)
}

/// The work and the duration of each step in a journal.
#[pyfunction]
pub(crate) fn step_times<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let (_, replayed) = replayed(py, journal)?;
    Ok(packed(
        py,
        replayed.timings.iter().map(|timing| {
            let core::Load { prefill_tokens, decode_seqs, context_tokens, prefill_pairs, .. } = timing.load;
            let load = [prefill_tokens.into(), decode_seqs.into(), context_tokens, prefill_pairs].map(|number| number as i64);
            [load[0], load[1], load[2], load[3], or_none(timing.took), or_none(timing.cycle)]
        }),
    ))
}

fn read(journal: &[u8]) -> PyResult<core::ParsedJournal> {
    core::ParsedJournal::read(journal).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn replayed(py: Python<'_>, journal: &[u8]) -> PyResult<(core::ParsedJournal, core::Replayed)> {
    let parsed = read(journal)?;
    let replayed = py.detach(|| parsed.replay()).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok((parsed, replayed))
}
