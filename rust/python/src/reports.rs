//! The core's reports as dicts of plain data.

use chairlift_core as core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// The name of a finish reason.
fn finish_word(finish: core::FinishReason) -> &'static str {
    match finish {
        core::FinishReason::Stop => "stop",
        core::FinishReason::Length => "length",
        core::FinishReason::Error => "error",
        core::FinishReason::Deadline => "deadline",
        core::FinishReason::Abort => "abort",
    }
}

/// The code of a token's finish reason in `Outputs.finishes`. Panics for an end that comes without a token.
pub(crate) fn token_finish_code(finish: Option<core::FinishReason>) -> u8 {
    match finish {
        None => 0,
        Some(core::FinishReason::Stop) => 1,
        Some(core::FinishReason::Length) => 2,
        Some(core::FinishReason::Error) => 3,
        Some(core::FinishReason::Deadline | core::FinishReason::Abort) => unreachable!("such an end comes without a token"),
    }
}

/// The finish reason's number in the columns of a simulation: as in `Outputs.finishes`, plus 4 for a missed deadline
/// and 5 for an abort.
pub(crate) fn finish_code(finish: Option<core::FinishReason>) -> i64 {
    match finish {
        Some(core::FinishReason::Deadline) => 4,
        Some(core::FinishReason::Abort) => 5,
        of_token => token_finish_code(of_token).into(),
    }
}

/// A request's timeline. Times are in microseconds. States without time are left out.
pub(crate) fn timeline<'py>(py: Python<'py>, timeline: &core::Timeline) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("tag", timeline.tag)?;
    dict.set_item("finish", timeline.finish.map(finish_word))?;
    dict.set_item("arrived", timeline.arrived)?;
    dict.set_item("submitted", timeline.submitted)?;
    dict.set_item("started", timeline.started)?;
    dict.set_item("first_token", timeline.first_token)?;
    dict.set_item("ended", timeline.finish.map(|_| timeline.ended))?;
    dict.set_item("prompt_tokens", timeline.prompt_tokens)?;
    dict.set_item("cached_tokens", timeline.cached_tokens)?;
    dict.set_item("own_cached_tokens", timeline.own_cached_tokens)?;
    dict.set_item("lost_hit_tokens", timeline.lost_hit_tokens)?;
    dict.set_item("output_tokens", timeline.output_tokens)?;
    dict.set_item("computed_tokens", timeline.computed_tokens)?;
    dict.set_item("recomputed_tokens", timeline.recomputed_tokens)?;
    dict.set_item("compute_ns", timeline.compute_ns)?;
    dict.set_item("energy_uj", timeline.energy_uj)?;
    dict.set_item("draft_tokens", timeline.draft_tokens)?;
    dict.set_item("accepted_draft_tokens", timeline.accepted_draft_tokens)?;
    dict.set_item("preemptions", timeline.preemptions)?;
    dict.set_item("swaps", timeline.swaps)?;
    dict.set_item("block_us", timeline.block_us)?;
    dict.set_item("tenant", &*timeline.tenant)?;
    dict.set_item("priority", timeline.priority)?;
    dict.set_item("tier", timeline.tier.name())?;
    dict.set_item("limit", timeline.limit().map(core::TimelineState::name))?;
    dict.set_item("preempted_by", &timeline.preempted_by)?;
    dict.set_item("preempted_for", nonzero(py, core::PreemptionReason::NAMES, |reason| timeline.preempted_for[reason as usize].into())?)?;
    dict.set_item("evicted_for", nonzero(py, core::Taker::NAMES, |taker| timeline.evicted_for[taker as usize].into())?)?;
    dict.set_item("states", nonzero(py, core::TimelineState::NAMES, |state| timeline.states[state as usize])?)?;
    Ok(dict)
}

/// The numbers that are not 0, by name.
fn nonzero<K>(
    py: Python<'_>,
    names: impl IntoIterator<Item = (K, &'static str)>,
    number: impl Fn(K) -> u64,
) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    for (kind, name) in names {
        let number = number(kind);
        if number > 0 {
            dict.set_item(name, number)?;
        }
    }
    Ok(dict)
}

/// Adds the requests that were served before another: counts by rule, and (tag, tenant, rule) of the first of them.
pub(crate) fn served_before(timeline: &Bound<'_, PyDict>, served: &core::ServedBefore) -> PyResult<()> {
    timeline.set_item("served_before", nonzero(timeline.py(), core::Rule::NAMES, |rule| served.counts[rule as usize].into())?)?;
    let first = served.first.iter().map(|(tag, tenant, rule)| (*tag, &**tenant, rule.name()));
    timeline.set_item("served_first", first.collect::<Vec<_>>())
}

/// Several timelines.
pub(crate) fn timelines<'py>(py: Python<'py>, many: &[core::Timeline]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for one in many {
        list.append(timeline(py, one)?)?;
    }
    Ok(list)
}

/// Adds the draft counters.
pub(crate) fn drafts(stats: &Bound<'_, PyDict>, drafts: &core::DraftStats) -> PyResult<()> {
    stats.set_item("drafts", drafts.drafts)?;
    stats.set_item("draft_tokens", drafts.draft_tokens)?;
    stats.set_item("accepted_draft_tokens", drafts.accepted_tokens)?;
    stats.set_item("accepted_draft_tokens_by_position", &drafts.accepted_by_position)
}

