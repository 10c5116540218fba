//! What a person writes, and what they are told.

use std::path::PathBuf;

use super::*;

pub(crate) mod docs;
mod files;
mod mistakes;
mod random;
mod secrets;
mod settings;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn loaded(text: &str) -> Loaded {
    loaded_with(text, &[])
}

fn loaded_with(text: &str, env: &[(&str, &str)]) -> Loaded {
    parse(text, &env.iter().copied().collect())
        .unwrap_or_else(|mistakes| panic!("{text}\n{mistakes}"))
}

fn refused(text: &str) -> String {
    refused_with(text, &[])
}

fn refused_with(text: &str, env: &[(&str, &str)]) -> String {
    match parse(text, &env.iter().copied().collect()) {
        Ok(_) => panic!("this was accepted:\n{text}"),
        Err(mistakes) => mistakes.to_string(),
    }
}

/// A folder of its own for one test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("tidegate-config-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let file = self.0.join(name);
        std::fs::write(&file, text).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        file.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
