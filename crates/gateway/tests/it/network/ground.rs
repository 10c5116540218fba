//! Machines and cables: network namespaces that a test makes for itself, and what it does to the cables between them.
//!
//! ```text
//! client ──(Cable::Client)── gateway ──(Cable::Server)── server
//! ```
//!
//! A test starts this binary again, with its own name, in new namespaces (`unshare`), where it may do all this without being root. The cables
//! are `tests/support/wire.py`.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use nix::sched::{CloneFlags, setns};
use tidegate_rig::{FakeUpstream, H2Front, H2Options, Script};
use tokio::sync::oneshot;

use crate::cases::stage::Http;

const INSIDE: &str = "TIDEGATE_TEST_IN_NAMESPACE";
const WIRE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/support/wire.py");
/// What the generator of losses begins with.
const SEED: &str = "5";

/// Networks for documentation: nobody's (RFC 5737).
pub(crate) const GATE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const GATE_TO_SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);

/// True in the namespaces. Outside: runs the test of this path (`module_path!()` and its name) there and is false.
///
/// # Panics
///
/// If it fails there, or if this machine has no namespaces.
pub(crate) fn inside(module: &str, test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        run("ip link set lo up");
        return true;
    }
    let allowed = Command::new("unshare")
        .args(["-rnm", "ip", "link"])
        .output();
    let why = match allowed {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    };
    assert!(
        why.is_none(),
        "{test} makes networks of its own, and cannot: `unshare -rnm ip link`: {}. It takes the packages util-linux and iproute2 and a kernel that \
         allows user namespaces: root, or kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0; in a container, \
         a seccomp profile that allows unshare(2)",
        why.unwrap_or_default()
    );
    // The name as the harness has it: without the crate's.
    let (_, module) = module.split_once("::").expect("a module of a crate");
    let this = std::env::current_exe().expect("a path");
    let output = Command::new("unshare")
        .args(["-rnm"])
        .arg(this)
        .args(["--exact", &format!("{module}::{test}"), "--nocapture"])
        .args(["--test-threads=1"])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && said.contains("1 passed"),
        "in the namespace:\n{said}"
    );
    false
}

pub(crate) fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().expect("a program"))
        .args(words)
        .status();
    assert!(status.expect("it runs").success(), "{command}");
}

/// Runs the test in namespaces of its own, on a thread that may go from one machine to another: the process itself stays the gateway's.
pub(crate) fn play(module: &str, test: &str, scene: impl AsyncFnOnce(Net) + Send + 'static) {
    if !inside(module, test) {
        return;
    }
    let scene = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(scene(Net::lay()));
    });
    if let Err(panic) = scene.join() {
        std::panic::resume_unwind(panic);
    }
}

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cable {
    Client,
    Server,
}

impl Cable {
    pub(crate) const BOTH: [Self; 2] = [Self::Client, Self::Server];

    fn name(self) -> &'static str {
        match self {
            Self::Client => "c",
            Self::Server => "s",
        }
    }

    /// The gateway's end, and the other.
    fn ends(self) -> (Ipv4Addr, Ipv4Addr) {
        match self {
            Self::Client => (GATE, CLIENT),
            Self::Server => (GATE_TO_SERVER, SERVER),
        }
    }

    /// Its ends' hardware addresses: known beforehand, so that nobody has to ask for them on a cable that loses the question.
    fn hardware(self, side: char) -> String {
        let cable = self as u8;
        format!("02:00:00:00:{cable:02x}:{side}{side}")
    }
}

/// The process that is the cables.
struct Wire {
    child: Child,
    tell: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Wire {
    fn start() -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", "wire", "python3", WIRE, SEED])
            .args(Cable::BOTH.map(Cable::name))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let tell = child.stdin.take().expect("piped");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        let mut wire = Self { child, tell, said };
        wire.hears("ready");
        wire
    }

    fn tell(&mut self, cable: Cable, what: &str) -> u64 {
        writeln!(self.tell, "{} {what}", cable.name()).expect("it listens");
        let answer = self.hears("ok");
        answer.parse().expect("frames lost")
    }

    /// What follows `word` on the next line.
    fn hears(&mut self, word: &str) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("it speaks");
        let rest = line.trim().strip_prefix(word);
        rest.unwrap_or_else(|| panic!("the wire says {line:?}"))
            .trim()
            .to_owned()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Gone already, it need not be ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The machines, and the cables between them.
pub(crate) struct Net {
    wire: Wire,
    gate: File,
    /// How often each was started.
    starts: [u32; 2],
}

impl Net {
    fn lay() -> Self {
        run("mount -t tmpfs none /run");
        run("ip netns add wire");
        for cable in Cable::BOTH {
            let name = cable.name();
            for side in ['a', 'b'] {
                let (end, address) = (format!("{name}-{side}"), cable.hardware(side));
                run(&format!(
                    "ip -n wire link add {end} address {address} type veth peer name {end}-in"
                ));
                run(&format!("ip -n wire link set {end}-in up"));
            }
        }
        let wire = Wire::start();
        let mut net = Self {
            wire,
            gate: File::open("/proc/self/ns/net").expect("a namespace"),
            starts: [0; 2],
        };
        for cable in Cable::BOTH {
            let name = cable.name();
            run(&format!(
                "ip -n wire link set {name}-a netns {}",
                std::process::id()
            ));
            net.plug(cable, None, 'a');
            net.starts(cable);
            run(&format!(
                "ip -n wire link set {name}-b netns {}",
                net.machine(cable)
            ));
            net.plug(cable, Some(&net.machine(cable)), 'b');
        }
        net
    }

