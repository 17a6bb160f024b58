//! Which changes of a VM's state are news.

use ebb_api::VmChange;

use super::News;

/// What was told of a VM's state last.
#[derive(Default)]
pub struct States(Option<Told>);

struct Told {
    change: VmChange,
    reason: Option<String>,
}

impl States {
    /// Of a VM that is managed, which was told.
    pub fn managed() -> States {
        States(Some(Told { change: VmChange::Managed, reason: None }))
    }

    /// Notes a change. Returns the news, if it is some.
    pub fn change(&mut self, change: VmChange, reason: Option<String>) -> Option<News> {
        let is_known = self.0.as_ref().is_some_and(|told| match (told.change, change) {
            (VmChange::NotRecovered, VmChange::NotRecovered) => told.reason == reason,
            // A VM that cannot be recovered is tried again and again.
            (VmChange::NotRecovered, VmChange::Recovering) => true,
            (told, change) => told == change,
        });
        if is_known {
            return None;
        }
        self.0 = Some(Told { change, reason: reason.clone() });
        Some(News::State(change, reason))
    }
}
