//! Service of each tenant over time.

use chairlift_core::Time;
use std::collections::HashMap;
use std::sync::Arc;

/// Service of a prompt token. The next constant is that of an output token. The values are those of VTC (Sheng et al., OSDI'24).
const PROMPT_TOKEN: u64 = 1;
const OUTPUT_TOKEN: u64 = 2;
/// Maximum number of windows.
const MAX_WINDOWS: usize = 1024;

/// Service by tenant in windows of time. The window length doubles when there are too many windows. A computed prompt
/// token counts 1 when its request starts, and an output token counts 2.
#[derive(Clone, Debug)]
pub struct Service {
    window: Time,
    tenants: Vec<(Arc<str>, Vec<u64>)>,
    numbers: HashMap<Arc<str>, usize>,
}

impl Default for Service {
    fn default() -> Self {
        Self { window: 1_000_000, tenants: Vec::new(), numbers: HashMap::new() }
    }
}

impl Service {
    /// Window length in microseconds.
    pub fn window(&self) -> Time {
        self.window
    }

    /// Tenants in the order of their first service, with the service in each window up to the tenant's last.
    pub fn tenants(&self) -> &[(Arc<str>, Vec<u64>)] {
        &self.tenants
    }

    /// Records that a request of `tenant` started with `tokens` prompt tokens to compute.
    pub(crate) fn prompt(&mut self, tenant: &Arc<str>, now: Time, tokens: u32) {
        self.add(tenant, now, PROMPT_TOKEN * u64::from(tokens));
    }

    /// Records an output token for a request of `tenant`.
    pub(crate) fn output(&mut self, tenant: &Arc<str>, now: Time) {
        self.add(tenant, now, OUTPUT_TOKEN);
    }

    fn add(&mut self, tenant: &Arc<str>, now: Time, service: u64) {
        while now / self.window >= MAX_WINDOWS as Time {
            self.window *= 2;
            for (_, windows) in &mut self.tenants {
                *windows = windows.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
        }
        let number = *self.numbers.entry(Arc::clone(tenant)).or_insert_with(|| {
            self.tenants.push((Arc::clone(tenant), Vec::new()));
            self.tenants.len() - 1
        });
        let (at, windows) = ((now / self.window) as usize, &mut self.tenants[number].1);
        if windows.len() <= at {
            windows.resize(at + 1, 0);
        }
        windows[at] += service;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_and_nothing_is_lost() {
        let (mut service, one, other) = (Service::default(), Arc::from("one"), Arc::from("other"));
        service.prompt(&one, 0, 10);
        service.output(&one, 1_999_999);
        service.output(&other, 3_000_000);
        assert_eq!(service.tenants(), [(Arc::clone(&one), vec![10, 2]), (Arc::clone(&other), vec![0, 0, 0, 2])]);
        service.prompt(&other, 1024 * 1_000_000, 5);
        assert_eq!((service.window(), &service.tenants()[0].1), (2_000_000, &vec![12]));
        let given = &service.tenants()[1].1;
        assert_eq!((given[1], given[512], given.iter().sum::<u64>()), (2, 5, 7));
    }
}
