//! Arguments of `ebb events`.

use ebb_api::{EventType, EventsQuery, VmName};

use super::Output;

#[derive(clap::Args)]
pub struct Events {
    /// Go on with new events, until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
    /// Only events of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<VmName>,
    /// Only events of this type: state, refusal, decision, warning, stage or job; several with
    /// commas
    #[arg(long = "type", value_name = "TYPE,...", value_delimiter = ',')]
    pub types: Vec<EventType>,
    /// Only events after the event of this number; --json shows numbers
    #[arg(long, value_name = "NUMBER")]
    pub since: Option<u64>,
    #[command(flatten)]
    pub output: Output,
}

impl Events {
    /// What the daemon is asked for.
    pub fn query(self) -> EventsQuery {
        let types = self.types.iter().map(|kind| kind.as_str()).collect::<Vec<_>>().join(",");
        EventsQuery {
            vm: self.vm,
            types: Some(types).filter(|types| !types.is_empty()),
            since: self.since,
            follow: Some(self.follow),
        }
    }
}
