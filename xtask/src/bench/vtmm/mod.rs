//! The figures of the vTMM paper: finding hot memory, placing it, and moving it.

pub mod fault;
pub mod fig2;
pub mod fig3;
pub mod fig5;
pub mod fig8;
mod placement;
mod rig;
pub mod sort;
pub mod tab4;
