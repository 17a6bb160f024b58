//! The guest's network, and servers: of a file, and one that takes memory for each request.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::thread;

use vmtest_guest::pattern::WORDS_PER_PAGE;

use crate::{Context, Result, boot, shell};

/// Most bytes of a request.
const REQUEST_BYTES: usize = 1500;

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
