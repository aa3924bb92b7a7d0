//! Jobs from a recorded journal, for simulation under other settings.

use crate::job::{Job, RequestSpec, Workload};
use chairlift_core::{
    Arrival, Call, FinishReason, ParsedJournal, Preparation, Replayed, Request, Resumed, SessionEvent, Time, Timeline, VerifiedDraft,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What a journal has for a simulated engine.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Request(Box<Job>),
    /// What a tenant said of one of its sessions.
    Session(Arc<str>, Arc<str>, SessionEvent),
}

/// The requests of a journal with their recorded outputs, taken from its
/// [replay](ParsedJournal::replay). A request that its caller cancelled is cancelled after the same time. A request
/// that missed its deadline gets the output length that its caller predicted, or else its maximum.
pub fn jobs(journal: &ParsedJournal, replayed: &Replayed) -> Vec<Job> {
    let inputs = inputs(journal, replayed).into_iter();
    inputs.filter_map(|(_, input)| if let Input::Request(job) = input { Some(*job) } else { None }).collect()
}

/// The requests of a journal, and what callers said of their sessions, in the order of time. See [`jobs`].
pub(crate) fn inputs(journal: &ParsedJournal, replayed: &Replayed) -> Vec<(Time, Input)> {
    let by_tag: HashMap<u64, &Timeline> = replayed.ended.iter().map(|timeline| (timeline.tag, timeline)).collect();
    let mut drafts: HashMap<u64, Vec<VerifiedDraft>> = HashMap::new();
    for &(arrival_number, draft) in &replayed.drafts {
        drafts.entry(arrival_number).or_default().push(draft);
    }
    let mut jobs: Vec<Job> = Vec::new();
    let mut notes = Vec::new();
    let mut grammars = Grammars::default();
    let begins = journal.begins();
    for (time, call) in &journal.calls {
        let mut job = match call {
            Call::Add(arrival) => {
                grammars.begin(arrival.arrival_number, arrival.request.preparation);
                arrived(journal, arrival, begins)
            }
            Call::Prepare { arrival_number, next } => {
                if grammars.end(*arrival_number, *next) {
                    begin_later(&mut jobs, *arrival_number as usize, time - begins);
                }
                continue;
            }
            Call::Fork { parent, tag } => {
                // Requests and forks are numbered in order of arrival.
                forked(&jobs[*parent as usize], *tag, time - begins)
            }
            Call::NoteSession { tenant, session, event } => {
                notes.push((time - begins, jobs.len(), Input::Session(Arc::clone(tenant), Arc::clone(session), *event)));
                continue;
            }
            _ => continue,
        };
        let arrival_number = jobs.len() as u64;
        let end = by_tag.get(&job.request.tag).map(|timeline| (timeline.output_tokens, timeline.finish, timeline.ended - begins));
        set_output(&mut job, journal, arrival_number, end);
        job.drafts = drafts.remove(&arrival_number).unwrap_or_default();
        jobs.push(job);
    }
    // A note comes before the requests that were recorded after it.
    let jobs = jobs.into_iter().zip(1..).map(|(job, number)| (job.time, number, Input::Request(Box::new(job))));
    let mut inputs: Vec<_> = notes.into_iter().chain(jobs).collect();
    // The scheduler may receive a request after one that arrived later.
    inputs.sort_by_key(|&(time, number, ref input)| (time, number, matches!(input, Input::Session(..))));
    inputs.into_iter().map(|(time, _, input)| (time, input)).collect()
}

/// A recorded request without its output. Times and deadlines count from `begins`, which a deadline may precede.
pub(crate) fn arrived(journal: &ParsedJournal, arrival: &Arrival, begins: Time) -> Job {
    let shift = |at: Option<Time>| at.map(|at| at.saturating_sub(begins));
    let request = journal.request(arrival);
    let resumed = request.resumed.map(|resumed| Resumed {
        submitted: resumed.submitted - begins,
        started: resumed.started - begins,
        first_token: shift(resumed.first_token),
        ..resumed
    });
    let (deadline, ttft_deadline) = (shift(request.deadline), shift(request.ttft_deadline));
    let request = Request { deadline, ttft_deadline, preparation: None, resumed, ..request };
    Job { time: arrival.time - begins, names: journal.block_names(arrival), request, ..Job::default() }
}

/// A fork of a recorded request, without its output.
pub(crate) fn forked(parent: &Job, tag: u64, time: Time) -> Job {
    let request = Request { tag, ..parent.request.clone() };
    Job { time, names: parent.names.clone(), fork_of: Some(parent.request.tag), request, ..Job::default() }
}

