//! One VM: a worker manages it, and each controller of the worker runs one mechanism.

pub mod attach;
pub mod context;
pub mod detach;
pub mod devices;
mod hyperalloc;
pub mod limit;
mod make_pager;
mod make_userfaultfd;
mod member;
mod parts;
pub mod passed_through;
mod piloted;
pub mod publisher;
pub mod ready;
mod reclaim;
pub mod recover;
mod resize;
mod returned;
mod small_pages;
mod status;
pub mod tiering;
mod times;
mod trust;
pub mod worker;
