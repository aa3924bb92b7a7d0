//! The errors of the core as Python exceptions.

use chairlift_core as core;
use pyo3::exceptions::PyValueError;
use pyo3::{PyErr, create_exception};

create_exception!(chairlift._core, Rejected, PyValueError, "A request that was turned away.");
create_exception!(chairlift._core, EmptyPrompt, Rejected, "The prompt has no tokens.");
create_exception!(chairlift._core, NoNewTokens, Rejected, "No new token was asked for.");
create_exception!(chairlift._core, TooLong, Rejected, "Prompt and output exceed the model's context.");
create_exception!(chairlift._core, NeverFits, Rejected, "Prompt and output exceed the whole KV cache.");
create_exception!(chairlift._core, QueueFull, Rejected, "As many requests wait as may: (message, microseconds after which to come back).");

pub(crate) fn rejected(error: core::Rejected) -> PyErr {
    let message = error.to_string();
    match error {
        core::Rejected::EmptyPrompt => EmptyPrompt::new_err(message),
        core::Rejected::NoNewTokens => NoNewTokens::new_err(message),
        core::Rejected::NotHeld | core::Rejected::HeldBusy => Rejected::new_err(message),
        core::Rejected::TooLong { .. } => TooLong::new_err(message),
        core::Rejected::NeverFits { .. } => NeverFits::new_err(message),
        core::Rejected::QueueFull { retry_after, .. } => QueueFull::new_err((message, retry_after)),
    }
}

/// A `ValueError` for a name that nothing has.
pub(crate) fn unknown(what: &str, name: &str) -> PyErr {
    PyValueError::new_err(format!("no {what} is called {name:?}"))
}

/// A `ValueError` with the message of an error.
pub(crate) fn invalid(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}
