//! Which requests share cached blocks.

use std::sync::Arc;

/// The requests that share cached blocks: those of one group of tenants and with one salt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheScope {
    /// The group of the request's tenant. It is no secret, and blocks of a group may be stored outside.
    pub group: Arc<str>,
    /// A secret of the request. Blocks with a salt are not stored outside.
    pub salt: Arc<[u8]>,
}

impl CacheScope {
    /// The scope of requests with this salt, if the tenants have no groups.
    pub fn salted(salt: &[u8]) -> Self {
        Self { salt: salt.into(), ..Self::default() }
    }

    /// The scope of requests of this group without a salt.
    pub fn of_group(group: &str) -> Self {
        Self { group: group.into(), ..Self::default() }
    }
}
