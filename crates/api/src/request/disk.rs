//! A disk that a VM is to have.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DiskFormat, DmaMode};

/// A disk that Ebb serves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskRequest {
    /// A raw image: a file or a block device; absolute path.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// The guest cannot write it.
    #[serde(default)]
    pub readonly: bool,
    /// How the disk accesses the guest's memory.
    #[serde(default)]
    pub dma: DmaMode,
    /// The image's format; null: raw, but an image that begins like another format is refused.
    #[serde(default)]
    pub format: Option<DiskFormat>,
}

impl FromStr for DiskRequest {
    type Err = String;

    /// As on the command line: `PATH`, and behind it `,readonly`, `,dma=MODE` and
    /// `,format=raw`.
    fn from_str(text: &str) -> Result<DiskRequest, String> {
        let mut words = text.split(',');
        let path = words.next().filter(|path| !path.is_empty());
        let usage = || "write PATH, and behind it ,readonly ,dma=strict or ,format=raw".to_owned();
        let path = path.ok_or_else(usage)?.into();
        let mut disk = DiskRequest { path, readonly: false, dma: DmaMode::default(), format: None };
        for word in words {
            let bad = |error| format!("{word}: {error}");
            match word.split_once('=') {
                Some(("dma", mode)) => disk.dma = mode.parse().map_err(bad)?,
                Some(("format", format)) => disk.format = Some(format.parse().map_err(bad)?),
                None if word == "readonly" => disk.readonly = true,
                _ => return Err(usage()),
            }
        }
        Ok(disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_may_be_readonly() {
        let image = |text: &str| text.parse().map(|disk: DiskRequest| (disk.path, disk.readonly));
        assert!(image("a,b.img").is_err_and(|why| why.starts_with("write PATH")));
        assert_eq!(image("a.img"), Ok(("a.img".into(), false)));
        assert_eq!(image("a.img,readonly"), Ok(("a.img".into(), true)));
        assert!(image("").is_err() && image(",readonly").is_err());
    }

    #[test]
    fn an_image_may_be_raw_by_word() {
        let format = |text: &str| text.parse().map(|disk: DiskRequest| disk.format);
        assert_eq!(format("a.img,readonly"), Ok(None));
        assert_eq!(format("a.img,format=raw,readonly"), Ok(Some(DiskFormat::Raw)));
        assert!(format("a.img,format=qcow2").is_err_and(|why| why.contains("format=qcow2")));
        assert!(format("a.img,format").is_err());
    }
}
