//! `vtc`: tenants take turns by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI'24).

use super::{Charges, Grouping, Policy, Rules};
use std::num::NonZeroU8;

/// The service of the paper.
pub(super) const CHARGES: Charges =
    Charges { prompt_token: NonZeroU8::new(1).expect("not zero"), output_token: NonZeroU8::new(2).expect("not zero") };

/// The tenant with the least service for its weight first, without preemption, as in the paper.
#[derive(Debug)]
pub struct Vtc;

impl Policy for Vtc {
    fn name(&self) -> &'static str {
        "vtc"
    }

    fn help(&self) -> &'static str {
        "as fair, without preemption for fairness"
    }

    fn rules(&self) -> Rules {
        Rules { grouping: Grouping::Tenants(CHARGES), ..Rules::default() }
    }
}
