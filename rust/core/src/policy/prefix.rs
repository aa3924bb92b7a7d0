//! `prefix`: the longest cached prefix first.

use super::{CacheUse, Candidate, Policy, Rules};

/// Longest cached prefix first (as in `SGLang`: Zheng et al., `NeurIPS`'24).
#[derive(Debug)]
pub struct Prefix;

impl Policy for Prefix {
    fn name(&self) -> &'static str {
        "prefix"
    }

    fn help(&self) -> &'static str {
        "the longest cached prefix"
    }

    fn rules(&self) -> Rules {
        Rules { ranked: true, cache: CacheUse::Followed, ..Rules::default() }
    }

    fn rank(&self, request: &Candidate) -> u64 {
        u64::from(u32::MAX - request.cached_tokens())
    }
}
