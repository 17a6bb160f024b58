//! Guests that register their page metadata, as `docs/vprobe.md` says.

mod linux;
mod module;
mod other;
mod reading;
