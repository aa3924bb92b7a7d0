//! `fcfs`: first come, first served.

use super::{Policy, Rules};

/// First come, first served.
#[derive(Debug)]
pub struct Fcfs;

impl Policy for Fcfs {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn help(&self) -> &'static str {
        "the first to arrive, if it fits"
    }

    fn rules(&self) -> Rules {
        Rules::default()
    }
}
