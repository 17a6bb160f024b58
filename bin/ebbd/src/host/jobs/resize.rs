//! A job that brings a VM to its target.

use axum::body::Bytes;
use axum::http::Method;
use ebb_api::{
    ApiErrorBody, ErrorCode, JobProgress, JobUnit, ResizeReport, ResizeRequest, SizeState, route,
};
use ebb_units::Bytes as Size;
use tokio::time::sleep;

use super::report::{End, Report};
use super::run::{LOOK_EVERY, Of, Refused, to_bytes};
use super::silence::Silence;

/// The request that drops the target.
const OFF: ResizeRequest = ResizeRequest { bytes: None, node: None, by: None, on_violation: None };

/// Sets the target, and waits until it is reached or blocked. The worker makes its steps beside its
/// other work, so other jobs have their turn meanwhile.
pub async fn run<T>(vm: &Of<'_>, request: ResizeRequest, turn: T) -> Result<End, Refused> {
    let mut report: ResizeReport = vm.ask(Method::PUT, route::SIZE, to_bytes(&request)?).await?;
    drop(turn);
    let (way, mut silence) = (Way::of(&report), Silence::default());
    while report.state == SizeState::Moving {
        vm.doing.note(way.progress(&report));
        let next = tokio::select! {
            () = vm.doing.cancelled() => return stay(vm, &way).await,
            next = vm.look(route::SIZE) => next.map_err(ApiErrorBody::from),
        };
        report = match next {
            Ok(next) => next,
            Err(why) if why.code == Some(ErrorCode::NotSet) => return Ok(dropped()),
            Err(why) if silence.bears(&why) => continue,
            Err(why) => return Ok(End::refused(why)),
        };
        silence.end();
        if !way.is_of(&report) {
            return Ok(replaced(report));
        }
    }
    vm.doing.note(way.progress(&report));
    Ok(End::resized(report))
}

/// Drops the target, if it is still the job's: the VM keeps the size that it has come to.
async fn stay(vm: &Of<'_>, way: &Way) -> Result<End, Refused> {
    let mut silence = Silence::default();
    loop {
        match drop_target(vm, way).await.map_err(ApiErrorBody::from) {
            Ok(end) => return Ok(end),
            Err(why) if why.code == Some(ErrorCode::NotSet) => return Ok(dropped()),
            Err(why) if silence.bears(&why) => {}
            Err(why) => return Ok(End::refused(why)),
        }
        sleep(LOOK_EVERY).await;
    }
}

async fn drop_target(vm: &Of<'_>, way: &Way) -> Result<End, Refused> {
    let report: ResizeReport = vm.ask(Method::GET, route::SIZE, Bytes::new()).await?;
    if !way.is_of(&report) {
        return Ok(replaced(report));
    }
    let report: ResizeReport = vm.ask(Method::PUT, route::SIZE, to_bytes(&OFF)?).await?;
    let text = format!("stays at {}", Size(report.bytes));
    Ok(End::cancelled(&text, Report::Resize(report)))
}

fn dropped() -> End {
    End::cancelled("its target was dropped meanwhile", Report::Nothing)
}

fn replaced(report: ResizeReport) -> End {
    End::cancelled("another target was set meanwhile", Report::Resize(report))
}

/// The way from a size to another one.
struct Way {
    start_bytes: u64,
    wanted_bytes: u64,
    node: Option<u32>,
}

impl Way {
    /// The way of which this is the first report: some of it may be done already.
    fn of(report: &ResizeReport) -> Way {
        let start_bytes =
            report.bytes.saturating_add(report.taken_bytes).saturating_sub(report.returned_bytes);
        Way { start_bytes, wanted_bytes: report.wanted_bytes, node: report.node }
    }

    fn is_of(&self, report: &ResizeReport) -> bool {
        (report.wanted_bytes, report.node) == (self.wanted_bytes, self.node)
    }

    fn progress(&self, report: &ResizeReport) -> JobProgress {
        let total = self.start_bytes.abs_diff(self.wanted_bytes);
        let left = report.bytes.abs_diff(self.wanted_bytes);
        JobProgress { done: total.saturating_sub(left), total: Some(total), unit: JobUnit::Bytes }
    }
}
