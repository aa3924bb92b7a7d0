//! Simulations: a workload and its results as flat arrays.

use crate::copied::Copied;
use crate::errors::invalid;
use crate::reports;
use crate::router;
use crate::settings::changed_for_simulation;
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// Number of columns per request.
const COLUMNS: usize = 12;

/// Curve points (tokens, microseconds), and microseconds per decoding sequence, context token and pair of tokens: see
/// [`sim::StepTime`].
pub(crate) type StepTime = (Vec<(f64, f64)>, f64, f64, f64);

/// Runs requests through `replicas` schedulers in virtual time.
#[pyfunction]
#[pyo3(signature = (requests, names, name_block, tenants, settings, step_time, *, drafts = None, draft_tokens = 0, replicas = 1, routing = "round-robin"))]
pub(crate) fn simulate<'py>(
    py: Python<'py>,
    requests: Copied<i64>,
    names: Copied<i64>,
    name_block: u32,
    tenants: Vec<(String, u32)>,
    settings: &Bound<'py, PyDict>,
    step_time: StepTime,
    drafts: Option<Copied<i64>>,
    draft_tokens: usize,
    replicas: usize,
    routing: &str,
) -> PyResult<Bound<'py, PyList>> {
    let drafts = drafts.map_or(Ok(Vec::new()), |drafts| recorded_drafts(&drafts.0))?;
    let workload = sim::Workload { drafts, ..workload(&requests.0, names.0, name_block, tenants)? };
    let config = changed_for_simulation(core::Config::default(), settings)?;
    let machine = sim::Machine { draft_tokens, ..machine(step_time)? };
    let routing = router::named(routing)?;
    run(py, |goes_on| sim::simulate_fleet(config, workload.jobs(), &machine, replicas, routing, goes_on))
}

/// Runs requests through a scheduler for each model in virtual time, a step of one model at a time.
#[pyfunction]
pub(crate) fn simulate_models<'py>(
    py: Python<'py>,
    requests: Copied<i64>,
    names: Copied<i64>,
    name_block: u32,
    tenants: Vec<(String, u32)>,
    models: Vec<(Bound<'py, PyDict>, StepTime, u32, Option<core::Time>)>,
) -> PyResult<Bound<'py, PyList>> {
    let workload = workload(&requests.0, names.0, name_block, tenants)?;
    if workload.specs.iter().any(|spec| spec.model as usize >= models.len()) {
        return Err(PyValueError::new_err("a request's model is missing"));
    }
    let models = models.into_iter().map(|(settings, step_time, weight, itl)| {
        let config = changed_for_simulation(core::Config::default(), &settings)?;
        Ok(sim::SharedModel { config, machine: machine(step_time)?, weight, itl })
    });
    let models = models.collect::<PyResult<Vec<_>>>()?;
    run(py, |goes_on| sim::simulate_models(&models, workload.jobs(), goes_on))
}

/// The requests of a workload, without drafts.
pub(crate) fn workload(requests: &[i64], names: Vec<i64>, name_block: u32, tenants: Vec<(String, u32)>) -> PyResult<sim::Workload> {
    let specs = requests.chunks_exact(COLUMNS).map(spec).collect::<Option<Vec<_>>>();
    let workload = sim::Workload {
        specs: specs.ok_or_else(|| PyValueError::new_err("a number of a request is negative or too large"))?,
        tenants: tenants.into_iter().map(|(name, weight)| (name.into(), weight)).collect(),
        names: names.into_iter().map(|name| name as u64).collect(),
        name_block,
        drafts: Vec::new(),
    };
    let wanted: usize = workload.specs.iter().map(|spec| spec.names as usize).sum();
    if wanted > workload.names.len() || workload.specs.iter().any(|spec| spec.tenant as usize >= workload.tenants.len()) {
        return Err(PyValueError::new_err("a request's names or tenant are missing"));
    }
    Ok(workload)
}

pub(crate) fn machine((curve, decode_seq, context_token, prefill_pair): StepTime) -> PyResult<sim::Machine> {
    let step = sim::StepTime::new(curve, decode_seq, context_token, prefill_pair);
    step.map(sim::Machine::new).ok_or_else(|| PyValueError::new_err("the step's curve needs two points or more, with rising tokens"))
}

/// Simulates without the GIL, and returns the reports.
fn run(
    py: Python<'_>,
    simulate: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<Vec<sim::Report>, core::ConfigError> + Send,
) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for report in interruptible(py, simulate)? {
        list.append(report_dict(py, &report)?)?;
    }
    Ok(list)
}

/// Simulates without the GIL. The simulation asks now and then whether it goes on; a signal such as Ctrl-C ends it.
#[allow(clippy::redundant_closure_for_method_calls)] // the method alone has too narrow a lifetime
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    simulate: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, core::ConfigError> + Send,
) -> PyResult<T> {
    let mut interrupt = None;
    let simulated = py.detach(|| {
        simulate(&mut || {
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_none()
        })
    });
    interrupt.map_or_else(|| simulated.map_err(invalid), Err)
}

fn spec(line: &[i64]) -> Option<sim::RequestSpec> {
    let small = |at: usize| u32::try_from(line[at]).ok();
    let after = |at: usize| u64::try_from(line[at]).ok();
    Some(sim::RequestSpec {
        time: line[0].try_into().ok()?,
        prompt: small(1)?,
        output: small(2)?,
        most: small(3)?,
        tenant: small(4)?,
        priority: line[5].try_into().ok()?,
        deadline: after(6),
        ttft_deadline: after(7),
        predicted: small(8),
        names: small(9)?,
        model: small(10)?,
        tier: core::Tier::NAMES.get(usize::try_from(line[11]).ok()?)?.0,
    })
}

