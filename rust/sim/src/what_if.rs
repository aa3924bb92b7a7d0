//! A recorded day, to be lived again under other settings.

use crate::job::Job;
use chairlift_core::{Call, FinishReason, ParsedJournal, Request, Time, Timeline};
use std::collections::HashMap;

/// The requests of a journal, each with the output that it had, by the
/// accounts of its [replay](ParsedJournal::replay). One that its caller left goes
/// after as long; one that missed its deadline would have generated what its
/// caller predicted, or all it was allowed.
pub fn jobs(journal: &ParsedJournal, ended: &[Timeline]) -> Vec<Job> {
    let by_tag: HashMap<u64, &Timeline> = ended.iter().map(|timeline| (timeline.tag, timeline)).collect();
    let mut jobs: Vec<Job> = Vec::new();
    let begins = journal.begins();
    for (time, call) in &journal.calls {
        let (request, fork_of) = match call {
            Call::Add(arrival) => (journal.request(arrival), None),
            Call::Fork { parent, tag } => {
                // Requests and forks are numbered in the order of their coming.
                let parent = &jobs[*parent as usize].request;
                (Request { tag: *tag, ..parent.clone() }, Some(parent.tag))
            }
            _ => continue,
        };
        let (arrival_number, tag) = (jobs.len() as u64, request.tag);
        // Times count from the beginning, deadlines with them.
        let shift = |at: Option<Time>| at.map(|at| at - begins);
        let request = match fork_of {
            None => Request { deadline: shift(request.deadline), ttft_deadline: shift(request.ttft_deadline), ..request },
            Some(_) => request,
        };
        let timeline = by_tag.get(&tag);
        let (made, finish) = timeline.map_or((request.max_new_tokens, None), |timeline| (timeline.output_tokens, timeline.finish));
        let len = match finish {
            Some(FinishReason::Stop | FinishReason::Length | FinishReason::Error) => made.max(1),
            _ => request.predicted_tokens.unwrap_or(request.max_new_tokens).clamp(1, request.max_new_tokens),
        };
        let prompt = request.prompt.len() as u32;
        let left = finish == Some(FinishReason::Abort);
        jobs.push(Job {
            time: time - begins,
            len,
            output: (0..len).map(|i| journal.token(arrival_number, prompt + i)).collect(),
            cancelled_at: timeline.filter(|_| left).map(|timeline| timeline.ended - begins),
            request,
            fork_of,
            ..Job::default()
        });
    }
    // The scheduler may hear of a request after one that came later.
    jobs.sort_by_key(|job| job.time);
    jobs
}
