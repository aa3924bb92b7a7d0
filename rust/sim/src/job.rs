//! The input of a simulation.

use chairlift_core::{Request, STOP, Tier, Time, Token, VerifiedDraft};
use std::sync::Arc;

/// A simulated request.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Arrival time in microseconds.
    pub time: Time,
    /// The request. It ends when it samples [`STOP`].
    pub request: Request,
    /// Output tokens, up to the request's limit. The last is a stop token if the limit allows more.
    pub len: u32,
    /// Known output tokens, so that later prompts can contain them.
    pub output: Vec<Token>,
    /// Drafts that were verified when the request was recorded, by position. They are proposed again.
    pub drafts: Vec<VerifiedDraft>,
    /// Names of the prompt's blocks, if the job is of a journal. Each name covers the prompt up to the block's end.
    pub names: Vec<u64>,
    /// Tag of the parent if the job is a fork. The parent must come earlier.
    pub fork_of: Option<u64>,
    /// When the caller cancels the request, if it has not ended by then.
    pub cancelled_at: Option<Time>,
    /// Index of the request's model, where there are several.
    pub model: usize,
    /// The number of the request's session, if it has one. The router prefers the engine of the session.
    pub session: Option<u64>,
}

/// One request of a [`Workload`].
#[derive(Clone, Debug, Default)]
pub struct RequestSpec {
    /// Arrival time in microseconds.
    pub time: Time,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens.
    pub output: u32,
    /// Output tokens that the caller allowed, at least `output`.
    pub most: u32,
    /// Index into the workload's tenants.
    pub tenant: u32,
    /// The request's class.
    pub priority: i32,
    /// Deadline for the end, in microseconds after arrival.
    pub deadline: Option<Time>,
    /// Deadline for the first token, in microseconds after arrival.
    pub ttft_deadline: Option<Time>,
    /// Output tokens predicted by the caller.
    pub predicted: Option<u32>,
    /// Number of this request's names in the workload's names.
    pub names: u32,
    /// Index of the request's model, where there are several.
    pub model: u32,
    /// The request's tier.
    pub tier: Tier,
}

/// Requests given by their lengths. Their tokens are generated on arrival.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// Requests in order of arrival.
    pub specs: Vec<RequestSpec>,
    /// Names and weights of the tenants. A tenant with requests of several weights or tiers is here several times.
    pub tenants: Vec<(Arc<str>, u32)>,
    /// Names of the blocks of all prompts, one request after another. Equal names mean equal content up to the block's end.
    pub names: Vec<u64>,
    /// Tokens per name.
    pub name_block: u32,
    /// Recorded drafts with the index of their request, ordered by request and position.
    pub drafts: Vec<(usize, VerifiedDraft)>,
}

impl Workload {
    /// The requests as jobs, tagged by index. Prompts are equal exactly as far as their blocks' names are. Panics if a
    /// tenant or a name is missing.
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
            tier: spec.tier,
            deadline: spec.deadline.map(|after| spec.time + after),
            ttft_deadline: spec.ttft_deadline.map(|after| spec.time + after),
            predicted_tokens: spec.predicted,
            ..Request::default()
        };
        let first = self.drafts.partition_point(|(request, _)| (*request as u64) < tag);
        let own = self.drafts[first..].iter().take_while(|(request, _)| *request as u64 == tag);
        Job {
            time: spec.time,
            request,
            len: spec.output,
            drafts: own.map(|&(_, draft)| draft).collect(),
            model: spec.model as usize,
            ..Job::default()
        }
    }
}

/// A generated token for position `at` of sequence `of`. It is never [`STOP`] and is positive as an i32.
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
            drafts: Vec::new(),
        };
        let prompts: Vec<Vec<Token>> = workload.jobs().map(|job| job.request.prompt).collect();
        let common = |a: usize, b: usize| prompts[a].iter().zip(&prompts[b]).take_while(|(a, b)| a == b).count();
        assert!(prompts.iter().all(|prompt| prompt.len() == 10 && prompt.iter().all(|&token| token != STOP && token < 1 << 31)));
        assert_eq!([common(0, 1), common(0, 2), common(0, 3)], [8, 8, 0]);
    }
}
