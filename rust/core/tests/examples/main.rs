//! Examples of each policy and each limit, with numbers computed by hand.

mod admission;
mod audit;
mod background;
mod batching;
mod deadline;
mod external_service;
mod fair;
mod fcfs;
mod forks;
mod gather;
mod hold;
mod host;
mod journal;
mod lab;
mod preemption;
mod prefix;
mod preparation;
mod priority;
mod reads;
mod resumed;
mod sessions;
mod shortest;
mod snapshot;
mod states;
mod tiers;
mod timeline;
