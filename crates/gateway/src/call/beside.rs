//! Long bodies are read beside the worker, not on it.

use super::outcome::Rejection;

/// Longer bodies are read on a thread of their own. 64 MiB hold up a worker, and with it all of its streams, for 35 ms (one long text) to
/// 260 ms (numbers), and copying them for 100 ms.
const READ_HERE_BYTES: usize = 1024 * 1024;

pub(super) fn is_read_here(bytes: usize) -> bool {
    bytes <= READ_HERE_BYTES
}

/// Does what takes a time that grows with so many bytes.
#[expect(
    clippy::disallowed_methods,
    reason = "awaited by its call; how many there can be is bounded by the bytes of all bodies"
)]
pub(super) async fn aside<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Rejection> {
    if is_read_here(bytes) {
        return Ok(work());
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_panicked| Rejection::Internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn much_is_read_beside_the_worker_and_little_at_once() {
        let here = std::thread::current().id();
        let on = || std::thread::current().id();
        assert_eq!(aside(READ_HERE_BYTES, on).await.unwrap(), here);
        assert_ne!(aside(READ_HERE_BYTES + 1, on).await.unwrap(), here);
    }
}
