//! What `tidegate demo` says.

use std::net::SocketAddr;

/// Printed once it runs: what to type, what to look at. The commands are for the shell that it was typed into, which may not find a program
/// of that name.
pub fn text(program: &str, data: SocketAddr, admin: Option<SocketAddr>) -> String {
    let admin = admin.map_or_else(String::new, |admin| {
        format!(
            "Watch what runs, call by call and in sum:\n  {program} calls --admin {admin}\n  \
             curl -s http://{admin}/metrics | grep -E '^tidegate_(running|attended|abandoned|queued)\\{{'\n"
        )
    });
    format!(
        "Tidegate demo: the gateway in front of a fake model server, both on this machine.\n\n\
         Ask for a stream, and hang up in the middle with Ctrl-C:\n  \
         curl -N http://{data}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\":\"demo\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]}}'\n\n\
         {admin}\n\
         Each call leaves one line below: when and why its wait ended, when and why its work ended.\n\
         For a real server: {program} serve --upstream http://127.0.0.1:8000\n\n"
    )
}
