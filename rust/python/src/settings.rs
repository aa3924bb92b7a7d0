//! The scheduler's settings for Python: keyword arguments and dicts, converted by the core's table.

use crate::errors::invalid;
use crate::policy::added_policy;
use chairlift_core as core;
use core::{SETTINGS, Setting, SettingKind, Value};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// A configuration as a dict by setting name.
pub(crate) fn dict<'py>(py: Python<'py>, config: &core::Config) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for setting in &SETTINGS {
        put(&dict, setting.name, setting.get(config))?;
    }
    Ok(dict)
}

/// `config` with the values in `settings` changed.
pub(crate) fn changed(config: core::Config, settings: &Bound<'_, PyDict>) -> PyResult<core::Config> {
    let mut given = Vec::new();
    for (name, value) in settings {
        let name: String = name.extract()?;
        let setting = Setting::named(&name).map_err(invalid)?;
        let value = value_of(setting.kind, &value).map_err(|_| invalid(setting.invalid(&value)))?;
        given.push((name, value));
    }
    config.with(&given).map_err(invalid)
}

/// As [`changed`], where the policy may be one that was added for simulations.
pub(crate) fn changed_for_simulation(config: core::Config, settings: &Bound<'_, PyDict>) -> PyResult<core::Config> {
    const POLICY: &str = "scheduling_policy";
    let name = settings.get_item(POLICY)?.map(|value| value.extract::<String>()).transpose()?;
    let Some(policy) = name.as_deref().and_then(added_policy) else { return changed(config, settings) };
    let others = settings.copy()?;
    others.del_item(POLICY)?;
    Ok(core::Config { scheduling_policy: policy, ..changed(config, &others)? })
}

/// The table of settings: dicts with name, doc and default, and either min, max and optional, or names.
#[pyfunction]
pub(crate) fn settings(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for setting in &SETTINGS {
        let dict = PyDict::new(py);
        dict.set_item("name", setting.name)?;
        dict.set_item("doc", setting.doc)?;
        put(&dict, "default", setting.get(&core::Config::default()))?;
        match setting.kind {
            SettingKind::Int { least, most, optional } => {
                dict.set_item("min", least)?;
                dict.set_item("max", most)?;
                dict.set_item("optional", optional)?;
            }
            SettingKind::Flag => {}
            SettingKind::Name(names) => dict.set_item("names", names())?,
        }
        list.append(dict)?;
    }
    Ok(list)
}

fn value_of(kind: SettingKind, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    Ok(match kind {
        _ if value.is_none() => Value::Unset,
        SettingKind::Int { .. } => Value::Int(value.extract()?),
        SettingKind::Flag => Value::Flag(value.extract()?),
        SettingKind::Name(_) => Value::Name(value.extract()?),
    })
}

fn put(dict: &Bound<'_, PyDict>, name: &str, value: Value) -> PyResult<()> {
    match value {
        Value::Unset => dict.set_item(name, dict.py().None()),
        Value::Int(value) => dict.set_item(name, value),
        Value::Flag(flag) => dict.set_item(name, flag),
        Value::Name(value) => dict.set_item(name, value),
    }
}
