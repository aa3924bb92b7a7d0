//! Journals, replayed: as they were, and under other settings.

use crate::scheduler::{batching_of, policy_of};
use crate::simulate::report_dict;
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Makes every recorded call again, and says whether every decision was the same.
#[pyfunction]
pub(crate) fn replay<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let script = read(journal)?;
    let (replayed, report) = py.detach(|| sim::recorded(&script)).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let dict = PyDict::new(py);
    dict.set_item("config", config_dict(py, &script.config)?)?;
    dict.set_item("report", report_dict(py, &report)?)?;
    dict.set_item("calls", script.calls.len())?;
    dict.set_item("truncated", script.truncated)?;
    dict.set_item("hash", format!("{:016x}", replayed.hash))?;
    dict.set_item("differs_at", replayed.differs_at)?;
    dict.set_item("step_model", replayed.scheduler.model().coefficients())?;
    Ok(dict)
}

/// Lives the recorded requests again in virtual time, with steps that take
/// what the journal's took, under the recorded settings changed by `settings`.
#[pyfunction]
pub(crate) fn what_if<'py>(py: Python<'py>, journal: &[u8], settings: &Bound<'_, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    let (script, replayed) = replayed(py, journal)?;
    if settings.contains("block_size")? {
        return Err(PyValueError::new_err("block_size cannot be changed: the recorded names are of whole blocks"));
    }
    let config = changed(script.config, settings)?;
    let machine = sim::Machine {
        step: sim::StepTime::linear(replayed.scheduler.model().coefficients()),
        swap_ns_per_block: config.swap_ns_per_block,
    };
    let report = py.detach(|| sim::simulate(config, sim::jobs(&script, &replayed.ended), &machine));
    let report = report.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let dict = PyDict::new(py);
    dict.set_item("config", config_dict(py, &config)?)?;
    dict.set_item("report", report_dict(py, &report)?)?;
    Ok(dict)
}

fn read(journal: &[u8]) -> PyResult<core::Script> {
    core::Script::read(journal).map_err(|error| PyValueError::new_err(error.to_string()))
}

pub(crate) fn replayed(py: Python<'_>, journal: &[u8]) -> PyResult<(core::Script, core::Replayed)> {
    let script = read(journal)?;
    let replayed = py.detach(|| script.replay()).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok((script, replayed))
}

/// The settings by the names that `Scheduler` takes them under.
fn config_dict<'py>(py: Python<'py>, config: &core::Config) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let (batching, size, timeout) = match config.batching {
        core::Batching::Continuous => ("continuous", None, 0),
        core::Batching::Static { size } => ("static", Some(size), 0),
        core::Batching::Dynamic { size, timeout } => ("dynamic", Some(size), timeout),
    };
    dict.set_item("num_blocks", config.num_blocks)?;
    dict.set_item("block_size", config.block_size)?;
    dict.set_item("max_tokens", config.max_tokens)?;
    dict.set_item("max_seqs", config.max_seqs)?;
    dict.set_item("max_model_len", config.max_model_len)?;
    dict.set_item("prefix_caching", config.prefix_caching)?;
    dict.set_item("watermark", config.watermark)?;
    dict.set_item("policy", config.policy.name())?;
    dict.set_item("batching", batching)?;
    dict.set_item("batch_size", size)?;
    dict.set_item("batch_timeout", timeout)?;
    dict.set_item("max_queued_reqs", (config.max_queued_reqs != u32::MAX).then_some(config.max_queued_reqs))?;
    dict.set_item("max_queued_tokens", (config.max_queued_tokens != u64::MAX).then_some(config.max_queued_tokens))?;
    dict.set_item("ageing", config.ageing)?;
    dict.set_item("target_itl", (config.target_itl > 0).then_some(config.target_itl))?;
    dict.set_item("host_blocks", config.host_blocks)?;
    dict.set_item("swap_ns_per_block", config.swap_ns_per_block)?;
    Ok(dict)
}

/// `config` with what `settings` says instead.
pub(crate) fn changed(mut config: core::Config, settings: &Bound<'_, PyDict>) -> PyResult<core::Config> {
    let now = config_dict(settings.py(), &config)?;
    let names = now.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>().join(", ");
    now.update(settings.as_mapping())?;
    for (name, value) in settings {
        let name: String = name.extract()?;
        match name.as_str() {
            "num_blocks" => config.num_blocks = value.extract()?,
            "block_size" => config.block_size = value.extract()?,
            "max_tokens" => config.max_tokens = value.extract()?,
            "max_seqs" => config.max_seqs = value.extract()?,
            "max_model_len" => config.max_model_len = value.extract()?,
            "prefix_caching" => config.prefix_caching = value.extract()?,
            "watermark" => config.watermark = value.extract()?,
            "policy" => config.policy = policy_of(&value.extract::<String>()?)?,
            "batching" | "batch_size" | "batch_timeout" => {}
            "max_queued_reqs" => config.max_queued_reqs = value.extract::<Option<u32>>()?.unwrap_or(u32::MAX),
            "max_queued_tokens" => config.max_queued_tokens = value.extract::<Option<u64>>()?.unwrap_or(u64::MAX),
            "ageing" => config.ageing = value.extract()?,
            "target_itl" => config.target_itl = value.extract::<Option<u64>>()?.unwrap_or(0),
            "host_blocks" => config.host_blocks = value.extract()?,
            "swap_ns_per_block" => config.swap_ns_per_block = value.extract()?,
            _ => return Err(PyValueError::new_err(format!("no setting {name:?}: there are {names}"))),
        }
    }
    let get = |name: &str| now.get_item(name).map(|value| value.expect("the dict has all settings"));
    let size = get("batch_size")?.extract::<Option<u32>>()?.unwrap_or(config.max_seqs);
    config.batching = batching_of(&get("batching")?.extract::<String>()?, size, get("batch_timeout")?.extract()?)?;
    Ok(config)
}