    /// The namespace at the far end of this cable.
    fn machine(&self, cable: Cable) -> String {
        format!("{}{}", cable.name(), self.starts[cable as usize])
    }

    fn starts(&mut self, cable: Cable) {
        self.starts[cable as usize] += 1;
        let machine = self.machine(cable);
        run(&format!("ip netns add {machine}"));
        run(&format!("ip -n {machine} link set lo up"));
    }

    /// Gives an end of the cable its address.
    fn plug(&self, cable: Cable, machine: Option<&str>, side: char) {
        let at = machine.map_or_else(String::new, |name| format!(" -n {name}"));
        let (near, far) = cable.ends();
        let (own, other, other_side) = match side {
            'a' => (near, far, 'b'),
            _ => (far, near, 'a'),
        };
        let (end, hardware) = (
            format!("{}-{side}", cable.name()),
            cable.hardware(other_side),
        );
        run(&format!("ip{at} addr add {own}/30 dev {end}"));
        run(&format!("ip{at} link set {end} up"));
        run(&format!(
            "ip{at} neigh replace {other} lladdr {hardware} dev {end} nud permanent"
        ));
    }

    /// This thread, and each that it starts, is the gateway's from now on.
    pub(crate) fn at_the_gate(&self) {
        enter(&self.gate);
    }

    /// This thread is the client's from now on.
    pub(crate) fn at_the_client(&self) {
        enter(&namespace(&self.machine(Cable::Client)));
    }

    /// A server of both versions that runs on the server's machine.
    pub(crate) fn serve(&self) -> Server {
        Server::start(namespace(&self.machine(Cable::Server)))
    }

    /// Frames come out so much later, and this share of them never, in either direction.
    pub(crate) fn poor(&mut self, cable: Cable, loss: f64, delay_seconds: f64) {
        self.wire.tell(cable, &format!("loss {loss}"));
        self.wire.tell(cable, &format!("delay {delay_seconds}"));
    }

    /// From now on nothing comes through, and nobody is told.
    pub(crate) fn cut(&mut self, cable: Cable) {
        self.wire.tell(cable, "cut");
    }

    /// It does again.
    pub(crate) fn mend(&mut self, cable: Cable) {
        self.wire.tell(cable, "mend");
    }

    /// The connections that it has carried so far are dead from now on, without a word, as behind a middlebox that drops them; new ones are not.
    pub(crate) fn forget(&mut self, cable: Cable) {
        self.wire.tell(cable, "forget");
    }

    /// Frames that this cable has lost so far.
    pub(crate) fn lost(&mut self, cable: Cable) -> u64 {
        self.wire.tell(cable, "lost")
    }

    /// The machine at the end of a cable that is cut is started again: it has its address, and knows of no connection. What ran on it has to have
    /// been ended.
    pub(crate) fn reboot(&mut self, cable: Cable) {
        let before = self.machine(cable);
        self.starts(cable);
        let now = self.machine(cable);
        run(&format!(
            "ip -n {before} link set {}-b netns {now}",
            cable.name()
        ));
        self.plug(cable, Some(&now), 'b');
        run(&format!("ip netns del {before}"));
    }
}

fn namespace(name: &str) -> File {
    File::open(format!("/run/netns/{name}")).expect("a namespace")
}

fn enter(namespace: &File) {
    setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).expect("it may be entered");
}

/// A fake upstream and its HTTP/2 front, on a thread of their own in the server's namespace.
pub(crate) struct Server {
    pub(crate) up: Arc<FakeUpstream>,
    pub(crate) front: Arc<H2Front>,
    power: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    const PORT: u16 = 8000;
    const PORT_HTTP2: u16 = 8001;

    fn start(namespace: File) -> Self {
        let (started, up) = mpsc::channel();
        let (power, off) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            enter(&namespace);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(async move {
                let up = FakeUpstream::start(Self::addr(Http::One), Script::default()).await;
                let up = Arc::new(up.expect("its port"));
                let front = H2Front::start(Self::addr(Http::Two), up.addr(), H2Options::default());
                let front = Arc::new(front.await.expect("its port"));
                started.send((up, front)).expect("awaited");
                // An error is the end of the test.
                let _ = off.await;
            });
        });
        let (up, front) = up.recv().expect("started");
        Self {
            up,
            front,
            power: Some(power),
            thread: Some(thread),
        }
    }

    /// Where it listens for this version.
    pub(crate) fn addr(http: Http) -> SocketAddr {
        let port = match http {
            Http::One => Self::PORT,
            Http::Two => Self::PORT_HTTP2,
        };
        SocketAddr::new(IpAddr::V4(SERVER), port)
    }
}

impl Drop for Server {
    /// All its sockets are closed, as those of a process that is killed.
    fn drop(&mut self) {
        drop(self.power.take());
        if let Some(thread) = self.thread.take() {
            // How it ended is seen in the test.
            let _ = thread.join();
        }
    }
}
