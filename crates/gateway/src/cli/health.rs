//! `tidegate health`: asks the admin port of a running gateway, for images that have neither a shell nor curl.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::{Exit, Health, Output};

/// For the connection and for each read. The admin port takes no lock that a call waits for, so a gateway that lives answers sooner.
const PATIENCE: Duration = Duration::from_secs(2);
/// An answer is one short word; whatever else stands at the address is cut off here.
const ANSWER_MAX: u64 = 4096;

/// Blocks for a few seconds at most.
pub fn health(args: &Health) -> Output {
    let admin = match args.at.resolve() {
        Ok(admin) => admin,
        Err(why) => return unwell(why),
    };
    match ask(admin) {
        Ok(answer) if answer.starts_with("HTTP/1.1 200 ") => Output {
            stdout: "ok\n".to_owned(),
            stderr: String::new(),
            exit: Exit::Ok,
        },
        Ok(answer) => unwell(format!(
            "{admin} does not answer as a gateway's admin port does: {:?}",
            answer.lines().next().unwrap_or_default()
        )),
        Err(error) => unwell(format!(
            "no answer from the admin port {admin}: {error}; --admin names another"
        )),
    }
}

fn unwell(why: String) -> Output {
    Output {
        stdout: String::new(),
        stderr: why + "\n",
        exit: Exit::Failed,
    }
}

fn ask(admin: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&admin, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = format!("GET /healthz HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::admin::At;
    use super::*;

    fn at(admin: SocketAddr) -> Health {
        Health {
            at: At {
                admin: Some(admin.to_string()),
            },
        }
    }

    /// The answer of something that says `words` and closes.
    fn asked(words: &'static str) -> Output {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap();
            stream.write_all(words.as_bytes()).unwrap();
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        let output = health(&at(admin));
        assert!(server.join().unwrap().starts_with("GET /healthz "));
        output
    }

    #[test]
    fn a_gateway_that_answers_is_well() {
        let output = asked("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n");
        assert_eq!((output.exit, output.stdout.as_str()), (Exit::Ok, "ok\n"));
    }

    #[test]
    fn any_other_answer_is_told() {
        for words in ["HTTP/1.1 404 Not Found\r\n\r\n", "SSH-2.0\r\n", ""] {
            let output = asked(words);
            assert_eq!(output.exit, Exit::Failed);
            let first = words.lines().next().unwrap_or_default();
            assert!(output.stderr.contains(first), "{}", output.stderr);
        }
    }

    #[test]
    fn nobody_there_is_told_with_the_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        drop(listener);
        let output = health(&at(admin));
        assert_eq!(output.exit, Exit::Failed);
        assert!(output.stderr.contains(&admin.to_string()));
    }
}
