//! `ebbd`, the daemon: all of it is in the library beside, so that fuzz targets reach what it reads.
#![forbid(unsafe_code)]

fn main() {
    ebbd::main();
}
