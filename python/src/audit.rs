//! Refuses what a severed call begins anew: a retry's connection, a request on a connection that is kept.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};

use crate::entry::Entry;

/// Where the running call is found, and what to raise in it.
struct Watch {
    current: Py<PyAny>,
    severed: Py<PyType>,
}

static WATCH: PyOnceLock<Watch> = PyOnceLock::new();

/// Installs the hook, once and for good, as hooks cannot be taken out again. `current`: the context variable of the
/// running call, which has its entry in the attribute `entry`. `severed`: the exception.
#[pyfunction]
pub(crate) fn install_audit(
    py: Python<'_>,
    current: Py<PyAny>,
    severed: Py<PyType>,
) -> PyResult<()> {
    if WATCH.set(py, Watch { current, severed }).is_ok() {
        let hook = wrap_pyfunction!(hook, py)?;
        py.import("sys")?.call_method1("addaudithook", (hook,))?;
    }
    Ok(())
}

#[pyfunction]
fn hook(
    py: Python<'_>,
    event: &Bound<'_, PyString>,
    _arguments: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let name = event.to_str()?;
    if !(name == "socket.connect" || name == "http.client.send") {
        return Ok(());
    }
    let Some(watch) = WATCH.get(py) else {
        return Ok(());
    };
    let call = watch.current.bind(py).call_method1("get", (py.None(),))?;
    if call.is_none() {
        return Ok(());
    }
    let entry = call.getattr("entry")?;
    match entry.cast::<Entry>() {
        Ok(entry) if entry.get().is_severed() => {
            let text = "nobody waits for this call any more: it may not connect or send again";
            Err(PyErr::from_type(watch.severed.bind(py).clone(), text))
        }
        _ => Ok(()),
    }
}
