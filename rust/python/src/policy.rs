//! Policies in Python, for simulations.

use chairlift_core as core;
use core::{CacheUse, Candidate, Charges, Grouping, Policy, Preemption, PreemptionReason, Rules, Time};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::num::NonZeroU8;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The policies of this process, by name. They are never freed, because a scheduler keeps its policy for ever.
static ADDED: Mutex<Vec<&'static PythonPolicy>> = Mutex::new(Vec::new());

/// A waiting or running request as a policy sees it. Times are in microseconds.
#[pyclass(frozen, get_all, name = "Candidate", module = "chairlift._core")]
pub(crate) struct View {
    tier: &'static str,
    priority: i32,
    arrived: Time,
    started: bool,
    deadline: Option<Time>,
    ttft_deadline: Option<Time>,
    is_predicted: bool,
    weight: u32,
    tenant_service: u64,
    tenant_slots: u32,
    cached_tokens: u32,
    output_left: u32,
    work_left: Time,
    preemption_cost: Time,
}

impl View {
    fn of(request: &Candidate<'_>) -> Self {
        Self {
            tier: request.tier.name(),
            priority: request.priority,
            arrived: request.arrived,
            started: request.started,
            deadline: request.deadline,
            ttft_deadline: request.ttft_deadline,
            is_predicted: request.is_predicted,
            weight: request.weight,
            tenant_service: request.tenant_service,
            tenant_slots: request.tenant_slots,
            cached_tokens: request.cached_tokens(),
            output_left: request.output_left(),
            work_left: request.work_left(),
            preemption_cost: request.preemption_cost(),
        }
    }
}

/// A policy whose rules were read from a Python object, and whose methods are the object's.
#[derive(Debug)]
struct PythonPolicy {
    name: &'static str,
    help: &'static str,
    rules: Rules,
    object: Py<PyAny>,
    /// What a method raised first. The policy then decides as `fcfs` does.
    failure: Mutex<Option<PyErr>>,
    has_failed: AtomicBool,
}

impl PythonPolicy {
    /// What a method returns, or `instead` if it fails, now or earlier.
    fn ask<T: for<'a, 'py> FromPyObject<'a, 'py>>(&self, method: &str, requests: &[&Candidate<'_>], instead: T) -> T {
        if self.has_failed.load(Ordering::Relaxed) {
            return instead;
        }
        let answer = Python::attach(|py| {
            let views = requests.iter().map(|request| Py::new(py, View::of(request))).collect::<PyResult<Vec<_>>>()?;
            let object = self.object.bind(py);
            let answer = match &views[..] {
                [one] => object.call_method1(method, (one,))?,
                [one, other] => object.call_method1(method, (one, other))?,
                _ => unreachable!("a method has one or two requests"),
            };
            let shown = || format!("{method}() returned {}", answer.repr().map_or_else(|_| "an object".into(), |text| text.to_string()));
            answer.extract().map_err(|_| PyValueError::new_err(shown()))
        });
        answer.unwrap_or_else(|error| {
            self.has_failed.store(true, Ordering::Relaxed);
            *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            instead
        })
    }
}

impl Policy for PythonPolicy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn help(&self) -> &'static str {
        self.help
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn rank(&self, request: &Candidate<'_>) -> u64 {
        self.ask("rank", &[request], request.arrived)
    }

    fn drop_at(&self, request: &Candidate<'_>) -> Option<Time> {
        self.ask("drop_at", &[request], None)
    }

    fn may_preempt(&self, waiting: &Candidate<'_>, running: &Candidate<'_>) -> bool {
        self.ask("may_preempt", &[waiting, running], false)
    }

    fn victim_rank(&self, running: &Candidate<'_>) -> i64 {
        self.ask("victim_rank", &[running], 0)
    }
}

fn added() -> MutexGuard<'static, Vec<&'static PythonPolicy>> {
    ADDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The policy that was added under this name.
pub(crate) fn added_policy(name: &str) -> Option<&'static dyn Policy> {
    added().iter().rev().find(|policy| policy.name == name).map(|policy| *policy as &dyn Policy)
}

/// Lets simulations use a `chairlift.Policy` by its name. One that was added under the name before is replaced.
#[pyfunction]
pub(crate) fn add_policy(py: Python<'_>, policy: Py<PyAny>) -> PyResult<()> {
    let object = policy.bind(py);
    let text = |name: &str| object.getattr(name)?.extract::<String>();
    let flag = |name: &str| object.getattr(name)?.extract::<bool>();
    let (name, help) = (text("name")?, text("help")?);
    if name.is_empty() || <dyn Policy>::named(&name).is_some() {
        return Err(PyValueError::new_err(format!("a policy needs a name of its own, got {name:?}")));
    }
    let rules = Rules {
        grouping: grouping(&text("grouping")?, object)?,
        ranked: flag("ranked")?,
        orders_prompts: flag("orders_prompts")?,
        cache: one_of(
            "cache",
            &text("cache")?,
            [("unused", CacheUse::Unused), ("when_queued", CacheUse::WhenQueued), ("followed", CacheUse::Followed)],
        )?,
        preemption: one_of(
            "preemption",
            &text("preemption")?,
            [
                ("never", Preemption::Never),
                ("free", Preemption::Free(PreemptionReason::Priority)),
                ("within_budget", Preemption::WithinBudget(PreemptionReason::Priority)),
            ],
        )?,
    };
    let (name, help) = (name.leak(), help.leak());
    let (failure, has_failed) = (Mutex::new(None), AtomicBool::new(false));
    added().push(Box::leak(Box::new(PythonPolicy { name, help, rules, object: policy, failure, has_failed })));
    Ok(())
}

/// The names of the policies that were added.
#[pyfunction]
pub(crate) fn added_policies() -> Vec<&'static str> {
    added().iter().map(|policy| policy.name).collect()
}

/// What a method of the policy of this name raised first, since the last call; `None` if it works. It decides again then, unless it is
/// replaced for good.
#[pyfunction]
#[pyo3(signature = (name, for_good = false))]
pub(crate) fn take_policy_failure(name: &str, for_good: bool) -> PyResult<Option<PyErr>> {
    let found = added().iter().rev().find(|policy| policy.name == name).copied();
    let policy = found.ok_or_else(|| PyRuntimeError::new_err(format!("there is no policy {name:?}")))?;
    policy.has_failed.fetch_and(for_good, Ordering::Relaxed);
    Ok(policy.failure.lock().unwrap_or_else(PoisonError::into_inner).take())
}

fn grouping(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Grouping> {
    let charge = |name: &str| object.getattr(name)?.extract::<NonZeroU8>();
    if name == "tenants" {
        return Ok(Grouping::Tenants(Charges { prompt_token: charge("prompt_token")?, output_token: charge("output_token")? }));
    }
    one_of("grouping", name, [("single", Grouping::Single), ("classes", Grouping::Classes)])
}

fn one_of<T, const N: usize>(what: &str, name: &str, choices: [(&str, T); N]) -> PyResult<T> {
    let names = choices.each_ref().map(|(name, _)| *name).join(", ");
    let found = choices.into_iter().find(|(choice, _)| *choice == name);
    found.map(|(_, value)| value).ok_or_else(|| PyValueError::new_err(format!("{what} must be one of {names}, got {name:?}")))
}
