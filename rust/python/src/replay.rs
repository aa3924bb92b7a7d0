//! Replays journals, unchanged or under other settings.

use crate::errors::invalid;
use crate::settings;
use crate::simulate::{interruptible, or_none, packed, report_dict};
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

/// Repeats every recorded call and reports whether every decision was the same.
#[pyfunction]
pub(crate) fn replay<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let parsed = read(journal)?;
    let (replayed, report) = py.detach(|| sim::recorded(&parsed)).map_err(invalid)?;
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
    let config = settings::changed_for_simulation(parsed.config, changes)?;
    let step = sim::StepTime::learned(replayed.scheduler.model());
    let machine = sim::Machine { draft_tokens: core::MAX_DRAFT, ..sim::Machine::new(step) };
    let report = interruptible(py, |goes_on| sim::what_if(config, &parsed, &replayed, &machine, goes_on))?;
    let dict = PyDict::new(py);
    dict.set_item("config", settings::dict(py, &config)?)?;
    dict.set_item("report", report_dict(py, &report)?)?;
    Ok(dict)
}

/// The requests of a journal with their recorded lengths and drafts, as the arrays that `simulate` takes.
#[pyfunction]
pub(crate) fn workload<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let (parsed, replayed) = replayed(py, journal)?;
    let workload = sim::recorded_workload(&parsed, &replayed);
    let requests = workload.specs.iter().map(|spec| {
        let [prompt, output, most, tenant, names] = [spec.prompt, spec.output, spec.most, spec.tenant, spec.names].map(i64::from);
        let (deadline, ttft_deadline) = (or_none(spec.deadline), or_none(spec.ttft_deadline));
        let predicted = spec.predicted.map_or(-1, i64::from);
        let (priority, model, tier) = (spec.priority.into(), spec.model.into(), spec.tier as i64);
        [spec.time as i64, prompt, output, most, tenant, priority, deadline, ttft_deadline, predicted, names, model, tier]
    });
    let dict = PyDict::new(py);
    dict.set_item("requests", packed(py, requests))?;
    dict.set_item("names", packed(py, workload.names.iter().map(|&name| [name as i64])))?;
    dict.set_item("name_block", workload.name_block)?;
    dict.set_item("tenants", workload.tenants.iter().map(|(name, weight)| (name.to_string(), *weight)).collect::<Vec<_>>())?;
    let drafts = workload.drafts.iter().map(|&(request, draft)| {
        let [position, tokens, accepted] = [draft.position, draft.tokens, draft.accepted].map(i64::from);
        [request as i64, position, tokens, accepted, draft.source.code().into()]
    });
    dict.set_item("drafts", packed(py, drafts))?;
    dict.set_item(
        "has_sessions",
        parsed.calls.iter().any(|(_, call)| matches!(call, core::Call::Add(new) if new.request.session.is_some())),
    )?;
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
    core::ParsedJournal::read(journal).map_err(invalid)
}

fn replayed(py: Python<'_>, journal: &[u8]) -> PyResult<(core::ParsedJournal, core::Replayed)> {
    let parsed = read(journal)?;
    let replayed = py.detach(|| parsed.replay()).map_err(invalid)?;
    Ok((parsed, replayed))
}
