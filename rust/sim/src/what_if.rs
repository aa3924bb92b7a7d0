//! A recorded day, to be lived again under other settings.

use crate::Job;
use chairlift_core::{Call, FinishReason, Ledger, Script, Time};
use std::collections::HashMap;

/// The requests of a journal, each with the output that it had, by the
/// accounts of its [replay](Script::replay). One that its caller left goes
/// after as long; one that missed its deadline would have generated what its
/// caller predicted, or all it was allowed.
pub fn jobs(script: &Script, ended: &[Ledger]) -> Vec<Job> {
    let by_tag: HashMap<u64, &Ledger> = ended.iter().map(|ledger| (ledger.tag, ledger)).collect();
    let (mut jobs, mut tags): (Vec<Job>, Vec<u64>) = (Vec::new(), Vec::new());
    let begins = script.calls.first().map_or(0, |(time, _)| *time);
    for (time, call) in &script.calls {
        let (request, sibling_of) = match call {
            Call::Add(arrival) => (script.request(arrival), None),
            Call::Fork { parent, tag } => {
                let parent = tags[*parent as usize];
                let of = jobs.iter().find(|job| job.request.tag == parent).map(|job| job.request.clone());
                let Some(mut request) = of else { continue };
                request.tag = *tag;
                (request, Some(parent))
            }
            _ => continue,
        };
        let (ticket, tag) = (tags.len() as u64, request.tag);
        tags.push(tag);
        // Times count from the beginning, deadlines with them.
        let shift = |at: Option<Time>| at.map(|at| at - begins);
        let request = chairlift_core::Request { deadline: shift(request.deadline), ttft_deadline: shift(request.ttft_deadline), ..request };
        let ledger = by_tag.get(&tag);
        let (made, finish) = ledger.map_or((request.max_new_tokens, None), |ledger| (ledger.output_tokens, ledger.finish));
        let len = match finish {
            Some(FinishReason::Stop | FinishReason::Length | FinishReason::Error) => made.max(1),
            _ => request.predicted_tokens.unwrap_or(request.max_new_tokens).clamp(1, request.max_new_tokens),
        };
        let prompt = request.prompt.len() as u32;
        let left = finish == Some(FinishReason::Abort);
        jobs.push(Job {
            time: time - begins,
            output: (0..len).map(|i| script.token(ticket, prompt + i)).collect(),
            gone: ledger.filter(|_| left).map(|ledger| ledger.ended - begins),
            request,
            sibling_of,
        });
    }
    jobs
}
