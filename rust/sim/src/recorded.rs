//! Reports a recorded journal in the format of a simulation.

use crate::report::Report;
use crate::utilization::Sample;
use chairlift_core::{ConfigError, Event, FinishReason, ParsedJournal, Replayed, Time, Timeline};
use std::collections::{HashMap, VecDeque};

/// Replays a journal and reports its requests with their recorded times. The report's times count from the first call,
/// like those of its [jobs](crate::jobs). Rejected requests are not in a journal. A step planned while another ran is
/// timed from the end of the other step.
pub fn recorded(journal: &ParsedJournal) -> Result<(Replayed, Report), ConfigError> {
    let begins = journal.begins();
    let mut seen = Seen { report: Report::default(), begins, now: 0, tokens: HashMap::new(), due: VecDeque::new(), free: 0 };
    let replayed = journal.replay_seen(|event| seen.look(&event))?;
    seen.report.stats = Some(replayed.scheduler.stats());
    Ok((replayed, seen.report))
}

struct Seen {
    report: Report,
    begins: Time,
    /// The current time. Like the core's clock, it never decreases.
    now: Time,
    /// By tag: the time of a request's last token, and the longest gap between two tokens.
    tokens: HashMap<u64, (Time, Time)>,
    /// The times at which the steps in flight were planned.
    due: VecDeque<Time>,
    /// The end of the last step.
    free: Time,
}

impl Seen {
    fn look(&mut self, event: &Event<'_>) {
        self.now = self.now.max(event.now - self.begins);
        let now = self.now;
        let report = &mut self.report;
        if event.planned {
            let plan = event.in_flight.back().expect("it was just planned");
            report.steps += 1;
            report.chunks += plan.chunks.len() as u64;
            self.due.push_back(now);
        }
        if event.committed {
            let planned = self.due.pop_front().expect("what is committed was planned");
            report.step_times.add(now - self.free.max(planned));
            self.free = now;
        }
        for output in event.tokens.iter().filter(|output| output.finish != Some(FinishReason::Error)) {
            let gap = self.tokens.get(&output.tag).map(|(last, _)| now - last);
            if let Some(gap) = gap {
                report.gaps.add(gap);
            }
            let (last, longest) = self.tokens.entry(output.tag).or_default();
            (*last, *longest) = (now, (*longest).max(gap.unwrap_or(0)));
        }
        for timeline in event.ended {
            report.longest_gaps.push(self.tokens.remove(&timeline.tag).map_or(0, |(_, longest)| longest));
            let timeline = since(self.begins, timeline);
            report.ended_at = report.ended_at.max(timeline.ended);
            report.ended.push(timeline);
        }
        report.utilization.add(Sample::of(now, event.scheduler, event.in_flight.front().map(Box::as_ref)));
    }
}

fn since(begins: Time, timeline: &Timeline) -> Timeline {
    let shift = |time: Time| time - begins;
    Timeline {
        arrived: shift(timeline.arrived),
        submitted: shift(timeline.submitted),
        started: timeline.started.map(shift),
        first_token: timeline.first_token.map(shift),
        ended: shift(timeline.ended),
        ..timeline.clone()
    }
}