/// Gives a recorded request the output that it had. `end` has the number of its tokens, and why and when it ended, if it has.
pub(crate) fn set_output(job: &mut Job, journal: &ParsedJournal, number: u64, end: Option<(u32, Option<FinishReason>, Time)>) {
    let request = &job.request;
    let (made, finish, ended) = end.unwrap_or((request.max_new_tokens, None, 0));
    let whole = match finish {
        Some(FinishReason::Stop | FinishReason::Length | FinishReason::Error) => made,
        _ => request.predicted_tokens.unwrap_or(request.max_new_tokens).min(request.max_new_tokens),
    };
    // A resumed request has a part of its output before it begins.
    let len = whole.saturating_sub(request.resumed.map_or(0, |resumed| resumed.answered)).max(1);
    let prompt = request.prompt.len() as u32;
    job.len = len;
    job.output = (0..len).map(|i| journal.token(number, prompt + i)).collect();
    job.cancelled_at = (finish == Some(FinishReason::Abort)).then_some(ended);
}

/// Requests whose grammars are compiled, by arrival number. They arrive when that is done. Reads of prefixes are left out: they follow the turns
/// of sessions, which may come at other times.
#[derive(Debug, Default)]
pub(crate) struct Grammars(HashSet<u64>);

impl Grammars {
    /// Records the preparation of a request that arrives.
    pub(crate) fn begin(&mut self, request: u64, preparation: Option<Preparation>) {
        if preparation == Some(Preparation::Grammar) {
            self.0.insert(request);
        }
    }

    /// Records that a preparation was done, and the next one. Returns whether the request arrives now.
    pub(crate) fn end(&mut self, request: u64, next: Option<Preparation>) -> bool {
        let was_compiled = self.0.remove(&request);
        self.begin(request, next);
        was_compiled && !self.0.contains(&request)
    }

    /// Forgets a request that has ended.
    pub(crate) fn forget(&mut self, request: u64) {
        self.0.remove(&request);
    }
}

/// Lets a request, and the forks that were added with it, arrive when the request was prepared.
fn begin_later(jobs: &mut [Job], request: usize, time: Time) {
    let tag = jobs[request].request.tag;
    jobs[request].time = time;
    jobs[request + 1..].iter_mut().take_while(|job| job.fork_of == Some(tag)).for_each(|job| job.time = time);
}

/// The requests of a journal by their lengths, for another load or machine. In contrast to [`jobs`], an aborted request
/// ends with the tokens that it had, and prompts share only what earlier prompts have, not earlier outputs. Sessions are left out: at
/// other times, what their callers said of them would not hold.
pub fn recorded_workload(journal: &ParsedJournal, replayed: &Replayed) -> Workload {
    let made: HashMap<u64, u32> = replayed.ended.iter().map(|timeline| (timeline.tag, timeline.output_tokens)).collect();
    let mut workload = Workload { name_block: journal.config.block_size, ..Workload::default() };
    let mut tenants = HashMap::new();
    for (job, at) in jobs(journal, replayed).into_iter().zip(0..) {
        let Request { tag, prompt, max_new_tokens, tenant, weight, tier, priority, deadline, ttft_deadline, predicted_tokens, .. } =
            job.request;
        let output = if job.cancelled_at.is_some() { made[&tag].max(1) } else { job.len };
        let number = *tenants.entry((Arc::clone(&tenant), weight, tier as u8)).or_insert_with(|| {
            workload.tenants.push((tenant, weight));
            workload.tenants.len() as u32 - 1
        });
        workload.specs.push(RequestSpec {
            time: job.time,
            prompt: prompt.len() as u32,
            output,
            most: max_new_tokens.max(output),
            tenant: number,
            priority,
            deadline: deadline.map(|due| due.saturating_sub(job.time)),
            ttft_deadline: ttft_deadline.map(|due| due.saturating_sub(job.time)),
            predicted: predicted_tokens,
            names: job.names.len() as u32,
            model: 0,
            tier,
        });
        workload.names.extend(job.names);
        workload.drafts.extend(job.drafts.into_iter().map(|draft| (at, draft)));
    }
    workload
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_arrives_when_its_grammar_is_compiled_and_not_when_its_prefix_is_read() {
        let [grammar, read] = [Preparation::Grammar, Preparation::ReadCache].map(Some);
        let mut grammars = Grammars::default();
        for (request, preparation) in [(1, grammar), (2, read), (3, grammar), (4, grammar)] {
            grammars.begin(request, preparation);
        }
        assert!(grammars.end(1, read) && !grammars.end(1, None));
        assert!(!grammars.end(2, None));
        assert!(!grammars.end(3, grammar) && grammars.end(3, None));
        grammars.forget(4);
        assert!(!grammars.end(4, None));
    }
}
