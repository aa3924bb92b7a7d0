//! A shadow: a server's journal under other settings, while it is written.

use crate::errors::invalid;
use crate::reports;
use crate::settings;
use crate::simulate::{or_none, packed, put_labels, report_dict};
use crate::threads::lock;
use chairlift_core as core;
use chairlift_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::sync::Mutex;

/// See `chairlift_sim::Shadow`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Shadow(Mutex<sim::Shadow>);

/// The settings of a journal by its first bytes. None if they end within the settings.
#[pyfunction]
pub(crate) fn journal_settings<'py>(py: Python<'py>, journal: &[u8]) -> PyResult<Option<Bound<'py, PyDict>>> {
    let follower = core::Follower::open(journal).map_err(invalid)?;
    follower.map(|follower| settings::dict(py, &follower.journal().config)).transpose()
}

#[pymethods]
impl Shadow {
    #[new]
    fn new(journal: &[u8], changes: &Bound<'_, PyList>) -> PyResult<Self> {
        let follower = core::Follower::open(journal).map_err(invalid)?;
        let follower = follower.ok_or_else(|| PyValueError::new_err("the journal ends within its settings"))?;
        let recorded = follower.journal().config;
        let configs = changes.iter().map(|one| settings::changed_for_simulation(recorded, one.cast()?));
        let configs = configs.collect::<PyResult<Vec<_>>>()?;
        let shadow = sim::Shadow::new(follower, &configs).map_err(invalid)?;
        Ok(Self(Mutex::new(shadow)))
    }

    fn feed(&self, py: Python<'_>, journal: &[u8]) -> PyResult<()> {
        py.detach(|| lock(&self.0).feed(journal)).map_err(invalid)
    }

    fn advance(&self, py: Python<'_>, requests: usize) -> bool {
        py.detach(|| lock(&self.0).advance(requests))
    }

    fn skip(&self) {
        lock(&self.0).skip();
    }

    #[getter]
    fn now(&self) -> core::Time {
        lock(&self.0).now()
    }

    #[getter]
    fn counts(&self) -> (u64, u64) {
        let sim::Counts { simulated, skipped } = lock(&self.0).counts();
        (simulated, skipped)
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (runs, recorded) = lock(&self.0).take();
        let dict = PyDict::new(py);
        dict.set_item("runs", runs.iter().map(|run| report_dict(py, run)).collect::<PyResult<Vec<_>>>()?)?;
        dict.set_item("recorded", recorded_dict(py, &recorded)?)?;
        Ok(dict)
    }
}

/// Recorded requests in the columns of a report.
fn recorded_dict<'py>(py: Python<'py>, recorded: &[sim::Recorded]) -> PyResult<Bound<'py, PyDict>> {
    let rows = recorded.iter().map(|sim::Recorded { tag, arrived, prompt_tokens, ended, .. }| {
        let (tag, finish) = (*tag as i64, reports::finish_code(Some(ended.finish)).into());
        let (arrived, first, end) = (*arrived as i64, or_none(ended.first_token), ended.time as i64);
        let [prompt, cached, output, preempted] =
            [*prompt_tokens, ended.cached_tokens, ended.output_tokens, ended.preemptions].map(i64::from);
        [tag, finish, arrived, first, first, end, prompt, cached, output, 0, 0, preempted, 0, 0, 0, 0, 0]
    });
    let dict = PyDict::new(py);
    dict.set_item("ended", packed(py, rows))?;
    dict.set_item("states", PyList::empty(py))?;
    put_labels(&dict, recorded.iter().map(|one| (&*one.tenant, one.session.as_deref(), one.tier)))?;
    Ok(dict)
}
