//! The project's own chores: `cargo xtask --help` lists them.
#![forbid(unsafe_code)]

mod assets;
mod bench;
mod cargo;
mod demo;
mod guard;
mod guest_kernel;
mod interrupt;
mod plot;
mod results;
mod seed;
mod soak;

use std::process::ExitCode;

use clap::Parser;

/// Chores of the Ebb project
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Make the kernels, the initial RAM disks and the QEMU for tests and demo
    Assets(assets::Args),
    /// Show a real VM's memory on the host, without and with Ebb: live, as a table and as a plot; then
    /// three VMs under the pilot
    Demo,
    /// Measure Ebb against the bare system calls and against QEMU: tables, and JSON in target/bench
    Bench(bench::Args),
    /// Copy results of benchmarks to docs/results, and write docs/benchmarks.md and the table in
    /// README.md from them
    Results(results::Args),
    /// Build the guest's Linux with the allocator that it shares with the host
    GuestKernel(guest_kernel::Args),
    /// Fetch QEMU 11, which has a device for any vhost-user back end, and print its path
    #[command(name = "qemu11")]
    Qemu11,
    /// Repeat fuzzing and the tests that look for rare events, until the time is up; or run everything
    /// at once for hours (`all`)
    Soak(soak::Args),
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Assets(args) => assets::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::Demo => demo::run(),
        Task::GuestKernel(args) => guest_kernel::run(&args),
        Task::Qemu11 => assets::run_qemu11(),
        Task::Results(args) => results::run(&args),
        Task::Soak(args) => soak::run(&args),
    };
    vmtest::undo::settle();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
