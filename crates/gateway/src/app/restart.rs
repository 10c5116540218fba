//! What of a new configuration a reload cannot put in place.

use crate::config::{Config, Limits, Log, Server, Timeouts};

/// The settings in which `new` is not what runs since the start, by their names in the file.
pub(super) fn needed(started: &Config, new: &Config) -> Vec<&'static str> {
    let (was, is) = (started.edge_timeouts(), new.edge_timeouts());
    let edge = |t: &Timeouts| (t.request_head, t.write);
    let limits = |l: &Limits| (l.request_head_bytes, l.stream_buffer_bytes);
    let ((head_was, write_was), (head, write)) = (edge(was), edge(is));
    let ((fields_was, buffer_was), (fields, buffer)) =
        (limits(&started.limits), limits(&new.limits));
    let mut all = of_server(&started.server, &new.server);
    all.extend([
        (started.admin != new.admin, "admin.listen"),
        (head_was != head, "timeouts.request_head"),
        (write_was != write, "timeouts.write"),
        (fields_was != fields, "limits.request_head"),
        (buffer_was != buffer, "limits.stream_buffer"),
    ]);
    all.extend(of_log(&started.log, &new.log));
    all.into_iter()
        .filter_map(|(differs, name)| differs.then_some(name))
        .collect()
}

/// Each field is named, so that a new one has to be sorted in.
fn of_server(started: &Server, new: &Server) -> Vec<(bool, &'static str)> {
    let Server {
        listen,
        tls,
        workers,
        tls_handshake,
        keep_alive,
        half_close,
        tcp_user_timeout,
        tcp_keep_alive,
        // A reload changes these, and the content of the TLS files.
        allow_unauthenticated: _,
        connections_max: _,
        drain_lag: _,
        drain: _,
    } = started;
    vec![
        (*listen != new.listen, "server.listen"),
        (tls.is_some() != new.tls.is_some(), "server.tls"),
        (*workers != new.workers, "server.workers"),
        (*tls_handshake != new.tls_handshake, "timeouts.tls"),
        (*keep_alive != new.keep_alive, "server.keep_alive"),
        (*half_close != new.half_close, "server.half_close"),
        (
            *tcp_user_timeout != new.tcp_user_timeout,
            "server.tcp_user_timeout",
        ),
        (
            *tcp_keep_alive != new.tcp_keep_alive,
            "server.tcp_keep_alive",
        ),
    ]
}

fn of_log(started: &Log, new: &Log) -> [(bool, &'static str); 4] {
    let Log {
        format,
        level,
        access,
        journal,
    } = started;
    [
        (*format != new.format, "log.format"),
        (*level != new.level, "log.level"),
        (*access != new.access, "log.access"),
        (*journal != new.journal, "log.journal"),
    ]
}
