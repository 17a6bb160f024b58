//! The guest's network, servers: of a file, and one that takes memory for each request; and a
//! client whose network device writes to memory that no processor has touched.

use std::fs::{self, File};
use std::hint::black_box;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionread;
use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE};

use crate::files::{PAGE_BYTES, compare, write};
use crate::{Context, Result, boot, shell};

/// Most bytes of a request.
const REQUEST_BYTES: usize = 1500;
/// Limits of the kernel for what has come and was not read: for each connection in bytes, and for
/// all together in pages.
const FOR_EACH: &str = "/proc/sys/net/ipv4/tcp_rmem";
const FOR_ALL: &str = "/proc/sys/net/ipv4/tcp_mem";
/// How much more of its memory the kernel counts for what has come than came, at most.
const OVERHEAD: u64 = 4;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time after which a connection over which nothing comes is dead, also for a guest that is
/// translated twice.
const NO_MORE: Duration = Duration::from_secs(120);

/// Loads the driver of the network device, and gives the device its address, such as
/// `10.0.2.15/24`.
pub fn begin(address: &str, gateway: &str) -> Result<()> {
    boot::load_for("virtio_net")?;
    shell::run(&format!(
        "ip link set lo up && ip address add {address} dev eth0 && ip link set eth0 up \
         && ip route add default via {gateway}"
    ))
    .map(drop)
}

/// Answers datagrams on `port` from now on, each with its own content. For each one that is not
/// empty, the server takes `bytes` of memory, writes to every page of it, and keeps it.
pub fn answer_udp(port: &str, bytes: u64) -> Result<()> {
    let socket = UdpSocket::bind(format!("0.0.0.0:{port}")).context("bind")?;
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut request = [0; REQUEST_BYTES];
        while let Ok((length, from)) = socket.recv_from(&mut request) {
            if length > 0 {
                kept.push(touched(bytes));
            }
            // A client that has gone needs no answer.
            let _ = socket.send_to(&request[..length], from);
        }
    });
    Ok(())
}

/// Takes twice as much and touches the part that is aligned to its size, so that the kernel can use
/// huge pages for it.
fn touched(bytes: u64) -> Vec<u64> {
    let mut words = vec![0; (2 * bytes / 8) as usize];
    let address = words.as_ptr().addr() as u64;
    let first = ((address.next_multiple_of(bytes) - address) / 8) as usize;
    let aligned = &mut words[first..first + (bytes / 8) as usize];
    aligned.iter_mut().step_by(WORDS_PER_PAGE).for_each(|word: &mut u64| *word = black_box(1));
    words
}

/// Serves a file on `port` from now on: whoever connects gets all of it.
pub fn serve_file(port: &str, path: &str) -> Result<()> {
    let listener = TcpListener::bind(format!("0.0.0.0:{port}")).context("bind")?;
    let path = path.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The client sees it if less than the whole file comes.
            let _ = File::open(&path).and_then(|mut file| io::copy(&mut file, &mut &stream));
        }
    });
    Ok(())
}

/// Sends `bytes` to a server, such as `10.0.2.2:7`, that sends them back. Reads nothing until all
/// have come: until then they are where the network device wrote them. Returns how many bytes came
/// back wrong.
pub fn exchange(server: &str, bytes: u64, generation: u64) -> Result<String> {
    let (room, pages) = (OVERHEAD * bytes, bytes / PAGE_BYTES as u64);
    let room_pages = room / PAGE_BYTES as u64;
    fs::write(FOR_EACH, format!("4096 {room} {room}")).context(FOR_EACH)?;
    fs::write(FOR_ALL, format!("{room_pages} {room_pages} {room_pages}")).context(FOR_ALL)?;
    let address: SocketAddr = server.parse().context(server)?;
    let stream = TcpStream::connect_timeout(&address, NO_MORE).context(server)?;
    stream.set_write_timeout(Some(NO_MORE)).context(server)?;
    let pattern = Pattern::new(server, generation);
    write(&stream, pattern, pages).context(server)?;
    stream.shutdown(Shutdown::Write).context(server)?;
    await_bytes(&stream, bytes).context(server)?;
    Ok(compare(&stream, pattern, pages).context(server)?.to_string())
}

/// Waits until the kernel has received so many bytes. A network that loses what it transmits must
/// not keep the guest from its answer.
fn await_bytes(stream: &TcpStream, bytes: u64) -> Result<()> {
    let (mut come, mut since) = (0, Instant::now());
    while come < bytes {
        if since.elapsed() > NO_MORE {
            return Err(format!("{come} of {bytes} bytes have come, and no more"));
        }
        thread::sleep(LOOK_EVERY);
        let now = ioctl_fionread(stream).context("FIONREAD")?;
        if now > come {
            (come, since) = (now, Instant::now());
        }
    }
    Ok(())
}
