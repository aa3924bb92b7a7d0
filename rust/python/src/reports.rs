//! The core's reports as dicts of plain data.

use chairlift_core as core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use pythonize::pythonize;
use serde::Serialize;

/// The number of a finish reason in `Outputs.finishes`, which has the first three, and in the columns of a simulation; 0 for none.
pub(crate) fn finish_code(finish: Option<core::FinishReason>) -> u8 {
    finish.map_or(0, |finish| finish as u8 + 1)
}

/// A report as a dict by field.
pub(crate) fn dict<'py>(py: Python<'py>, report: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    Ok(pythonize(py, report)?.cast_into()?)
}

/// A request's timeline. Times are in microseconds. States without time are left out.
pub(crate) fn timeline<'py>(py: Python<'py>, timeline: &core::Timeline) -> PyResult<Bound<'py, PyDict>> {
    let dict = dict(py, timeline)?;
    dict.set_item("ended", timeline.finish.map(|_| timeline.ended))?;
    dict.set_item("limit", timeline.limit().map(core::TimelineState::name))?;
    Ok(dict)
}

/// Adds the fields of a further report to a dict.
pub(crate) fn add(dict: &Bound<'_, PyDict>, report: &impl Serialize) -> PyResult<()> {
    dict.update(self::dict(dict.py(), report)?.as_mapping())
}

/// Several timelines.
pub(crate) fn timelines<'py>(py: Python<'py>, many: &[core::Timeline]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for one in many {
        list.append(timeline(py, one)?)?;
    }
    Ok(list)
}

/// Counters and gauges.
pub(crate) fn stats<'py>(py: Python<'py>, stats: &core::Stats) -> PyResult<Bound<'py, PyDict>> {
    let (dict, counters) = (dict(py, stats)?, &stats.counters);
    for ((_, name), count) in core::PreemptionReason::NAMES.iter().zip(counters.preemptions_by_reason) {
        dict.set_item(format!("preemptions_for_{name}"), count)?;
    }
    dict.set_item("preemptions", counters.preemptions_recompute + counters.preemptions_swap)?;
    dict.set_item("saturation", f64::from(stats.saturation) / 1000.0)?;
    Ok(dict)
}

/// The scheduler's state: dicts of running sequences, waiting requests and steps, and a map of the KV blocks as little-endian u32.
pub(crate) fn snapshot<'py>(py: Python<'py>, seen: &core::Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = dict(py, seen)?;
    let kv_map: Vec<u8> = seen.cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    dict.set_item("kv_map", PyBytes::new(py, &kv_map))?;
    Ok(dict)
}
