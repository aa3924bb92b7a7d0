//! Tenants' service at other engines.

use super::Scheduler;
use crate::request::Time;
use std::sync::Arc;

impl Scheduler {
    /// Charges a tenant for service that it had at another engine or model: `us` microseconds of engine time at weight 1,
    /// as [`take_service`](Self::take_service) gives it there.
    ///
    /// It counts like service here that took as long in recent steps. Between two of its requests that leave the queue, a
    /// tenant is charged at most [`MAX_CHARGED_EXTERNAL`](crate::MAX_CHARGED_EXTERNAL). No effect under policies whose
    /// tenants take no turns, for an unknown tenant and before the first step.
    ///
    /// Let engines with shares of the time share their tenants' service every interval I. While tenants wait at an engine,
    /// each gets its share of the tenants' time, or all that the engine has to give if that is less. Beside the local
    /// bound of VTC, it misses at most the service that others had at other engines within I, and what one request of each other
    /// tenant takes per `MAX_CHARGED_EXTERNAL`. O(1).
    pub fn charge_external(&mut self, tenant: &str, us: Time) {
        if !self.rules.takes_turns() {
            return;
        }
        if let (Some(tenant), Some(cost)) = (self.accounts.known_tenant(tenant), self.accounts.service_cost()) {
            self.waiting.shares_mut().charge_external(tenant, us, cost);
        }
    }

    /// The service that each tenant had here since the last call, divided by its weight, in microseconds of engine time.
    /// Tenants without are left out, and so are background requests. Empty under policies whose tenants take no turns.
    /// O(tenants).
    pub fn take_service(&mut self) -> Vec<(Arc<str>, Time)> {
        if !self.rules.takes_turns() {
            return Vec::new();
        }
        let Some(cost) = self.accounts.take_service_cost() else { return Vec::new() };
        let taken = self.waiting.shares_mut().take_service(cost);
        taken.into_iter().map(|(tenant, us)| (Arc::clone(self.accounts.tenant_name(tenant)), us)).collect()
    }
}
