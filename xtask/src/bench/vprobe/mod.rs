//! The figures of V-Probe's paper. `docs/benchmarks.md` explains each row.

mod api;
mod side;

pub mod fig10;
pub mod fig11;
pub mod fig8;
pub mod fig9;
pub mod spurious;
