//! What is asked of a simulation.

use chairlift_core::{Request, STOP, Time, Token};
use std::sync::Arc;

/// A request of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// When it comes, in microseconds.
    pub time: Time,
    /// What it asks for; it stops at [`STOP`].
    pub request: Request,
    /// Tokens that it generates if it may go on: the last is a stop if there would be room for more.
    pub len: u32,
    /// What they are, as far as anybody may ask for them again.
    pub output: Vec<Token>,
    /// Names of its prompt's blocks, each for all up to its end, for routers that look at them.
    pub names: Vec<u64>,
    /// Tokens of a block that has a name.
    pub name_block: u32,
    /// The tag of the request that it is a fork of: that one came before.
    pub fork_of: Option<u64>,
    /// When its caller goes, if that is before its end.
    pub cancelled_at: Option<Time>,
}

/// A line of a [`Workload`].
#[derive(Clone, Debug, Default)]
pub struct RequestSpec {
    /// When it comes, in microseconds.
    pub time: Time,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens that it generates.
    pub output: u32,
    /// Tokens that its caller allowed: as many, or more.
    pub most: u32,
    /// Whose it is, among the workload's tenants.
    pub tenant: u32,
    /// Its class.
    pub priority: i32,
    /// Microseconds after its coming at which it must have ended.
    pub deadline: Option<Time>,
    /// Likewise, for its first token.
    pub ttft_deadline: Option<Time>,
    /// Output tokens that its caller predicts.
    pub predicted: Option<u32>,
    /// How many of the workload's names are its own.
    pub names: u32,
}

/// Requests by lengths: their tokens are made up when they come.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// In the order of their times.
    pub specs: Vec<RequestSpec>,
    /// Names and weights.
    pub tenants: Vec<(Arc<str>, u32)>,
    /// The names of all prompts' blocks, one request's after another's: equal names, equal content up to the block's end.
    pub names: Vec<u64>,
    /// Tokens that a name stands for.
    pub name_block: u32,
}

impl Workload {
    /// The requests as jobs, with their places as tags. Prompts are equal as
    /// far as their blocks' names are, and nowhere else. Panics if a tenant or
    /// a name is missing.
    pub fn jobs(&self) -> impl Iterator<Item = Job> + '_ {
        let mut names = self.names.as_slice();
        self.specs.iter().zip(0..).map(move |(spec, tag)| {
            let (own, rest) = names.split_at(spec.names as usize);
            names = rest;
            self.job(spec, tag, own)
        })
    }

    fn job(&self, spec: &RequestSpec, tag: u64, names: &[u64]) -> Job {
        let (tenant, weight) = &self.tenants[spec.tenant as usize];
        let mut prompt = Vec::with_capacity(spec.prompt as usize);
        for &name in names {
            let len = self.name_block.min(spec.prompt - prompt.len() as u32);
            prompt.extend((0..u64::from(len)).map(|at| token(!name, at)));
        }
        prompt.extend((prompt.len() as u64..u64::from(spec.prompt)).map(|at| token(tag, at)));
        let request = Request {
            tag,
            prompt,
            max_new_tokens: spec.most,
            stop: vec![STOP],
            priority: spec.priority,
            tenant: Arc::clone(tenant),
            weight: *weight,
            deadline: spec.deadline.map(|after| spec.time + after),
            ttft_deadline: spec.ttft_deadline.map(|after| spec.time + after),
            predicted_tokens: spec.predicted,
            ..Request::default()
        };
        Job { time: spec.time, request, len: spec.output, names: names.to_vec(), name_block: self.name_block, ..Job::default() }
    }
}

/// A made-up token, in one place of something: no [`STOP`], and positive as an i32.
pub(crate) fn token(of: u64, at: u64) -> Token {
    let mixed = u128::from(of.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ at) * 0xD6E8_FEB8_6659_FD93;
    ((mixed as u64 ^ (mixed >> 64) as u64) >> 34) as Token + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_equal_as_far_as_their_names() {
        let spec = |prompt, names| RequestSpec { prompt, output: 1, most: 1, names, ..RequestSpec::default() };
        let workload = Workload {
            specs: vec![spec(10, 3), spec(10, 3), spec(10, 2), spec(10, 0)],
            tenants: vec![("".into(), 1)],
            names: vec![1, 2, 3, 1, 2, 9, 1, 2],
            name_block: 4,
        };
        let prompts: Vec<Vec<Token>> = workload.jobs().map(|job| job.request.prompt).collect();
        let common = |a: usize, b: usize| prompts[a].iter().zip(&prompts[b]).take_while(|(a, b)| a == b).count();
        assert!(prompts.iter().all(|prompt| prompt.len() == 10 && prompt.iter().all(|&token| token != STOP && token < 1 << 31)));
        assert_eq!([common(0, 1), common(0, 2), common(0, 3)], [8, 8, 0]);
    }
}
