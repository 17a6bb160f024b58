//! How many connections there are, in all and of each client.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most connections.
pub const MOST: usize = 256;
/// Most connections of one client. One that opens more leaves the others room.
pub const EACH_MOST: usize = 32;

/// The connections of each client.
#[derive(Clone, Default)]
pub struct Visitors(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A connection. It counts until it is dropped.
pub struct Visit {
    visitors: Visitors,
    client: IpAddr,
}

impl Visitors {
    /// Counts a connection from this address, unless there are too many.
    pub fn enter(&self, address: IpAddr) -> Option<Visit> {
        let client = client(address);
        let mut clients = self.lock();
        let its = clients.get(&client).copied().unwrap_or_default();
        if its >= EACH_MOST || clients.values().sum::<usize>() >= MOST {
            return None;
        }
        clients.insert(client, its + 1);
        Some(Visit { visitors: self.clone(), client })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut clients = self.visitors.lock();
        let left = clients.get(&self.client).map_or(0, |its| its.saturating_sub(1));
        match left {
            0 => clients.remove(&self.client),
            left => clients.insert(self.client, left),
        };
    }
}

/// What counts as one client: an address, or the half of an IPv6 address that names a network, as a
/// machine may choose the other half.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_client_takes_no_more_than_its_part() {
        let visitors = Visitors::default();
        let mut visits: Vec<Visit> =
            (0..EACH_MOST).filter_map(|_| visitors.enter(ip("192.0.2.1"))).collect();
        assert_eq!(visits.len(), EACH_MOST);
        for same in ["192.0.2.1", "::ffff:192.0.2.1"] {
            assert!(visitors.enter(ip(same)).is_none(), "{same}");
        }
        assert!(visitors.enter(ip("192.0.2.2")).is_some());
        visits.pop();
        assert!(visitors.enter(ip("192.0.2.1")).is_some());
        drop(visits);
        assert!(visitors.lock().is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let visitors = Visitors::default();
        let enter = |n: usize| visitors.enter(ip(&format!("2001:db8::{n:x}")));
        let visits: Vec<Visit> = (1..=EACH_MOST).filter_map(enter).collect();
        assert_eq!(visits.len(), EACH_MOST);
        assert!(enter(EACH_MOST + 1).is_none());
        assert!(visitors.enter(ip("2001:db8:0:1::1")).is_some());
    }

    #[test]
    fn all_clients_together_have_a_bound() {
        let visitors = Visitors::default();
        let enter = |n: usize| visitors.enter(ip(&format!("198.51.{}.{}", n / 256, n % 256)));
        let visits: Vec<Visit> = (0..2 * MOST).filter_map(enter).collect();
        assert_eq!(visits.len(), MOST);
    }
}
