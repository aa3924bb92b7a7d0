//! Simulations of sessions in a closed loop.

use crate::copied::Copied;
use crate::router;
use crate::settings::changed_for_simulation;
use crate::simulate::{StepTime, interruptible, machine, packed, report_dict, workload};
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Numbers of a session, and of a request of one.
const SESSION: usize = 8;
const TURN: usize = 8;

/// The users of a simulation: their number, longest time between an answer and the next request, warm-up and end, and the seed.
type Users = (u32, core::Time, core::Time, core::Time, u64);

/// Requests without a session, their names and the tokens of a name: see `simulate`.
type Beside = (Copied<i64>, Copied<i64>, u32);

/// Runs users of recorded sessions, and requests beside them, through `replicas` schedulers in virtual time.
#[pyfunction]
#[pyo3(signature = (sessions, parents, turns, block, tenants, users, settings, step_time, *, replicas = 1, routing = "round-robin",
    read_ns_per_block = 0, beside = None))]
pub(crate) fn simulate_sessions<'py>(
    py: Python<'py>,
    sessions: Copied<i64>,
    parents: Copied<i64>,
    turns: Copied<i64>,
    block: u32,
    tenants: Vec<(String, u32)>,
    users: Users,
    settings: &Bound<'py, PyDict>,
    step_time: StepTime,
    replicas: usize,
    routing: &str,
    read_ns_per_block: u32,
    beside: Option<Beside>,
) -> PyResult<Bound<'py, PyDict>> {
    let recorded = read(&sessions.0, &parents.0, &turns.0, tenants.len());
    let recorded = recorded.filter(|recorded| !recorded.is_empty() && block > 0);
    let recorded = recorded.ok_or_else(|| PyValueError::new_err("the sessions' numbers do not agree with each other"))?;
    let beside = beside.map(|(requests, names, block)| workload(&requests.0, names.0, block, tenants.clone())).transpose()?;
    let beside = beside.unwrap_or_default();
    let tenants = tenants.into_iter().map(|(name, _)| name.into()).collect();
    let (users, longest_think, warm_up, until, seed) = users;
    let load = sim::ClosedLoop { sessions: recorded, users, longest_think, warm_up, until, seed, block, tenants };
    let config = changed_for_simulation(core::Config::default(), settings)?;
    let machine = sim::Machine { read_ns_per_block, ..machine(step_time)? };
    let routing = router::named(routing)?;
    let report = interruptible(py, |goes_on| sim::simulate_sessions(config, &load, beside.jobs(), &machine, replicas, routing, goes_on))?;
    let dict = PyDict::new(py);
    dict.set_item("engines", report.engines.iter().map(|engine| report_dict(py, engine)).collect::<PyResult<Vec<_>>>()?)?;
    let rows = report.sessions.iter().map(|seen| {
        let sim::SessionSeen { session, began, ended, turns, alone, longest_wait, complete } = *seen;
        [session.into(), began as i64, ended as i64, turns.into(), alone as i64, longest_wait as i64, complete.into()]
    });
    dict.set_item("sessions", packed(py, rows))?;
    dict.set_item("context_tokens", report.context_tokens)?;
    Ok(dict)
}

/// Sessions from rows of numbers; `None` if they do not agree with each other.
fn read(sessions: &[i64], parents: &[i64], turns: &[i64], tenants: usize) -> Option<Vec<sim::Session>> {
    let (mut parents, mut turns) = (parents.iter(), turns.chunks_exact(TURN));
    let session = |row: &[i64]| {
        let [threads, requests, blocks, shared, group, tenant, tier, weight] = <[i64; SESSION]>::try_from(row).ok()?;
        // Each thread has a request.
        let threads = usize::try_from(threads).ok().filter(|&threads| (1..=turns.len()).contains(&threads))?;
        let blocks = usize::try_from(blocks).ok()?;
        let parents = parents.by_ref().take(blocks).map(|&at| u32::try_from(at).ok()).collect::<Option<Vec<_>>>()?;
        // Each block comes after its parent, so that a path has an end.
        let ordered = parents.iter().enumerate().all(|(at, &parent)| (parent as usize) < at.max(1));
        let mut session = sim::Session {
            threads: vec![Vec::new(); threads],
            parents,
            shared: shared.try_into().ok()?,
            group: group.try_into().ok()?,
            tenant: tenant.try_into().ok()?,
            tier: core::Tier::NAMES.get(usize::try_from(tier).ok()?)?.0,
            weight: u32::try_from(weight).ok().filter(|&weight| weight > 0)?,
        };
        for row in turns.by_ref().take(requests.try_into().ok()?) {
            let [thread, think, prompt, output, calls_tool, leaf, first, subagents] = <[i64; TURN]>::try_from(row).ok()?;
            session.threads.get_mut(usize::try_from(thread).ok()?)?.push(sim::Turn {
                think: think.try_into().ok()?,
                prompt: u32::try_from(prompt).ok().filter(|&prompt| prompt > 0)?,
                output: u32::try_from(output).ok().filter(|&output| output > 0)?,
                calls_tool: calls_tool != 0,
                leaf: u32::try_from(leaf).ok().filter(|&leaf| (leaf as usize) < blocks)?,
                subagents: (first.try_into().ok()?, subagents.try_into().ok()?),
            });
        }
        let known = |turn: &sim::Turn| turn.subagents.0.checked_add(turn.subagents.1).is_some_and(|end| end as usize <= threads);
        let whole = ordered
            && session.parents.len() == blocks
            && (session.tenant as usize) < tenants
            && session.threads.iter().all(|thread| !thread.is_empty());
        (whole && session.threads[0].iter().all(known)).then_some(session)
    };
    sessions.chunks_exact(SESSION).map(session).collect()
}
