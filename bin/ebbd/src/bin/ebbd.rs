//! `ebbd`, the daemon. All of its code is in the library, so that fuzz targets reach what it reads.
#![forbid(unsafe_code)]

fn main() {
    ebbd::main();
}
