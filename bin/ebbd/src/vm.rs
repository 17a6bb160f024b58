//! One VM: managed by a worker, whose controllers each see to one mechanism.

pub mod attach;
pub mod context;
pub mod detach;
pub mod devices;
pub mod limit;
mod make_pager;
pub mod publisher;
mod reclaim;
pub mod recover;
mod resize;
mod small_pages;
mod status;
pub mod tiering;
mod trust;
pub mod worker;
