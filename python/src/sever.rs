//! Ends a call that is blocked on a socket, from outside: the socket is shut down under it.
//!
//! Which socket? The one that the call's own thread is inside an operation on, which its innermost Python frame
//! tells: `SSLSocket.read`, `SocketIO.readinto`, the `read` of an HTTP library's stream. While this code runs it is
//! attached to the interpreter, and runs no Python code, so that no other thread can: the thread that is looked at
//! cannot give the connection back to a pool, nor another call take it from there, between the look and the
//! shutdown. That holds only with a global interpreter lock; without one, Python does not come here.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

/// How far up a stack it looks for a connection that several calls share.
const DEPTH: usize = 48;

/// What the innermost frame of a thread in a socket operation is called.
const OPERATIONS: [&str; 19] = [
    "read",
    "readinto",
    "readinto1",
    "readline",
    "readall",
    "recv",
    "recv_into",
    "recvfrom",
    "recvfrom_into",
    "write",
    "send",
    "sendall",
    "sendmsg",
    "connect",
    "connect_tcp",
    "create_connection",
    "do_handshake",
    "start_tls",
    "_create",
];

/// The names under which such a frame keeps its socket, beside `self` itself.
const LOCALS: [&str; 3] = ["sock", "s", "conn"];
const ATTRIBUTES: [&str; 3] = ["_sock", "sock", "_socket"];

/// Keeps the garbage collector from running finalizers, which are Python code, in the middle of it.
struct NoCollection<'py>(Option<Bound<'py, PyModule>>);

/// Severs what `thread` is blocked on. `severed`; `elsewhere`: it is on no socket; `shared`: others are on it too.
pub(crate) fn thread(py: Python<'_>, thread: u64) -> PyResult<&'static str> {
    let sys = py.import("sys")?;
    let _kept = NoCollection::new(py)?;
    let frames = sys.call_method0("_current_frames")?;
    let Some(frame) = frames.cast::<PyDict>()?.get_item(thread)? else {
        return Ok("elsewhere");
    };
    let Some(socket) = socket_of(py, &frame)? else {
        return Ok("elsewhere");
    };
    if is_shared(&frame)? {
        return Ok("shared");
    }
    let fd: i64 = socket.1.call_method1("fileno", (&socket.0,))?.extract()?;
    Ok(if fd >= 0 && shut_down(fd) {
        "severed"
    } else {
        "elsewhere"
    })
}

/// The socket that the frame is inside an operation on, with the type of all sockets.
fn socket_of<'py>(
    py: Python<'py>,
    frame: &Bound<'py, PyAny>,
) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, PyType>)>> {
    let kind = py
        .import("_socket")?
        .getattr("socket")?
        .cast_into::<PyType>()?;
    let name = frame.getattr("f_code")?.getattr("co_name")?;
    let name: String = name.extract()?;
    if !OPERATIONS.contains(&name.as_str()) {
        return Ok(None);
    }
    let locals = frame.getattr("f_locals")?;
    if let Some(this) = local(&locals, "self")? {
        if this.is_instance(&kind)? {
            return Ok(Some((this, kind)));
        }
        for attribute in ATTRIBUTES {
            if let Some(socket) = own(&this, attribute)?
                && socket.is_instance(&kind)?
            {
                return Ok(Some((socket, kind)));
            }
        }
    }
    for name in LOCALS {
        if let Some(socket) = local(&locals, name)?
            && socket.is_instance(&kind)?
        {
            return Ok(Some((socket, kind)));
        }
    }
    Ok(None)
}

fn local<'py>(locals: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    match locals.get_item(name) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_instance_of::<PyKeyError>(locals.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An attribute out of the object's own dictionary: a property would run code.
fn own<'py>(this: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(all) = this.getattr_opt("__dict__")? else {
        return Ok(None);
    };
    match all.cast::<PyDict>() {
        Ok(all) => all.get_item(name),
        Err(_) => Ok(None),
    }
}

/// Whether the operation is one of an HTTP/2 connection, which other calls' streams are on too.
fn is_shared(frame: &Bound<'_, PyAny>) -> PyResult<bool> {
    let mut frame = frame.clone();
    for _ in 0..DEPTH {
        let file: String = frame.getattr("f_code")?.getattr("co_filename")?.extract()?;
        if file.ends_with("http2.py") || file.contains("/http2/") || file.contains("/h2/") {
            return Ok(true);
        }
        frame = frame.getattr("f_back")?;
        if frame.is_none() {
            break;
        }
    }
    Ok(false)
}

#[cfg(unix)]
fn shut_down(fd: i64) -> bool {
    use nix::sys::socket::{Shutdown, shutdown};
    let Ok(fd) = i32::try_from(fd) else {
        return false;
    };
    // A connection that is still being made says that it is not connected, and its connect ends all the same.
    matches!(
        shutdown(fd, Shutdown::Both),
        Ok(()) | Err(nix::errno::Errno::ENOTCONN)
    )
}

#[cfg(not(unix))]
fn shut_down(_fd: i64) -> bool {
    false
}

// === impl NoCollection ===

impl<'py> NoCollection<'py> {
    fn new(py: Python<'py>) -> PyResult<Self> {
        let gc = py.import("gc")?;
        let on: bool = gc.call_method0("isenabled")?.extract()?;
        if !on {
            return Ok(Self(None));
        }
        gc.call_method0("disable")?;
        Ok(Self(Some(gc)))
    }
}

impl Drop for NoCollection<'_> {
    fn drop(&mut self) {
        if let Some(gc) = &self.0 {
            let _cannot_fail = gc.call_method0("enable");
        }
    }
}
