//! Jobs that several tests simulate.

use chairlift_core::{Request, Time, Token};
use chairlift_sim::Job;

/// A job with a unique prompt.
pub(crate) fn job(time: Time, tag: u64, prompt: u32, output: u32) -> Job {
    let tokens = |from: u64, len: u32| (0..len).map(|i| 1 + ((tag * 7919 + from + u64::from(i)) % 1_000_003) as Token).collect::<Vec<_>>();
    let request = Request { tag, prompt: tokens(0, prompt), max_new_tokens: output, ..Request::default() };
    Job { time, request, len: output, output: tokens(500_000, output), ..Job::default() }
}

/// Orders jobs by their time.
pub(crate) fn sorted(mut jobs: Vec<Job>) -> Vec<Job> {
    jobs.sort_by_key(|job| job.time);
    jobs
}
