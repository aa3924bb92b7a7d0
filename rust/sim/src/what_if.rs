//! Jobs from a recorded journal, for simulation under other settings.

use crate::job::Job;
use chairlift_core::{Call, FinishReason, ParsedJournal, Request, Resumed, Time, Timeline};
use std::collections::HashMap;

/// The requests of a journal with their recorded outputs, taken from the timelines of its
/// [replay](ParsedJournal::replay). A request that its caller cancelled is cancelled after the same time. A request
/// that missed its deadline gets the output length that its caller predicted, or else its maximum.
pub fn jobs(journal: &ParsedJournal, ended: &[Timeline]) -> Vec<Job> {
    let by_tag: HashMap<u64, &Timeline> = ended.iter().map(|timeline| (timeline.tag, timeline)).collect();
    let mut jobs: Vec<Job> = Vec::new();
    let begins = journal.begins();
    for (time, call) in &journal.calls {
        let (request, fork_of) = match call {
            Call::Add(arrival) => (journal.request(arrival), None),
            Call::Fork { parent, tag } => {
                // Requests and forks are numbered in order of arrival.
                let parent = &jobs[*parent as usize].request;
                (Request { tag: *tag, ..parent.clone() }, Some(parent.tag))
            }
            _ => continue,
        };
        let (arrival_number, tag) = (jobs.len() as u64, request.tag);
        // Times and deadlines count from the first call.
        let shift = |at: Option<Time>| at.map(|at| at - begins);
        let request = match fork_of {
            None => {
                let resumed = request.resumed.map(|resumed| Resumed {
                    submitted: resumed.submitted - begins,
                    started: resumed.started - begins,
                    first_token: shift(resumed.first_token),
                    ..resumed
                });
                Request { deadline: shift(request.deadline), ttft_deadline: shift(request.ttft_deadline), resumed, ..request }
            }
            Some(_) => request,
        };
        let timeline = by_tag.get(&tag);
        let (made, finish) = timeline.map_or((request.max_new_tokens, None), |timeline| (timeline.output_tokens, timeline.finish));
        let whole = match finish {
            Some(FinishReason::Stop | FinishReason::Length | FinishReason::Error) => made,
            _ => request.predicted_tokens.unwrap_or(request.max_new_tokens).min(request.max_new_tokens),
        };
        // A resumed request has a part of its output before it begins.
        let len = whole.saturating_sub(request.resumed.map_or(0, |resumed| resumed.answered)).max(1);
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
    // The scheduler may receive a request after one that arrived later.
    jobs.sort_by_key(|job| job.time);
    jobs
}