/// Counters and gauges.
pub(crate) fn stats<'py>(py: Python<'py>, stats: &core::Stats) -> PyResult<Bound<'py, PyDict>> {
    let counters = &stats.counters;
    let dict = PyDict::new(py);
    let gauges = [
        ("running", stats.running),
        ("waiting", stats.waiting),
        ("swapped", stats.swapped),
        ("slots", stats.slots),
        ("total_blocks", stats.total_blocks),
        ("free_blocks", stats.free_blocks),
        ("used_tokens", stats.used_tokens),
        ("held_kv_slots", stats.held_slots),
        ("host_blocks", stats.host_blocks),
        ("free_host_blocks", stats.free_host_blocks),
        ("state_slots", stats.state_slots),
        ("saved_states", stats.saved_states),
    ];
    for (name, value) in gauges {
        dict.set_item(name, value)?;
    }
    let predicted = [
        ("queued_prompt_tokens", stats.queued_prompt_tokens),
        ("predicted_wait_us", stats.predicted_wait),
        ("predicted_turn_us", stats.predicted_turn_wait),
        ("predicted_prefill_us", stats.predicted_prefill),
        ("predicted_step_us", stats.predicted_step),
    ];
    for (name, value) in counters.named().into_iter().chain(predicted) {
        dict.set_item(name, value)?;
    }
    dict.set_item("energy_uj", counters.energy_uj)?;
    dict.set_item("idle_energy_uj", counters.idle_energy_uj)?;
    for (reason, name) in core::PreemptionReason::NAMES {
        dict.set_item(format!("preemptions_for_{name}"), counters.preemptions_by_reason[reason as usize])?;
    }
    dict.set_item("saturation", f64::from(stats.saturation) / 1000.0)?;
    dict.set_item("stall", stats.stall.map(core::Stall::name))?;
    dict.set_item("waiting_by_state", nonzero(py, core::TimelineState::NAMES, |state| stats.waiting_by_state[state as usize] as u64)?)?;
    Ok(dict)
}

/// Usage of a tenant or a class.
pub(crate) fn usage<'py>(py: Python<'py>, usage: &core::Usage) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let values = [
        ("waiting", u64::from(usage.waiting)),
        ("running", u64::from(usage.running)),
        ("requests", usage.requests),
        ("prompt_tokens", usage.prompt_tokens),
        ("cached_tokens", usage.cached_tokens),
        ("output_tokens", usage.output_tokens),
        ("computed_tokens", usage.computed_tokens),
        ("compute_ns", usage.compute_ns),
        ("energy_uj", usage.energy_uj),
        ("block_us", usage.block_us),
        ("held", u64::from(usage.held)),
        ("held_block_us", usage.held_block_us),
        ("preemptions", usage.preemptions),
        ("queued_us", usage.queued),
    ];
    for (name, value) in values {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// The scheduler's state: dicts of running sequences, waiting requests and steps, and a map of the KV blocks as little-endian u32.
pub(crate) fn snapshot<'py>(py: Python<'py>, seen: &core::Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let running = PyList::empty(py);
    for row in &seen.slots {
        let one = PyDict::new(py);
        one.set_item("slot", row.slot)?;
        one.set_item("tag", row.tag)?;
        one.set_item("tenant", &*row.tenant)?;
        one.set_item("priority", row.priority)?;
        one.set_item("tier", row.tier.name())?;
        one.set_item("state", row.state)?;
        one.set_item("prompt_tokens", row.prompt_tokens)?;
        one.set_item("computed_tokens", row.computed_tokens)?;
        one.set_item("output_tokens", row.output_tokens)?;
        one.set_item("blocks", row.blocks)?;
        one.set_item("age_us", row.age)?;
        running.append(one)?;
    }
    dict.set_item("running", running)?;
    let waiting = PyList::empty(py);
    for wait in &seen.waiting {
        let one = PyDict::new(py);
        one.set_item("tag", wait.tag)?;
        one.set_item("tenant", &*wait.tenant)?;
        one.set_item("priority", wait.priority)?;
        one.set_item("tier", wait.tier.name())?;
        one.set_item("state", wait.state.name())?;
        one.set_item("prompt_tokens", wait.prompt_tokens)?;
        one.set_item("output_tokens", wait.output_tokens)?;
        one.set_item("waited_us", wait.waited)?;
        waiting.append(one)?;
    }
    dict.set_item("waiting", waiting)?;
    dict.set_item("waiting_by_tier", nonzero(py, core::Tier::NAMES, |tier| seen.waiting_by_tier[tier as usize] as u64)?)?;
    let steps = PyList::empty(py);
    for step in &seen.steps {
        let one = PyDict::new(py);
        one.set_item("step", step.step)?;
        one.set_item("planned_us", step.planned)?;
        one.set_item("slots", step.slots.iter().map(|&state| char::from(state)).collect::<String>())?;
        one.set_item("tokens", step.tokens)?;
        one.set_item("waiting", step.waiting)?;
        one.set_item("admitted", &step.admitted)?;
        one.set_item("preempted", &step.preempted)?;
        steps.append(one)?;
    }
    dict.set_item("steps", steps)?;
    let kv_map: Vec<u8> = seen.cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    dict.set_item("kv_map", PyBytes::new(py, &kv_map))?;
    dict.set_item("blocks_per_cell", seen.blocks_per_cell)?;
    Ok(dict)
}
