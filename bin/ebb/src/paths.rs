//! Files and sockets that a command line names.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::{fs, path};

use anyhow::{Context, bail};
use ebb_api::DiskRequest;

/// Makes a path absolute, because the daemon has another working directory. The path goes there as
/// JSON, which is UTF-8.
pub fn absolute(path: PathBuf) -> anyhow::Result<PathBuf> {
    let absolute = path::absolute(&path).with_context(|| path.display().to_string())?;
    if absolute.to_str().is_none() {
        bail!("{} is not UTF-8; rename it", path.display());
    }
    Ok(absolute)
}

pub fn absolute_disk(disk: DiskRequest) -> anyhow::Result<DiskRequest> {
    Ok(DiskRequest { path: absolute(disk.path)?, ..disk })
}

pub fn existing_file(path: &Path) -> anyhow::Result<()> {
    let found = fs::metadata(path).with_context(|| path.display().to_string())?;
    if !found.is_file() {
        bail!("{} is not a file", path.display());
    }
    Ok(())
}

pub fn writable_place(file: &Path) -> anyhow::Result<()> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    if !directory.is_dir() {
        bail!("{}: {} is no directory", file.display(), directory.display());
    }
    if file.is_dir() {
        bail!("{} is a directory: give a file's name", file.display());
    }
    Ok(())
}

pub fn existing_socket(path: PathBuf) -> anyhow::Result<PathBuf> {
    let path = absolute(path)?;
    let found = fs::metadata(&path).with_context(|| path.display().to_string())?;
    if !found.file_type().is_socket() {
        bail!("{} is not a UNIX socket", path.display());
    }
    Ok(path)
}