/// Drafts given by request, position, tokens, accepted tokens and code of the source.
fn recorded_drafts(numbers: &[i64]) -> PyResult<Vec<(usize, core::VerifiedDraft)>> {
    let draft = |line: &[i64]| {
        let [position, tokens, accepted, source] = [1, 2, 3, 4].map(|at| u32::try_from(line[at]).ok());
        let source = core::DraftSource::of(source?);
        Some((line[0].try_into().ok()?, core::VerifiedDraft { source, position: position?, tokens: tokens?, accepted: accepted? }))
    };
    let drafts = numbers.chunks_exact(5).map(draft).collect::<Option<Vec<_>>>();
    let drafts = drafts.filter(|drafts| drafts.is_sorted_by_key(|(request, draft)| (*request, draft.position)));
    drafts.ok_or_else(|| PyValueError::new_err("the drafts are not ordered by request and position, or a number is negative or too large"))
}

pub(crate) fn or_none(time: Option<core::Time>) -> i64 {
    time.map_or(-1, |time| time as i64)
}

pub(crate) fn packed<const N: usize>(py: Python<'_>, lines: impl Iterator<Item = [i64; N]>) -> Bound<'_, PyBytes> {
    let bytes: Vec<u8> = lines.flatten().flat_map(i64::to_le_bytes).collect();
    PyBytes::new(py, &bytes)
}

/// The results of a simulation as flat arrays.
pub(crate) fn report_dict<'py>(py: Python<'py>, report: &sim::Report) -> PyResult<Bound<'py, PyDict>> {
    let ended = report.ended.iter().zip(&report.longest_gaps).map(|(timeline, &longest)| {
        let numbers: [i64; 17] = [
            timeline.tag as i64,
            reports::finish_code(timeline.finish).into(),
            timeline.arrived as i64,
            or_none(timeline.started),
            or_none(timeline.first_token),
            timeline.ended as i64,
            timeline.prompt_tokens.into(),
            timeline.cached_tokens.into(),
            timeline.output_tokens.into(),
            timeline.computed_tokens as i64,
            timeline.recomputed_tokens as i64,
            timeline.preemptions.into(),
            timeline.swaps.into(),
            timeline.block_us as i64,
            longest as i64,
            timeline.draft_tokens.into(),
            timeline.accepted_draft_tokens.into(),
        ];
        let mut line = [0; 17 + core::TimelineState::COUNT];
        line[..17].copy_from_slice(&numbers);
        line[17..].iter_mut().zip(&timeline.states).for_each(|(cell, &time)| *cell = time as i64);
        line
    });
    let dict = PyDict::new(py);
    dict.set_item("ended", packed(py, ended))?;
    dict.set_item("states", core::TimelineState::NAMES.map(|(_, name)| name).to_vec())?;
    dict.set_item("refused", &report.refused)?;
    dict.set_item("steps", report.steps)?;
    dict.set_item("chunks", report.chunks)?;
    let sums = report.utilization.sums();
    let sums = [sums.busy, sums.batch, sums.blocks, sums.max_batch as u64, sums.max_blocks as u64];
    dict.set_item("sums", sums.to_vec())?;
    dict.set_item("stats", report.stats.map(|stats| reports::stats(py, &stats)).transpose()?)?;
    for (name, histogram) in [("gaps", &report.gaps), ("step_times", &report.step_times)] {
        dict.set_item(name, packed(py, histogram.buckets().map(|(time, count)| [time as i64, count as i64])))?;
    }
    let samples = report.utilization.samples().iter().map(|sample| {
        let sim::Sample { time, batch, tokens, running, waiting, blocks, saturation } = *sample;
        [time as i64, batch as i64, tokens as i64, running as i64, waiting as i64, blocks as i64, saturation.into()]
    });
    dict.set_item("timeline", packed(py, samples))?;
    put_labels(&dict, report.ended.iter().map(|timeline| (&*timeline.tenant, timeline.session.as_deref(), timeline.tier)))?;
    dict.set_item("service_window", report.service.window())?;
    let service = PyDict::new(py);
    for (tenant, windows) in report.service.tenants() {
        service.set_item(&**tenant, windows)?;
    }
    dict.set_item("service", service)?;
    Ok(dict)
}

/// Sets the tenants, sessions and tiers of requests.
pub(crate) fn put_labels<'a>(
    dict: &Bound<'_, PyDict>,
    requests: impl Iterator<Item = (&'a str, Option<&'a str>, core::Tier)> + Clone,
) -> PyResult<()> {
    put_names(dict, "tenant", requests.clone().map(|(tenant, ..)| Some(tenant)))?;
    put_names(dict, "session", requests.clone().map(|(_, session, _)| session))?;
    put_names(dict, "tier", requests.map(|(.., tier)| Some(tier.name())))
}

/// Sets the sorted names, and one of them for each request as an index; -1 for none.
fn put_names<'a>(dict: &Bound<'_, PyDict>, what: &str, names: impl Iterator<Item = Option<&'a str>> + Clone) -> PyResult<()> {
    let mut known: Vec<&str> = names.clone().flatten().collect();
    known.sort_unstable();
    known.dedup();
    let number = |name: Option<&str>| name.and_then(|name| known.binary_search(&name).ok()).map_or(-1, |number| number as i64);
    dict.set_item(what, packed(dict.py(), names.map(|name| [number(name)])))?;
    dict.set_item(format!("{what}s"), &known)
}
